"""What engine and generation configs say of values that cannot be: the whole line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit import pipeline
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.configs.generation import GenerationConfig
from toolkit.configs.speculative import SpeculativeConfig
from toolkit.errors import UsageError

refused = refusing(UsageError)
ALGORITHMS = "lookup, draft_model, eagle3, eagle, dflash, mtp"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"cache_block_seq_len": 48}, "cache_block_seq_len: expected a power of two, found 48"),
        ({"kv_sinks": 2}, "kv_sinks: found 2 without kv_window; give that too"),
        ({"kv_cache_dir": " "}, "kv_cache_dir: expected a path, found ' '"),
        ({"kv_cache_dir": "x", "kv_cache_disk": 5}, "kv_cache_disk: expected a size such as '20GiB', found 5"),
        ({"adapter_memory": 5}, "adapter_memory: expected a size such as 1.5GB or 90MiB, found 5"),
        ({"adapters": {}}, "adapters: expected a dict of names and paths, found {}"),
        ({"adapters": ["a"]}, "adapters: expected a dict of names and paths, found ['a']"),
        ({"adapters": {"": "a"}}, "adapters: expected names and paths, found '': 'a'"),
        ({"adapters": {"a": ""}}, "adapters: expected names and paths, found 'a': ''"),
        (
            {"kv_transfer_key": "k"},
            "kv_transfer_key: only with role prefill or decode; name the role too, or leave it out",
        ),
        ({"kv_transfer_address": 5}, "kv_transfer_address: expected a text, found 5"),
        ({"kv_transfer_memory": 5}, "kv_transfer_memory: expected a size such as '1GiB', found 5"),
        ({"speculative_algorithm": "odd"}, f"speculative_algorithm: expected one of {ALGORITHMS}, found 'odd'"),
        ({"speculative_draft_model": " "}, "speculative_draft_model: expected a path or hub id, found ' '"),
        (
            {"speculative_algorithm": "lookup", "speculative_draft_model": "m"},
            "speculative_draft_model: lookup takes none; use draft_model or eagle3, or leave it out",
        ),
    ],
)  # fmt: skip
def test_an_engine_config(given: dict[str, Any], told: str) -> None:
    assert refused(lambda: TurbomindEngineConfig(**given)) == told


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: PytorchEngineConfig(devices=[1], device_type="cuda:2"),
            "devices: found [1], expected what device says, cuda:2, or none",
        ),
        (
            lambda: SpeculativeConfig(method="lookup", dflash_block_size=1),
            "dflash_block_size: expected an integer in [2, 64], found 1",
        ),
        (
            lambda: TurbomindEngineConfig(speculative="off", speculative_algorithm="lookup"),
            "speculative: off, but speculative_algorithm or speculative_draft_model asks for it; leave one out",
        ),
        (
            lambda: SpeculativeConfig(method="medusa"),
            f"method: expected one of {ALGORITHMS}, found 'medusa': it does not run yet",
        ),
        (
            lambda: GenerationConfig(min_new_tokens=9, max_new_tokens=8),
            "min_new_tokens: at most max_new_tokens (8), found 9",
        ),
    ],
)
def test_others(make: Callable[[], object], told: str) -> None:
    assert refused(make) == told


def test_what_a_pipeline_does_not_take(tiny_models: Any) -> None:
    model = str(tiny_models("llama"))
    told = refused(lambda: pipeline(model, vision_config=5))
    assert told == "vision_config: expected a VisionConfig, found int"
    with pipeline(model, TurbomindEngineConfig(session_len=64)) as pipe:
        assert refused(lambda: pipe.chat(5)) == "prompt: expected text or (text, images), found int"
        two = GenerationConfig(n=2, max_new_tokens=1, do_sample=True)
        assert refused(lambda: pipe.chat("a", gen_config=two)) == "n: expected 1 in a conversation, found more"
