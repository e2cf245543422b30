"""LoRA adapters as PEFT writes them: ``adapter_config.json`` beside ``adapter_model.safetensors`` or .bin.

Source: https://huggingface.co/docs/peft (LoraConfig). Tensors are named ``base_model.model.MODULE.lora_A.weight``
[r, in] and ``….lora_B.weight`` [out, r], MODULE as in the base checkpoint; they add scale · B · A to its weight. Of an
embedding they are ``lora_embedding_A`` [r, vocabulary] and ``lora_embedding_B`` [hidden, r]. DoRA's
``lora_magnitude_vector`` [out] holds how long the rows of the sum are to be. ``MODULE.weight`` takes the place of the
base's (``modules_to_save``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from toolkit.artifacts.adapters.config import CONFIG, Scaling, read_config, scale_of
from toolkit.artifacts.adapters.experts import stack_of
from toolkit.artifacts.adapters.modules import as_computed, as_stored, idle_modules, modules_of
from toolkit.artifacts.scales import UNSCALED, Scales
from toolkit.artifacts.weight_files.find import file_headers
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.scales import AllScales
    from toolkit.models.spec import DecoderSpec, StoredTensor

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MAX_RANK = 4096
STACKED_RANK = 128  # of adapters that the tensor runner stacks
_SIDES = {
    "lora_A": "A",
    "lora_B": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
    "lora_magnitude_vector": "magnitude",
    "modules_to_save": "whole",
}
_NAME = re.compile(
    rf"(?:base_model\.model\.)?(?P<module>.+?)(?:\.(?P<side>{'|'.join(_SIDES)}))?(?:\.default)?(?:\.weight)?"
)
_BASE = ".base_layer.weight"  # how the base's own weights are named that PEFT may save beside an adapter


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a linear: ``b @ a``. ``stored_a`` [rank, in] and ``stored_b`` [out, rank]: as the file
    has them, perhaps in its mapped memory; ``scale``: of their product. ``magnitude``: float32 [out], how long the rows
    of the sum are made (DoRA); None = as they are. ``folded``: what has been folded into the linear since the adapter
    was trained."""

    stored_a: Tensor
    stored_b: Tensor
    scale: float = 1.0
    magnitude: Tensor | None = None
    folded: Scales = UNSCALED

    @property
    def a(self) -> Tensor:
        """float32 [rank, in], for the linear as it is now."""
        return replace(self.folded, divisors=None)(self.stored_a.float())

    @property
    def b(self) -> Tensor:
        """float32 [out, rank], scaled, for the linear as it is now."""
        made = replace(self.folded, columns=None)(self.stored_b.float())
        return made if self.scale == 1 else made * self.scale

    def onto(self, weight: Tensor) -> Tensor:
        """The linear's ``weight``, float32 [out, in], with what is added to it."""
        changed = weight + self.b @ self.a
        if self.magnitude is None:
            return changed
        return changed * (self.magnitude / self.folded.inverse()(changed).norm(dim=1))[:, None]


@dataclass(frozen=True)
class Whole:
    """A matrix that takes the place of the base's: float32 [out, in]."""

    weight: Tensor


Change = LowRank | Whole
C = TypeVar("C", bound=Change)


def fold(changes: Mapping[str, C], scales: AllScales | None) -> dict[str, C]:
    """``changes`` of a model as the same model takes them whose linears have these ``scales`` folded in. ToolkitError
    where those are of another one."""
    if scales is None:
        return dict(changes)
    return {name: _folded(name, change, scales.get(name, UNSCALED)) for name, change in changes.items()}


def _folded(name: str, change: C, own: Scales) -> C:
    inputs = (change.weight if isinstance(change, Whole) else change.stored_a).shape[1]
    outputs = (change.weight if isinstance(change, Whole) else change.stored_b).shape[0]
    for kind, vector, size in (("columns", own.columns, inputs), ("rows", own.divisors, outputs)):
        if vector is not None and len(vector) != size:
            raise ToolkitError(
                f"{name}: expected scales of {size} {kind} beside it, found {len(vector)}; make the model again"
            )
    if isinstance(change, Whole):
        return replace(change, weight=own(change.weight))
    return replace(change, folded=own)


def read_adapter(path: Path, spec: DecoderSpec, stored: Sequence[StoredTensor] = ()) -> dict[str, LowRank]:
    """The adapter in directory ``path`` by the canonical names of the linears that it changes, for a runner that adds
    low ranks to linears of layers and does nothing else; for others see ``read_changes``.

    ``stored``: the base checkpoint's tensors, for modules that hold several linears; without it modules must have
    canonical names. Raises ToolkitError, one line that names file and field or tensor, for an adapter of another kind,
    one that changes what is no linear of a layer, and shapes that do not fit the model.
    """
    plain: dict[str, LowRank] = {}
    for name, change in _read(path, spec, stored, modules_of(spec, stored), STACKED_RANK).items():
        if isinstance(change, Whole) or change.magnitude is not None:
            what = "modules_to_save: expected none" if isinstance(change, Whole) else "use_dora: expected False"
            raise ToolkitError(
                f"{path / CONFIG}: {what}, found it of {name}; this backend cannot run it, merge the adapter into the "
                "checkpoint instead"
            )
        plain[name] = change
    return plain


def read_changes(path: Path, spec: DecoderSpec, stored: Sequence[StoredTensor] = ()) -> dict[str, Change]:
    """As ``read_adapter``, with all that PEFT's LoRA can be: DoRA, modules saved whole, embedding, head, experts and
    routers."""
    return _read(path, spec, stored, modules_of(spec, stored, wide=True), MAX_RANK)


def changes_of_modules(path: Path, spec: DecoderSpec, stored: Sequence[StoredTensor]) -> dict[StoredTensor, Change]:
    """As ``read_changes``, by the modules of the checkpoint, each whole and with its rows as they are there; also of
    what makes layers' own embeddings, which runners do not add low ranks to."""
    return dict(_by_module(path, spec, stored, modules_of(spec, stored, wide=True, outer=True), MAX_RANK))


def _read(
    path: Path,
    spec: DecoderSpec,
    stored: Sequence[StoredTensor],
    modules: Mapping[str, StoredTensor],
    most: int,
) -> dict[str, Change]:
    found: dict[str, Change] = {}
    for target, change in _by_module(path, spec, stored, modules, most):
        found |= _split_whole(target, change.weight) if isinstance(change, Whole) else _split(target, change)
    return found


def _by_module(
    path: Path,
    spec: DecoderSpec,
    stored: Sequence[StoredTensor],
    modules: Mapping[str, StoredTensor],
    most: int,
) -> Iterator[tuple[StoredTensor, Change]]:
    from toolkit.artifacts.weight_files.mapped import map_file

    scaling = read_config(path)
    file = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise ToolkitError(f"{path}: expected {' or '.join(WEIGHTS)} there; fetch or save the adapter again")
    pairs = _pairs(file, next(file_headers([file]))[1])
    _check_promised(path / CONFIG, file, scaling, pairs)
    mapped = map_file(file)
    alone = {x.name: x for item in modules.values() for x in item.alone()}
    alone |= {item.parts[0].name: item for item in modules.values() if len(item.parts) == 1}  # as merging needs them
    idle = idle_modules(spec, modules)
    for module, sides in pairs.items():
        if module in idle or as_stored(module, idle) in idle:
            continue
        target = modules.get(module) or modules.get(as_stored(module, modules)) or alone.get(as_computed(module))
        stack = None
        if target is None and sides.keys() == {"A", "B"}:
            stack = stack_of(module, sides["A"].shape, sides["B"].shape, spec, stored)
        if stack is not None and stack.names <= alone.keys():
            rank = sides["A"].shape[0] // len(stack.parts)
            _check_rank(file, module, rank, most)
            pair = _load(file, mapped, module, sides, scale_of(path / CONFIG, scaling, stack.name, rank))
            for name, a, b in stack.split(pair.stored_a, pair.stored_b):
                yield alone[name], LowRank(a, b, pair.scale)
            continue
        if target is None:
            known = stack is not None or module in modules_of(spec, stored, wide=True)
            raise ToolkitError(
                f"{file}: it changes {module}, expected linears of attention or feed-forward layers alone "
                "(no embedding, head, router, expert or kv_b_proj); merge the adapter into the checkpoint instead"
                if known or not stored or any(s.name == module for s in stored)
                else f"{file}: it changes {module}, which the model has not; the adapter is of another model"
            )
        _check_shapes(file, module, sides, target, most)
        if "whole" in sides:
            weight = _stored(file, mapped, module, sides["whole"]).float()
            yield target, Whole(weight.T if target.transposed else weight)
        else:
            scale = scale_of(path / CONFIG, scaling, module, sides["A"].shape[0])
            yield target, _load(file, mapped, module, sides, scale)


def _check_promised(config: Path, file: Path, told: Scaling, pairs: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """What the config says there is beside low-rank matrices must be there."""
    whole = [module for module, sides in pairs.items() if "whole" in sides]
    for name in told.modules_to_save or ():
        if not any(module == name or module.endswith(f".{name}") for module in whole):
            raise ToolkitError(f"{config}: modules_to_save: expected the weight of {name} in {file.name}, found none")
    if told.use_dora and not any("magnitude" in sides for sides in pairs.values()):
        raise ToolkitError(f"{config}: use_dora: expected lora_magnitude_vector tensors in {file.name}, found none")


def _pairs(file: Path, infos: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Module -> its tensors "A" and "B"."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, info in infos.items():
        if name.endswith(_BASE):
            continue
        match = _NAME.fullmatch(name)
        if match is None or ".lora_" in match["module"] or (match["side"] is None and not name.endswith(".weight")):
            raise ToolkitError(f"{file}: tensor {name}: expected names like MODULE.lora_A.weight alone")
        side = _SIDES.get(match["side"] or "", "whole")
        if info.dtype not in ("F32", "F16", "BF16") or (len(info.shape) != 2 and side != "magnitude"):
            raise ToolkitError(f"{file}: tensor {name}: expected a matrix of F32, F16 or BF16, found {info}")
        pairs.setdefault(match["module"], {})[side] = info
    for module, sides in pairs.items():
        if "whole" in sides and len(sides) > 1:
            raise ToolkitError(f"{file}: {module}: expected low-rank matrices or one in its place, found both")
        for side in "AB":
            if "whole" not in sides and side not in sides:
                raise ToolkitError(f"{file}: tensor {module}.lora_{side}.weight is missing beside its partner")
    if not pairs:
        raise ToolkitError(f"{file}: expected low-rank matrices, found no tensors")
    return pairs


def _check_shapes(file: Path, module: str, sides: Mapping[str, TensorInfo], target: StoredTensor, most: int) -> None:
    shape = target.matrix[::-1] if target.kind == "embed" else target.matrix
    if "whole" in sides:
        if sides["whole"].shape != target.shape:
            raise ToolkitError(
                f"{file}: {module}.weight: expected {list(target.shape)}, found {list(sides['whole'].shape)}; the "
                "adapter is of another model"
            )
        return
    a, b = sides["A"].shape, sides["B"].shape
    if a[1] != shape[1] or b[0] != shape[0] or a[0] != b[1]:
        raise ToolkitError(
            f"{file}: {module}: expected lora_A [r, {shape[1]}] and lora_B [{shape[0]}, r], found {list(a)} and "
            f"{list(b)}; the adapter is of another model"
        )
    _check_rank(file, module, a[0], most)
    if "magnitude" in sides and math.prod(sides["magnitude"].shape) != shape[0]:
        raise ToolkitError(
            f"{file}: {module}.lora_magnitude_vector: expected [{shape[0]}], found {list(sides['magnitude'].shape)}; "
            "the adapter is of another model"
        )
    if "magnitude" in sides and target.kind == "embed":
        raise ToolkitError(f"{file}: {module}: DoRA of an embedding does not run; merge the adapter instead")


def _check_rank(file: Path, module: str, rank: int, most: int) -> None:
    if not 1 <= rank <= most:
        raise ToolkitError(f"{file}: {module}: rank: expected 1 to {most}, found {rank}; merge the adapter instead")


def _load(file: Path, mapped: Tensor, module: str, sides: Mapping[str, TensorInfo], scale: float) -> LowRank:
    made = {side: _stored(file, mapped, f"{module}.lora_{side}", info) for side, info in sides.items()}
    magnitude = made["magnitude"].float().reshape(-1) if "magnitude" in made else None
    return LowRank(made["A"], made["B"], scale, magnitude)


def _stored(file: Path, mapped: Tensor, name: str, info: TensorInfo) -> Tensor:
    from toolkit.artifacts.weight_files.mapped import view_tensor

    found = view_tensor(mapped, info)
    # a sum takes a tenth of the time; of large numbers it may overflow
    if not math.isfinite(found.sum().item()) and not found.isfinite().all():
        raise ToolkitError(f"{file}: {name}: expected finite numbers, found NaN or infinity; train or save it again")
    return found


def _split_whole(target: StoredTensor, weight: Tensor) -> dict[str, Change]:
    from torch import Tensor

    from toolkit.artifacts.weights import split_parts

    if target.unit_rows:
        weight = weight / weight.norm(dim=1, keepdim=True)
    found: dict[str, Change] = {}
    for name, rows in split_parts(target, weight):
        assert isinstance(rows, Tensor)
        found[name] = Whole(rows)
    return found


def _split(target: StoredTensor, pair: LowRank) -> dict[str, LowRank]:
    """One pair for each linear inside a module: the same ``a``, some rows of ``b``."""
    from torch import Tensor

    from toolkit.artifacts.weights import split_parts

    found = {}
    lengths = {} if pair.magnitude is None else dict(split_parts(target, pair.magnitude))
    for name, rows in split_parts(target, pair.stored_b):
        magnitude = lengths.get(name)
        assert isinstance(rows, Tensor) and not (magnitude is not None and not isinstance(magnitude, Tensor))
        found[name] = replace(pair, stored_b=rows, magnitude=magnitude)
    return found
