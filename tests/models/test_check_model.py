"""LMDeploy's check whether a config can be parsed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.pytorch.check_env import check_model


def test_a_config_alone_is_parsed_or_said_to_be_wrong(tiny_models: Callable[..., Path], tmp_path: Path) -> None:
    config = json.loads((tiny_models("qwen2") / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    found = check_model(str(tmp_path))
    assert found.vocab_size == config["vocab_size"]
    assert repr(found).startswith("DecoderSpec(qwen2: 2 layers of ") and len(repr(found)) < 120  # shown as it returns
    for wrong in ({"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}, {"num_attention_heads": 7}):
        file.write_text(json.dumps(config | wrong))
        with pytest.raises(ToolkitError, match=r"config\.json"):
            check_model(str(tmp_path))
