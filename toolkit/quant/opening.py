"""What a ``tool lite`` method begins with: options that can be, the model opened, what of it is quantized, the text."""

from __future__ import annotations

import math
from itertools import chain

import torch

from toolkit.artifacts.manifest import require_kind
from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.weights import left_out
from toolkit.errors import UsageError
from toolkit.models.spec import LinearSpec
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.options import Common
from toolkit.quant.selection import Selection, select
from toolkit.quant.text.calibration import make_plan
from toolkit.quant.text.calibration_text import CalibrationText
from toolkit.runners.native.library import explain_mapped_faults
from toolkit.runners.tensor.devices.find import DTYPES


def check_common(common: Common) -> None:
    """Raise UsageError for numbers that cannot be."""
    if common.batch_size < 1:
        raise UsageError(f"--batch-size: expected 1 or more, found {common.batch_size}")
    if not 0 <= common.cache_memory < math.inf:
        raise UsageError(f"--cache-memory: expected GiB, 0 or more, found {common.cache_memory:g}")
    if common.measured < 2:
        raise UsageError(f"--eval-tokens: expected 2 or more, found {common.measured}")
    common.check_ray()


def check_alone(common: Common, stage: str) -> None:
    """Raise UsageError where a method whose layers depend on one another is to be spread over workers."""
    if common.ray is not None:
        raise UsageError(
            f"--ray: {stage} takes what each layer gives to the next; expected calibrate, blocked_fp8, mxfp4, or "
            "auto_awq, auto_gptq or smooth_quant with --calibration DIR"
        )


def store_dtype(wanted: str, source: LayerSource) -> torch.dtype:
    """What dense tensors are stored as: "auto" keeps half precision and makes float16 of float32."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise UsageError(f"--dtype: expected auto, {', '.join(DTYPES)}, found {wanted!r}")
        return DTYPES[wanted]
    stored = {source.checkpoint.info(n).dtype for n in source.checkpoint.names()}
    return torch.bfloat16 if "BF16" in stored else torch.float16


def open_source(model: str, common: Common, what: str) -> LayerSource:
    """The unquantized checkpoint behind MODEL. Raises ToolkitError for one that is quantized or cannot be read,
    UsageError for options that cannot be, before anything is fetched."""
    check_common(common)
    path = resolve_model(model, revision=common.revision, download_dir=common.download_dir)
    require_kind(path, ("checkpoint",), f"tool lite {what}")
    explain_mapped_faults()
    source = LayerSource(path)
    if what != "calibrate" and (others := left_out(source.checkpoint, chain(source.outer, *source.stored))):
        common.notice(others)
    return source


def targets(source: LayerSource, selection: Selection) -> list[LinearSpec]:
    """Every linear that will be quantized, the head last."""
    found = [x for x in source.quantizable() if x.name not in selection.dense]
    if selection.head:
        found.append(LinearSpec(source.spec.head, source.spec.hidden_size, source.spec.head_size))
    return found


def choose(source: LayerSource, common: Common) -> Selection:
    """What ``--skip``, ``--include`` and ``--quantize-lm-head`` ask for."""
    return select(source, common.skip, common.include, common.quantize_lm_head)


def read_text(source: LayerSource, common: Common) -> CalibrationText:
    """The text that the ``--calib-…`` options ask for, which are checked now. Raises UsageError."""
    writes = not source.spec.encodes
    if not writes and common.calib_dataset == "self":
        raise UsageError(
            f"--calib-dataset: {source.path} reads texts and writes none; give a file of texts as it will read, or a "
            "known name such as wikitext2"
        )
    own = common.calib_self_samples if writes else common.calib_self_samples or 0
    plan = make_plan(
        common.calib_dataset, common.calib_samples, common.calib_seqlen, common.seed, source.spec.max_position,
        own, common.effort.calib_samples,
    )  # fmt: skip
    return CalibrationText(source, plan)
