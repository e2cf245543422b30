"""From saved layers to an ordinary Hugging Face checkpoint in the family's own tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Dense, Fp8, GroupInt, Weight
from toolkit.artifacts.checkpoint_writer import write_model
from toolkit.artifacts.json_file import write_json_object
from toolkit.artifacts.side_files import copy_side_files
from toolkit.artifacts.stage import Stage
from toolkit.artifacts.weights import load_stored
from toolkit.errors import ToolkitError
from toolkit.models.spec import StoredTensor
from toolkit.quant.layers import LayerSource
from toolkit.quant.layerwise import saved_layers

WriteLinear = Callable[[str, Weight], dict[str, Tensor]]


def write_checkpoint(
    source: LayerSource, stage: Stage, write_linear: WriteLinear, quantization: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Write weights, config.json and side files to ``stage.dir``; one layer in memory at a time."""
    write_model(stage.dir, _tensors(source, stage, write_linear, dtype))
    config = {k: v for k, v in source.checkpoint.config.items() if k not in ("quantization_config", "torch_dtype")}
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_json_object(stage.dir / "config.json", {**config, "quantization_config": dict(quantization)})
    copy_side_files(source.checkpoint, stage.dir)


def dense_modules(source: LayerSource) -> list[str]:
    """Names on disk of the linears inside layers that stay dense, for ``modules_to_not_convert``."""
    return [item.name for items in source.stored for item in items if item.kind == "router"]


def _tensors(
    source: LayerSource, stage: Stage, write_linear: WriteLinear, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for item in source.outer:
        if item.optional and f"{item.name}.weight" not in source.checkpoint:
            continue
        value, bias = load_stored(source.checkpoint, item)
        yield _suffixed(item), _cast(value if isinstance(value, Tensor) else value.dequantize(), dtype, item.name)
        if bias is not None:
            yield f"{item.name}.bias", _cast(bias, dtype, item.name)
    for items, result in zip(source.stored, saved_layers(stage, len(source.stored)), strict=True):
        for item in items:
            if item.parts[0].name not in result.weights:
                continue  # optional and absent
            joined = join_parts(item, [result.weights[p.name] for p in item.parts])
            if isinstance(joined, Tensor):
                yield _suffixed(item), _cast(joined, dtype, item.name)
            elif isinstance(joined, Dense):
                yield f"{item.name}.weight", _cast(joined.weight, dtype, item.name)
            else:
                yield from write_linear(item.name, joined).items()
            if item.bias:
                biases: list[Weight | Tensor] = [result.weights[f"{p.name}.bias"] for p in item.parts]
                whole = join_parts(item, biases)
                assert isinstance(whole, Tensor)
                yield f"{item.name}.bias", _cast(whole, dtype, item.name)


def _suffixed(item: StoredTensor) -> str:
    return item.name if item.kind == "vector" else f"{item.name}.weight"


def _cast(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    cast = value.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        raise ToolkitError(
            f"{name}: values up to {float(value.abs().max()):.3g} do not fit {str(dtype).removeprefix('torch.')}; "
            "give --dtype bfloat16"
        )
    return cast


def join_parts(item: StoredTensor, parts: list[Weight | Tensor]) -> Weight | Tensor:
    """The stored module from its canonical parameters (in the order of ``item.parts``), every row in its place."""
    if len(parts) == 1 and item.parts[0].rows is None:
        return parts[0]
    places = [
        torch.cat([torch.arange(start, stop) for start, stop in part.rows or ((0, item.shape[0]),)])
        for part in item.parts
    ]
    order = torch.argsort(torch.cat(places))
    stacked = _stack(parts)
    return stacked[order] if isinstance(stacked, Tensor) else stacked.take_rows(order)


def _stack(parts: list[Weight | Tensor]) -> Weight | Tensor:
    """Rows of all the parts, one after another; the parts are of one form."""
    first = parts[0]

    def join(field: str) -> Tensor:
        return torch.cat([getattr(p, field) for p in parts])

    match first:
        case Tensor():
            return torch.cat([p for p in parts if isinstance(p, Tensor)])
        case GroupInt():
            assert first.minima is None and first.group_index is None
            return GroupInt(join("codes"), join("scales"), join("zeros"), first.bits, first.group_size)
        case ChannelInt8():
            return ChannelInt8(join("weight"), join("scales"))
        case Fp8():
            return Fp8(join("weight"), join("scales"))
        case Dense():
            return Dense(join("weight"))
        case _:
            raise AssertionError(f"no method makes {type(first).__name__}")
