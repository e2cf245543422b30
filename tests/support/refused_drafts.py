"""Drafts that are none for a model, or of a folder that was changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.errors import ToolkitError


def refused(told: str, model: Path, draft: Path, **fields: Any) -> None:
    """A pipeline of the model with the draft says this in a line."""
    from toolkit import pipeline

    config = TurbomindEngineConfig(session_len=64, speculative_draft_model=str(draft), **fields)
    with pytest.raises(ToolkitError, match=rf"^speculative_draft_model: {told}") as found:
        pipeline(str(model), backend_config=config).close()
    assert "\n" not in str(found.value)


def changed(draft: Path, target: Path, lacks: str = "", **fields: Any) -> Path:
    """The draft with other fields in its config.json, without a tensor."""
    target.mkdir()
    config = json.loads((draft / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    tensors = {name: x for name, x in load_file(draft / "model.safetensors").items() if name != lacks}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target
