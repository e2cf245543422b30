"""LoRA adapters as PEFT writes them: ``adapter_config.json`` beside ``adapter_model.safetensors`` or .bin.

Source: https://huggingface.co/docs/peft (LoraConfig). Tensors are named ``base_model.model.MODULE.lora_A.weight``
[r, in] and ``….lora_B.weight`` [out, r], MODULE as in the base checkpoint; they add scale · B · A to its weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.weight_files.find import file_headers
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.base.record import read
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.models.spec import DecoderSpec, StoredTensor

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
MAX_RANK = 128
N = TypeVar("N", int, float)
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# Fields that change what an adapter means, and the value at which they do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
}


@dataclass(frozen=True)
class _Scaling:
    """What of PEFT's LoraConfig says how the matrices are scaled; absent fields are as PEFT has them. The patterns give
    single modules another rank or alpha."""

    r: int | None = None
    lora_alpha: float = 8.0
    use_rslora: bool | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a linear: ``b @ a``. ``a``: float32 [rank, in]; ``b``: float32 [out, rank], scaled."""

    a: Tensor
    b: Tensor


def read_adapter(path: Path, spec: DecoderSpec, stored: Sequence[StoredTensor] = ()) -> dict[str, LowRank]:
    """The adapter in directory ``path`` by the canonical names of the linears that it changes.

    ``stored``: the base checkpoint's tensors, for modules that hold several linears; without it modules must have
    canonical names. Raises ToolkitError, one line that names file and field or tensor, for an adapter of another kind,
    one that changes what is no linear of a layer, and shapes that do not fit the model.
    """
    scaling = _read_config(path)
    file = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise ToolkitError(f"{path}: expected {' or '.join(WEIGHTS)} there; fetch or save the adapter again")
    pairs = _pairs(file, next(file_headers([file]))[1])
    modules = _modules(spec, stored)
    found: dict[str, LowRank] = {}
    for module, sides in pairs.items():
        target = modules.get(module)
        if target is None:
            raise ToolkitError(
                f"{file}: it changes {module}, expected linears of attention or feed-forward layers alone "
                "(no embedding, head, router, expert or kv_b_proj); merge the adapter into the checkpoint instead"
            )
        _check_shapes(file, module, sides, target.shape)
        found |= _split(target, _load(file, sides, _scale(path / CONFIG, scaling, module, sides["A"].shape[0])))
    return found


def _read_config(path: Path) -> _Scaling:
    if not (path / CONFIG).is_file():
        raise ToolkitError(f"{path}: expected a PEFT adapter, found no {CONFIG} there")
    config = read_json_object(path / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ToolkitError(f"{path / CONFIG}: peft_type: expected LORA, found {config.get('peft_type')!r:.40}")
    for name, plain in _PLAIN.items():
        if config.get(name) not in plain:
            raise ToolkitError(
                f"{path / CONFIG}: {name}: expected {plain[1]!r}, found {config[name]!r:.60}; "
                "merge the adapter into the checkpoint instead"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(("pissa", "olora", "corda", "loftq")):
        raise ToolkitError(
            f"{path / CONFIG}: init_lora_weights: found {start!r:.40}, which changes the base weights too; "
            "convert the adapter to plain LoRA first"
        )
    try:
        return read(_Scaling, config, others=True)
    except ValueError as error:
        raise ToolkitError(f"{path / CONFIG}: {error}") from None


def _pairs(file: Path, infos: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Module -> its tensors "A" and "B"."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, info in infos.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ToolkitError(f"{file}: tensor {name}: expected names like MODULE.lora_A.weight alone")
        if info.dtype not in ("F32", "F16", "BF16") or len(info.shape) != 2:
            raise ToolkitError(f"{file}: tensor {name}: expected a matrix of F32, F16 or BF16, found {info}")
        pairs.setdefault(match["module"], {})[match["side"]] = info
    for module, sides in pairs.items():
        if len(sides) == 1:
            missing = "B" if "A" in sides else "A"
            raise ToolkitError(f"{file}: tensor {module}.lora_{missing}.weight is missing beside its partner")
    if not pairs:
        raise ToolkitError(f"{file}: expected low-rank matrices, found no tensors")
    return pairs


def _modules(spec: DecoderSpec, stored: Sequence[StoredTensor]) -> dict[str, StoredTensor]:
    """Modules that an adapter may change, by their names on disk."""
    from toolkit.models.spec import Part, StoredTensor

    linears = {x.name: x for layer in spec.layers for s in layer.sublayers for x in s.mixer.adaptable()}
    found = {s.name: s for s in stored if s.kind == "linear" and all(p.name in linears for p in s.parts)}
    for name, x in linears.items():
        found.setdefault(name, StoredTensor(name, "linear", (x.out_features, x.in_features), (Part(name),)))
    return found


def _check_shapes(file: Path, module: str, sides: Mapping[str, TensorInfo], shape: tuple[int, ...]) -> None:
    a, b = sides["A"].shape, sides["B"].shape
    if a[1] != shape[1] or b[0] != shape[0] or a[0] != b[1]:
        raise ToolkitError(
            f"{file}: {module}: expected lora_A [r, {shape[1]}] and lora_B [{shape[0]}, r], found {list(a)} and "
            f"{list(b)}; the adapter is of another model"
        )
    if not 1 <= a[0] <= MAX_RANK:
        raise ToolkitError(f"{file}: {module}: rank: expected 1 to {MAX_RANK}, found {a[0]}; merge the adapter instead")


def _scale(file: Path, scaling: _Scaling, module: str, rank: int) -> float:
    """lora_alpha / r, or with rsLoRA / sqrt(r)."""
    alpha = _by_pattern(file, "alpha_pattern", scaling.alpha_pattern, module, scaling.lora_alpha)
    declared = _by_pattern(file, "rank_pattern", scaling.rank_pattern, module, rank if scaling.r is None else scaling.r)
    if declared != rank:
        raise ToolkitError(f"{file}: r: expected {rank}, the rank of {module}'s tensors, found {declared}")
    if not math.isfinite(alpha):
        raise ToolkitError(f"{file}: lora_alpha: expected a number, found {alpha}")
    return alpha / (math.sqrt(rank) if scaling.use_rslora else rank)


def _by_pattern(file: Path, field: str, patterns: dict[str, N] | None, module: str, default: N) -> N:
    """The value of the first key that is the module's name or, as a regular expression, its end."""
    for key, value in (patterns or {}).items():
        try:
            if re.fullmatch(rf"(?:.*\.)?(?:{key})", module):
                return value
        except re.error as error:
            raise ToolkitError(f"{file}: {field}: {key!r:.40} is no regular expression: {error}") from None
    return default


def _load(file: Path, sides: Mapping[str, TensorInfo], scale: float) -> LowRank:
    from toolkit.artifacts.weight_files.mapped import map_file, view_tensor

    mapped = map_file(file)
    return LowRank(view_tensor(mapped, sides["A"]).float(), view_tensor(mapped, sides["B"]).float() * scale)


def _split(target: StoredTensor, pair: LowRank) -> dict[str, LowRank]:
    """One pair for each linear inside a module: the same ``a``, some rows of ``b``."""
    from torch import Tensor

    from toolkit.artifacts.weights import split_parts

    found = {}
    for name, rows in split_parts(target, pair.b):
        assert isinstance(rows, Tensor)
        found[name] = LowRank(pair.a, rows)
    return found
