"""Family × stage × runner × format, from the registry: what `tool list models` and docs/models.md show."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.artifacts.formats import FORMATS
from toolkit.artifacts.gguf.metadata import spelling
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.eyes.mmproj import Mmproj
from toolkit.models.family import Family
from toolkit.models.gguf import Gguf
from toolkit.models.registry import build, families
from toolkit.models.spec import DecoderSpec
from toolkit.models.tiny import tiny_config
from toolkit.runners.native.program import unsupported

NOT_ASKED = "not known before a checkpoint is opened: the family has no tiny model"
STAGES = ("lite", "convert", "chat", "serve")
_OTHER_NAMES = {"smooth_quant": "w8a8"}


@dataclass(frozen=True)
class Coverage:
    """Of one family. ``native``: None where the native runner has it, else why pytorch's stands in. ``no_method``: the
    methods of `lite` that refuse it. ``gguf``: the architecture as which it is read and, but for encoders, written, or
    None and ``no_gguf``, why. ``formats``: what its weights are read from."""

    family: Family
    native: str | None
    no_method: tuple[str, ...]
    gguf: str | None
    no_gguf: str | None
    formats: tuple[str, ...]

    @property
    def backends(self) -> tuple[str, ...]:
        """Those that compute it by themselves on a CPU."""
        return ("pytorch",) if self.native is not None else ("pytorch", "turbomind")


def all_formats() -> tuple[str, ...]:
    """The names of all formats that weights are read from, in the order of the readers."""
    return ("hf", *(_OTHER_NAMES.get(name, name) for name in FORMATS if name != "gguf"), "gguf", "engine")


def native_refuses() -> dict[str, str]:
    """Family → why the native runner does not take it, of those that it does not. "not known" → why there is no answer:
    a family from outside that cannot be read."""
    try:
        found = coverage(families())
    except ToolkitError as error:
        return {"not known": str(error)}
    return {one.family.name: one.native for one in found if one.family.tiny and one.native is not None}


def coverage(known: Sequence[Family]) -> list[Coverage]:
    """What each family runs on and is written as. Raises ToolkitError for one whose tiny model cannot be built."""
    read = {family.gguf.family for family in known if isinstance(family.gguf, Gguf)}
    read |= {family.name for family in known if isinstance(family.gguf, Gguf | Mmproj)}
    found = []
    for family in known:
        spec = build(tiny_config(family), f"{family.name}: its tiny model", [family])[0] if family.tiny else None
        arch, why = _gguf(family, spec)
        formats = tuple(name for name in all_formats() if name != "gguf" or family.name in read)
        native = NOT_ASKED if spec is None else unsupported(spec)
        refused = () if spec is None or spec.keeps_keys() else ("kv",)
        found.append(Coverage(family, native, refused, arch, why, formats))
    return found


def _gguf(family: Family, spec: DecoderSpec | None) -> tuple[str | None, str | None]:
    """(architecture, why there is none)."""
    found = family.gguf
    if isinstance(found, Mmproj):
        found = spelling(spec) if spec is not None else NOT_ASKED
        return (f"{found.arch} + mmproj", None) if isinstance(found, Gguf) else (None, found)
    return (found.arch, None) if isinstance(found, Gguf) else (None, found)
