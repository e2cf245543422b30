"""The options of packing, as flags of ``tool convert`` and as Python callers pass them."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import option


@dataclass(frozen=True)
class Packing:
    target: str = option("auto", "What to pack for: auto (cpu, else torch), cpu, torch, cuda-sm80, cuda-sm90.")
    dtype: str = option("auto", "Of weights that are not quantized: auto (as stored), float16, bfloat16, float32.")
    model_format: str | None = option(
        None, "hf, meta_llama, awq, gptq, w8a8 or gguf: refuse any other. Default: read from the model."
    )
    load_format: str = option(
        "auto", "auto; int8, int4: linears that are not quantized are rounded, without calibration."
    )
    head_bits: int | None = option(
        None,
        "Round an unquantized head to 16, 8 or 4 bits. Default: 8 for target cpu, where the embedding goes "
        "with it; 16 for cuda-sm80 and cuda-sm90, where 8 halves what a step reads for its head.",
    )
    vision: str = option(
        "auto",
        "What the model sees with: auto (as stored), int8 (its layers, and linears that tokens of pictures have; "
        "weights and activations; target cpu).",
    )
    quant_policy: str | None = option(
        None, "auto: measure what bits of the KV cache cost in each layer, for --quant-policy auto (target cpu)."
    )
    adapters: dict[str, str] | None = option(
        None, "NAME=PATH of LoRA adapters that the artifact is to hold too; several may follow."
    )
    tp: int = option(
        1,
        "Write a file for each of so many ranks, to be run with the same --tp (target cpu). 1: the whole model in one "
        "file, which any number of ranks cut when they load it.",
    )
