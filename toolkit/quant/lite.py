"""The stages behind ``tool lite``: a checkpoint in, a quantized checkpoint out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.artifacts.formats import awq as awq_format
from toolkit.artifacts.formats import w8a8
from toolkit.artifacts.manifest import describe_parent, file_digest, read_manifest, require_kind
from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.stage import Stage, open_stage
from toolkit.artifacts.tokenizer import Tokenizer
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import LinearSpec
from toolkit.quant import awq, smooth
from toolkit.quant.calibration import CalibrationPlan, make_plan, read_samples
from toolkit.quant.grid import choose_group_size
from toolkit.quant.layers import LayerSource
from toolkit.quant.layerwise import quantize_layers, saved_layers
from toolkit.quant.output import WriteLinear, dense_modules, write_checkpoint
from toolkit.quant.probe import Probe, heldout_text
from toolkit.quant.result import Method, storable_bits
from toolkit.quant.selftext import self_samples

EVAL_TOKENS = 24576  # of the held-out text: all of it, for most tokenizers
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, steps done, steps in all)."""


@dataclass(frozen=True)
class Common:
    """Options that every method shares; names as on the command line."""

    calib_dataset: str = "self"
    calib_samples: int | None = None
    calib_seqlen: int = 512
    batch_size: int = 8
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    download_dir: str | None = None
    seed: int = 0
    eval_tokens: int = EVAL_TOKENS
    overwrite: bool = False


@dataclass(frozen=True)
class Result:
    """``quality`` is what the manifest holds under that key; ``options`` as resolved."""

    path: Path
    options: dict[str, Any]
    quality: dict[str, Any]
    already_there: bool


@dataclass(frozen=True)
class _Recipe:
    """What tells one method from another: how a layer is quantized, and how it is written."""

    stage: str
    options: dict[str, Any]
    method: Callable[[torch.dtype], Method]
    write_linear: WriteLinear
    config: Callable[[list[str]], dict[str, Any]]


def auto_awq(
    model: str,
    work_dir: Path | str,
    *,
    w_bits: int = 4,
    w_sym: bool = False,
    w_group_size: int | str = "auto",
    search_scale: bool = True,
    common: Common | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """Quantize MODEL to 4 bits by AWQ, in the "gemm" format, into ``work_dir``.

    Raises UsageError for options that cannot be, ToolkitError for a model that cannot be quantized; one line each.
    """
    if w_bits != 4:
        raise UsageError(f"--w-bits: the AWQ gemm format holds 4-bit weights alone, found {w_bits}; leave it out")
    common = common or Common()
    source = _open(model, common, "auto_awq")
    linears = source.quantizable()
    group_size = choose_group_size(w_group_size, linears)
    _check_rows(linears)
    grid = awq.Grid(w_bits, group_size, w_sym)
    recipe = _Recipe(
        stage="lite auto_awq",
        options={"w_bits": w_bits, "w_sym": w_sym, "w_group_size": group_size, "search_scale": search_scale},
        method=lambda dtype: awq.method(grid, search=search_scale, dtype=dtype),
        write_linear=awq_format.write_linear,
        config=lambda skip: awq_format.config(group_size=group_size, zero_point=not w_sym, skip=skip),
    )
    return _run(source, Path(work_dir), recipe, common, progress)


def smooth_quant(
    model: str,
    work_dir: Path | str,
    *,
    quant_dtype: str = "int8",
    common: Common | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """Quantize MODEL to W8A8 by SmoothQuant, in LMDeploy's format, into ``work_dir``. Raises as ``auto_awq`` does."""
    if quant_dtype != "int8":
        raise UsageError(f"--quant-dtype: expected int8, found {quant_dtype!r}")
    common = common or Common()
    recipe = _Recipe(
        stage="lite smooth_quant",
        options={"quant_dtype": quant_dtype, "strength": smooth.STRENGTH},
        method=lambda dtype: smooth.method(strength=smooth.STRENGTH, dtype=dtype),
        write_linear=w8a8.write_linear,
        config=lambda skip: w8a8.config(quant_dtype=quant_dtype, skip=skip),
    )
    return _run(_open(model, common, "smooth_quant"), Path(work_dir), recipe, common, progress)


def _open(model: str, common: Common, what: str) -> LayerSource:
    path = resolve_model(model, revision=common.revision, download_dir=common.download_dir)
    require_kind(path, ("checkpoint",), f"tool lite {what}")
    return LayerSource(path)


def _check_rows(linears: list[LinearSpec]) -> None:
    for x in linears:
        if x.out_features % 8:
            raise UsageError(
                f"{x.name}: AWQ packs 8 output features a word, found {x.out_features}, which 8 does not divide; "
                "try smooth_quant"
            )


@torch.inference_mode()
def _run(source: LayerSource, work_dir: Path, recipe: _Recipe, common: Common, progress: Progress) -> Result:
    device = _device(common.device)
    dtype = _store_dtype(common.dtype, source)
    if common.batch_size < 1:
        raise UsageError(f"--batch-size: expected 1 or more, found {common.batch_size}")
    if common.eval_tokens < 2:
        raise UsageError(f"--eval-tokens: expected 2 or more, found {common.eval_tokens}")
    plan = make_plan(
        common.calib_dataset, common.calib_samples, common.calib_seqlen, common.seed, source.spec.max_position
    )
    progress("reading the model", 0, 1)
    parent = describe_parent(source.path)
    options = recipe.options | {
        "calib_dataset": plan.dataset if plan.dataset == "self" else _named(plan.dataset),
        "calib_samples": plan.samples,
        "calib_seqlen": plan.seqlen,
        "batch_size": common.batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "seed": common.seed,
        "eval_tokens": common.eval_tokens,
    }
    with open_stage(
        work_dir,
        kind="quantized",
        stage=recipe.stage,
        parent=parent,
        options=options,
        overwrite=common.overwrite,
    ) as stage:
        if stage.already_there:
            found = read_manifest(stage.target)
            assert found is not None
            return Result(work_dir, options, found.quality, True)
        quality = _quantize(source, stage, recipe, common, plan, dtype, device, parent["digest"], progress)
        stage.finish(quality)
    return Result(work_dir, options, quality, False)


def _quantize(
    source: LayerSource,
    stage: Stage,
    recipe: _Recipe,
    common: Common,
    plan: CalibrationPlan,
    dtype: torch.dtype,
    device: torch.device,
    digest: str,
    progress: Progress,
) -> dict[str, Any]:
    """Everything between an open stage and its manifest. Returns the quality figures."""
    source.check_finite()
    tokenizer = Tokenizer.open(source.checkpoint.tokenizer_dir)
    calibration = _calibration(source, stage, plan, tokenizer, digest, progress)
    outer = source.outer_weights(device)
    heldout = torch.tensor(tokenizer.encode(heldout_text())[: common.eval_tokens])
    _check_ids(source, calibration)
    probe = Probe(source.spec, outer[source.spec.embed], heldout, device)
    reports = quantize_layers(
        source,
        recipe.method(dtype),
        calibration,
        probe,
        stage,
        table=outer[source.spec.embed],
        batch_size=common.batch_size,
        device=device,
        progress=lambda done, total: progress("quantizing layers", done, total),
    )
    progress("measuring perplexity", 0, 1)
    figures = probe.figures(outer)
    progress("writing", 0, 1)
    write_checkpoint(source, stage, recipe.write_linear, recipe.config(dense_modules(source)), dtype)
    return figures | _size(source, stage) | {"layers": [dataclasses.asdict(r) for r in reports]}


def _calibration(
    source: LayerSource,
    stage: Stage,
    plan: CalibrationPlan,
    tokenizer: Tokenizer,
    digest: str,
    progress: Progress,
) -> torch.Tensor:
    """Token ids [samples, seqlen]; kept in the stage, so that a resumed run sees the same text."""
    if stage.done("calibration"):
        return stage.load("calibration")["ids"]
    if plan.dataset == "self":
        samples = self_samples(
            source.path, digest, plan, tokenizer, lambda d, n: progress("writing calibration text", d, n)
        )
    else:
        samples = read_samples(plan, tokenizer, source.checkpoint.tokenizer_dir)
    ids = torch.tensor(samples, dtype=torch.int64)
    stage.save("calibration", {"ids": ids})
    return ids


def _check_ids(source: LayerSource, ids: torch.Tensor) -> None:
    if int(ids.max()) >= source.spec.vocab_size:
        raise ToolkitError(
            f"{source.path}: the tokenizer gives token id {int(ids.max())}, "
            f"but the model has {source.spec.vocab_size} tokens; tokenizer and weights disagree"
        )


def _size(source: LayerSource, stage: Stage) -> dict[str, Any]:
    bits = count = 0
    quantizable = {x.name for x in source.quantizable()}
    for result in saved_layers(stage, len(source.spec.layers)):
        for name, value in result.weights.items():
            if name in quantizable and not isinstance(value, torch.Tensor):
                bits += storable_bits(value)
                count += value.shape[0] * value.shape[1]
    size = sum(f.stat().st_size for f in stage.dir.glob("*.safetensors"))
    return {"bits_per_weight": bits / count, "size_bytes": size}


def _named(dataset: str) -> str:
    """A dataset as the stage's key sees it: a local one by content."""
    path = Path(dataset).expanduser()
    if path.is_file():
        return f"{path.resolve()} sha256:{file_digest(path)}"
    if path.is_dir():
        digests = [f"{f.relative_to(path)} {file_digest(f)}" for f in sorted(path.rglob("*")) if f.is_file()]
        import hashlib

        return f"{path.resolve()} sha256:{hashlib.sha256(chr(10).join(digests).encode()).hexdigest()}"
    return dataset


def _store_dtype(wanted: str, source: LayerSource) -> torch.dtype:
    """What dense tensors are stored as: "auto" keeps half precision and makes float16 of float32."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise UsageError(f"--dtype: expected auto, {', '.join(DTYPES)}, found {wanted!r}")
        return DTYPES[wanted]
    stored = {source.checkpoint.info(n).dtype for n in source.checkpoint.names()}
    return torch.bfloat16 if "BF16" in stored else torch.float16


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted != "cpu" and wanted.split(":")[0] != "cuda":
        raise UsageError(f"--device: expected auto, cpu or cuda, found {wanted!r}")
    if wanted != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {wanted}: no usable GPU was found; leave it out to quantize on the CPU")
    return torch.device(wanted)
