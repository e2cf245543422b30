"""What cannot run or hold a model, asked of its spec alone, before a weight is read."""

from __future__ import annotations

from toolkit.artifacts.gguf import metadata as gguf_metadata
from toolkit.models.spec import DecoderSpec
from toolkit.runners.native import program


def refusals(spec: DecoderSpec) -> dict[str, str]:
    """Executor → why it does not take the model. The tensor runner and the calibration forward take every spec."""
    asked = {"the native runner on CPUs": program.unsupported(spec), "GGUF": gguf_metadata.unsupported(spec)}
    return {name: reason for name, reason in asked.items() if reason is not None}
