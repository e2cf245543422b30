"""Which models and options the native runner takes."""

from __future__ import annotations

from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.native import library
from toolkit.runners.native.program import unsupported as no_program


def unsupported(spec: DecoderSpec, options: RunnerOptions) -> str | None:
    """Why the native runner cannot execute the model with these options here, or None."""
    if reason := no_program(spec):
        return reason
    if options.device not in ("auto", "cpu"):
        return f"it runs on the CPU, not on {options.device}"
    for _, _, kept in spec.keepers():
        if kept.kind == "latent" and (reason := kept.refuses(options.quant_policy)):
            return f"quant_policy: {reason}"
    if options.adapters and (reason := no_adapters(spec)):
        return reason
    if (count := len(options.kv_layers)) not in (0, len(spec.paged())):
        return f"kv_layers: expected a policy for each of the {len(spec.paged())} layers, found {count}"
    if options.quant_policy in (16, 17):
        return f"its KV cache knows no float8 (quant_policy {options.quant_policy}), only 0, 8, 4 and 44"
    if options.block_size % 16:
        return f"it needs blocks of a multiple of 16 tokens, not {options.block_size}"
    return library.available()


def no_adapters(spec: DecoderSpec) -> str | None:
    """Why it runs no adapters of the model, or None. Beside rows that have one nobody looks which rows are pictures."""
    if spec.vision is not None and spec.vision.routed:
        return "it runs no LoRA adapters of a model whose pictures have linears of their own"
    return None
