"""What Ollama's clients are told of models: those that there are, those that are loaded, and one in detail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI

from toolkit.artifacts.checkpoint import read_config
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.registry import build
from toolkit.serve.http.openapi.schema import OLLAMA_ERRORS, answered
from toolkit.serve.model_cards import utc, weight_files
from toolkit.serve.ollama.answers import OllamaModels, OllamaVersion
from toolkit.serve.openai.infill import find_gap

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.models.spec import DecoderSpec
    from toolkit.serve.generation.parsing import Formats

SPOKEN = "0.13.0"  # the version of Ollama whose API this is: clients ask for it
NEVER = "2318-04-04T00:00:00Z"  # when a model is unloaded that stays; a date as far away as Ollama's own


@dataclass(frozen=True)
class Listed:
    """``memory``: bytes that it takes, None where it is not loaded. ``path``: its file or directory, if known."""

    name: str
    memory: int | None = None
    session_len: int | None = None
    path: Path | None = None

    def config(self) -> dict[str, Any]:
        """Its config.json, empty where there is none."""
        try:
            return {} if self.path is None else read_config(self.path)
        except ToolkitError:
            return {}

    def spec(self) -> DecoderSpec | None:
        """What its family makes of that, None where nothing is known."""
        try:
            return build(self.config(), str(self.path))[0]
        except ToolkitError:
            return None

    def details(self) -> dict[str, Any]:
        files, config = weight_files(self.path), self.config()
        family, quantized = str(config.get("model_type") or ""), config.get("quantization_config")
        return {
            "parent_model": "",
            "format": files[0].suffix[1:] if files else "",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": "",
            "quantization_level": str(quantized.get("quant_method") or "") if isinstance(quantized, dict) else "",
        }

    def card(self) -> dict[str, Any]:
        """As /api/tags has it. ``digest`` changes with the files."""
        states = [(file.name, file.stat()) for file in weight_files(self.path)]
        marks = [(name, state.st_size, state.st_mtime_ns) for name, state in states]
        changed = max((state.st_mtime for _, state in states), default=0.0)
        return {
            "name": self.name,
            "model": self.name,
            "modified_at": utc(changed),
            "size": sum(size for _, size, _ in marks),
            "digest": hashlib.sha256(repr((self.name, marks)).encode()).hexdigest(),
            "details": self.details(),
        }

    def running(self) -> dict[str, Any]:
        """As /api/ps has it."""
        card = self.card()
        del card["modified_at"]
        return card | {
            "size": self.memory or 0,
            "size_vram": 0,
            "expires_at": NEVER,
            "context_length": self.session_len or 0,
        }


@dataclass(frozen=True)
class Abilities:
    """What tells what a model can do. ``template``: its chat template; ``embeds``, ``sees``: whether it is for that."""

    tokenizer: Tokenizer
    template: str
    formats: Formats
    embeds: bool
    sees: bool


def shown(listed: Listed, can: Abilities) -> dict[str, Any]:
    """As /api/show has it. Where ``listed`` has no ``session_len`` its context is as long as the model states."""
    card, spec = listed.card(), listed.spec()
    family = card["details"]["family"] or "unknown"
    stated = 0 if spec is None else spec.max_position
    info = {"general.architecture": family, f"{family}.context_length": listed.session_len or stated}
    if spec is not None:
        info |= {f"{family}.embedding_length": spec.hidden_size, f"{family}.block_count": len(spec.layers)}
    abilities = {
        "completion": not can.embeds,
        "embedding": can.embeds,
        "tools": can.formats.tools is not None,
        "thinking": can.formats.reasoning is not None,
        "vision": can.sees,
        "insert": find_gap(can.tokenizer) is not None,
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": can.template,
        "details": card["details"],
        "model_info": info,
        "capabilities": [name for name, there in abilities.items() if there],
        "modified_at": card["modified_at"],
    }


def add_lists(app: FastAPI, listed: Callable[[], Sequence[Listed]]) -> None:
    """Have ``app`` say what models there are, which are loaded, and whose API this is."""
    router = APIRouter(responses=OLLAMA_ERRORS)

    @router.get("/api/tags", **answered("The models, as Ollama lists them", OllamaModels))
    def tags() -> dict[str, Any]:
        return {"models": [model.card() for model in listed()]}

    @router.get("/api/ps", **answered("The models that are loaded, as Ollama lists them", OllamaModels))
    def ps() -> dict[str, Any]:
        return {"models": [model.running() for model in listed() if model.memory is not None]}

    @router.get("/api/version", **answered("The version of Ollama whose API this is", OllamaVersion))
    async def version() -> dict[str, str]:
        return {"version": SPOKEN}

    app.include_router(router)
