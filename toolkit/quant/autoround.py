"""auto-round by its own library; what it finds is read back and written like the result of any other method.

Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (2023). The
library tunes block after block, holds the whole model in memory, and keeps nothing on the way: a run that is killed
while it is at work begins anew. Once it is done its result is kept, and the rest resumes layer by layer.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, GroupInt, Weight
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import iter_canonical
from toolkit.errors import ToolkitError
from toolkit.models.registry import load_spec
from toolkit.quant.awq import Grid, inputs_after
from toolkit.quant.layers import LayerSource
from toolkit.quant.result import LayerResult, LinearReport, Method, relative_error
from toolkit.quant.sites import Site
from toolkit.quant.statistics import Gram

DONE = "done.json"


@dataclass(frozen=True)
class Tuning:
    """``iters``: steps of the optimizer a block; 0 rounds to nearest. ``dense``: names on disk that stay dense."""

    grid: Grid
    iters: int
    batch_size: int
    dense: tuple[str, ...] = ()


def check_family(source: LayerSource) -> None:
    """Raise ToolkitError for a model that transformers, on which the library rests, does not have."""
    from transformers import AutoConfig

    kind = str(source.checkpoint.config.get("model_type"))
    if not source.path.is_dir():
        raise ToolkitError(f"{source.path}: auto_round takes a directory of safetensors; try auto_awq or auto_gptq")
    try:
        AutoConfig.for_model(kind)
    except ValueError:
        raise ToolkitError(
            f"{source.path}: auto_round takes the families that transformers has, {kind} is none; "
            "try auto_awq or auto_gptq"
        ) from None


def tune(source: LayerSource, ids: Tensor, target: Path, tuning: Tuning, device: torch.device) -> None:
    """Run the library on token ids [samples, length]; its checkpoint is at ``target`` afterwards (or was before).

    Raises ToolkitError with the library's reason where it fails.
    """
    if (target / DONE).is_file():
        return
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    said = io.StringIO()
    try:
        with torch.inference_mode(False), torch.enable_grad(), contextlib.redirect_stdout(said):
            _tune(source, ids, target, tuning, device)
    except ToolkitError:
        raise
    except Exception as error:  # the library raises whatever its parts raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ToolkitError(f"{source.path}: auto-round failed: {reason}; try auto_awq or auto_gptq") from error
    (target / DONE).write_text(json.dumps({"iters": tuning.iters}), encoding="utf-8")


def _tune(source: LayerSource, ids: Tensor, target: Path, tuning: Tuning, device: torch.device) -> None:
    from auto_round import AutoRound

    logging.getLogger("autoround").setLevel(logging.ERROR)  # its notes would tear the progress bar
    samples = [{"input_ids": row.clone(), "attention_mask": torch.ones_like(row)} for row in ids]
    batch = min(tuning.batch_size, len(samples))
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=batch, drop_last=False)  # type: ignore[arg-type]
    rounder = AutoRound(
        str(source.path),
        scheme=f"W{tuning.grid.bits}A16",
        group_size=tuning.grid.group_size,
        sym=tuning.grid.symmetric,
        iters=tuning.iters,
        nsamples=len(samples),
        seqlen=ids.shape[1],
        batch_size=batch,
        dataset=loader,
        layer_config={name: {"bits": 16} for name in tuning.dense} or None,
        device_map=device.type,
        enable_torch_compile=False,
    )
    rounder.quantize_and_save(str(target), format="auto_round")


def library_result(target: Path) -> Path:
    """The directory, at or below ``target``, that holds the library's checkpoint."""
    found = sorted(target.rglob("config.json"))
    if not found:
        raise ToolkitError("auto-round wrote no checkpoint; try auto_awq or auto_gptq")
    return found[0].parent


def method(target: Path, tuning: Tuning, *, dtype: torch.dtype) -> Method:
    """Takes the codes of every linear from the library's checkpoint at ``target`` and measures their error."""

    def run(sites: Sequence[Site], weights: Mapping[str, Tensor], grams: Mapping[str, Gram]) -> LayerResult:
        codes = _codes(library_result(target), {x.name for site in sites for x in site.linears})
        out: dict[str, Weight | Tensor] = {name: value.to(dtype).cpu() for name, value in weights.items()}
        reports = []
        for site in sites:
            out.update({x.name: Dense(weights[x.name].to(dtype).cpu()) for x in site.followers})
            xtx = inputs_after(grams.get(site.name), None, site.size, weights[site.linears[0].name])
            for linear in site.linears:
                code = out[linear.name] = codes[linear.name]
                w = weights[linear.name]
                error = relative_error(w, code.dequantize().to(w.device), xtx)
                how = "auto_round" if site.name in grams else "weight-only"
                reports.append(LinearReport(linear.name, how, tuning.grid.bits, tuning.grid.group_size, error))
        return LayerResult(out, reports)

    return run


def _codes(path: Path, wanted: set[str]) -> dict[str, GroupInt]:
    checkpoint = open_checkpoint(path)
    _, stored = load_spec(checkpoint)
    items = [item for item in stored if any(part.name in wanted for part in item.parts)]
    found = {name: value for name, value in iter_canonical(checkpoint, items) if isinstance(value, GroupInt)}
    if missing := sorted(wanted - set(found)):
        raise ToolkitError(f"{missing[0]}: auto-round left it dense; leave it out with --skip")
    return found
