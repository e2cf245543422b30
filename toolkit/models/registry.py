"""Which family reads which checkpoint: ``architectures`` (or ``model_type``) of ``config.json`` → family file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import ToolkitError, UsageError
from toolkit.models import gemma2, internlm2, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from toolkit.models.config_fields import Fields, check_dtype, check_token_ids
from toolkit.models.decoder import Built


@dataclass(frozen=True)
class Family:
    """One family file. ``architectures``: class names in ``config.json``; ``known_as``: what people call its models."""

    name: str
    build: Callable[[Fields], Built]
    architectures: tuple[str, ...]
    known_as: str


FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        llama.build,
        ("LlamaForCausalLM", "LLaMAForCausalLM"),
        "Llama 1, 2, 3, 3.1, 3.2, 3.3; SmolLM2, Yi, Vicuna",
    ),
    Family("mistral", mistral.build, ("MistralForCausalLM",), "Mistral 7B"),
    Family("qwen2", qwen2.build, ("Qwen2ForCausalLM",), "Qwen 2, 2.5; R1 distilled into Qwen"),
    Family("qwen3", qwen3.build, ("Qwen3ForCausalLM",), "Qwen 3"),
    Family("internlm2", internlm2.build, ("InternLM2ForCausalLM",), "InternLM 2, 2.5"),
    Family("gemma2", gemma2.build, ("Gemma2ForCausalLM",), "Gemma 2"),
    Family("phi3", phi3.build, ("Phi3ForCausalLM",), "Phi 3, 3.5, 4 mini"),
    Family("mixtral", mixtral.build, ("MixtralForCausalLM",), "Mixtral 8x7B, 8x22B"),
    Family("qwen3_moe", qwen3_moe.build, ("Qwen3MoeForCausalLM",), "Qwen 3 30B-A3B, 235B-A22B"),
)
ARCHITECTURES: dict[str, Family] = {a: f for f in FAMILIES for a in f.architectures}
MODEL_TYPES: dict[str, Family] = {f.name: f for f in FAMILIES}


class HasConfig(Protocol):
    """What ``load_spec`` needs of a checkpoint."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def generation_config(self) -> dict[str, Any]: ...


def find_family(config: dict[str, Any], source: str = "config.json") -> Family:
    """The family of a config. Raises ToolkitError that lists the known architectures."""
    architectures = config.get("architectures")
    known = ", ".join(f.architectures[0] for f in FAMILIES)
    if architectures:
        name = architectures[0] if isinstance(architectures, list) else architectures
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
        Fields(config, source).fail("architectures", name, f"one of {known}")
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in MODEL_TYPES:
        return MODEL_TYPES[model_type]
    Fields(config, source).fail("architectures", model_type, f"one of {known}")


def build(config: dict[str, Any], source: str = "config.json") -> Built:
    """The spec of a model and the tensors its checkpoint must hold.

    ``config``: a parsed ``config.json``; ``quantization_config`` in it is left to the weight readers. ``source`` is
    named in error messages. Raises ToolkitError for an unknown architecture or a value that cannot be.
    """
    if not isinstance(config, dict):
        raise ToolkitError(f"{source}: found {type(config).__name__}, expected a JSON object")
    fields = Fields(config, source)
    spec, stored = find_family(config, source).build(fields)
    check_dtype(fields)
    check_token_ids(fields, spec.vocab_size)
    return spec, stored


def load_spec(checkpoint: HasConfig, config: dict[str, Any] | None = None) -> Built:
    """``build`` for an open checkpoint, of ``config`` instead of its own where given.

    Token ids in its generation_config.json are checked too.
    """
    built = build(checkpoint.config if config is None else config, f"{checkpoint.path}: config.json")
    check_token_ids(
        Fields(checkpoint.generation_config, f"{checkpoint.path}: generation_config.json"), built[0].vocab_size
    )
    return built


def apply_overrides(
    config: dict[str, Any], hf_overrides: dict[str, Any] | None = None, rope_scaling_factor: float = 0.0
) -> dict[str, Any]:
    """A copy of ``config`` with the user's changes.

    ``hf_overrides`` replaces fields; objects are merged key by key. ``rope_scaling_factor`` above 0 switches to dynamic
    NTK rope with that factor. Raises UsageError for arguments that cannot be.
    """
    if hf_overrides is not None and not isinstance(hf_overrides, dict):
        raise UsageError(f"hf_overrides: found {type(hf_overrides).__name__}, expected a dict of config fields")
    if isinstance(rope_scaling_factor, bool) or not isinstance(rope_scaling_factor, (int, float)):
        raise UsageError(f"rope_scaling_factor: found {rope_scaling_factor!r:.40}, expected a number")
    if rope_scaling_factor and not 1 <= rope_scaling_factor <= 1e6:
        raise UsageError(f"rope_scaling_factor: found {rope_scaling_factor}, expected 0 (off) or a number from 1 up")
    result = copy.deepcopy(config)
    for key, value in (hf_overrides or {}).items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else copy.deepcopy(value)
    if rope_scaling_factor:
        old = result.pop("rope_parameters", None)
        if isinstance(old, dict) and "rope_theta" in old:
            result.setdefault("rope_theta", old["rope_theta"])
        result["rope_scaling"] = {"rope_type": "dynamic", "factor": float(rope_scaling_factor)}
    return result


def describe() -> list[tuple[str, str, str]]:
    """Rows (architecture, family, what people call its models) for ``tool list models``."""
    return [(name, family.name, family.known_as) for name, family in ARCHITECTURES.items()]
