"""Blocks of real runners that go to another engine over TCP, sealed: what comes out is what one engine alone says, of
every kind of cache, of pictures and of adapters."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.cache.kept import moving
from toolkit.engine.cache.kept.port import split
from toolkit.engine.core import EngineCore
from toolkit.engine.load.setup import find
from toolkit.engine.load.start import start
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError
from toolkit.vision.eyes import Eyes

PROMPT = np.random.default_rng(5).integers(3, 300, 90).tolist()
NEW = 8


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(moving, "shared_memory", lambda: tmp_path / "memory")
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(bytes(range(32)))
    return str(path)


@pytest.fixture
def opened(key: str) -> Iterator[Callable[..., tuple[EngineCore, Any]]]:
    """``opened(model, backend, role, …)``: an engine and its facts."""
    with ExitStack() as stack:

        def make(model: Path, backend: str, role: str = "hybrid", **more: Any) -> tuple[EngineCore, Any]:
            common: dict[str, Any] = {"dtype": "float32", "session_len": 400, "threads": 1, "role": role}
            common |= {"cache_max_entry_count": 60, "max_batch_size": 4} | more
            if role != "hybrid":
                common |= {"kv_transfer_key": key, "migration_backend": "tcp"}
            if role == "prefill":
                common |= {"kv_transfer_address": "127.0.0.1:0"}
            if backend == "pytorch":
                config: Any = PytorchEngineConfig(block_size=16, device_type="cpu", **common)
            else:
                config = TurbomindEngineConfig(cache_block_seq_len=16, device="cpu", **common)
            core, facts = start(find(str(model), config, None), None, lambda line: None)
            stack.callback(core.close)
            return core, facts

        yield make


def said(core: EngineCore, tokens: list[int], new: int = NEW, **more: Any) -> tuple[list[int], list[dict[int, float]]]:
    core.add(EngineRequest("r", tokens, SamplingParams(new, logprobs=3), **more))
    found: tuple[list[int], list[dict[int, float]]] = ([], [])
    while core.has_work:
        for output in core.step():
            assert output.error is None
            found[0].extend(output.token_ids)
            found[1].extend(output.logprobs)
    return found


@contextmanager
def apart(opened: Any, *model: Any, taker: dict[str, Any] | None = None, **more: Any) -> Iterator[Any]:
    """``go(tokens, …)``: what a decode server says of a prompt that another has computed; (its figures, how)."""
    first, facts = opened(*model, role="prefill", **more)
    second, other = opened(*model, role="decode", **(more | (taker or {})))
    assert facts.in_common == other.in_common
    second.use_source(facts.engine_id, facts.lends_at, False)

    def go(tokens: list[int], there: dict[str, Any] | None = None, **asked: Any) -> Any:
        said(first, tokens, 1, lend=True, **asked)
        return said(second, tokens, source=facts.engine_id, **(asked | (there or {})))

    yield go, second.stats


def check(found: Any, right: Any, exact: bool) -> None:
    assert found[0] == right[0]
    for ours, theirs in zip(found[1], right[1], strict=True):
        assert ours == (theirs if exact else pytest.approx(theirs, abs=1e-3))


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("deepseek_v2", {}),  # one row as key and value
        ("deepseek_v2", {"quant_policy": 8}),
        ("gemma2", {}),  # windows in some layers
        ("qwen3_5_text", {}),  # states
    ],
)
def test_every_kind_of_cache(
    backend: str, family: str, more: dict[str, Any], tiny_models: Callable[..., Path], opened: Any
) -> None:
    model = tiny_models(family)
    with apart(opened, model, backend, **more) as (go, stats):
        found = go(PROMPT)
        assert stats()["moved_tokens"] == 80
    alone = opened(model, backend, **more)[0]
    check(found, said(alone, PROMPT), backend == "turbomind")


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_adapters_are_told_apart_by_what_they_are(
    backend: str, tiny_models: Callable[..., Path], support: Any, tmp_path: Path, opened: Any
) -> None:
    """Not by their numbers, which differ: the two engines have them in another order."""
    model, write = tiny_models("llama"), support("adapters").write_adapter
    paths = {n: str(write(tmp_path / n, model, "q_proj|v_proj|down_proj", seed=i)) for i, n in enumerate("ab")}
    turned = {name: paths[name] for name in "ba"}
    with apart(opened, model, backend, adapters=paths, taker={"adapters": turned}) as (go, stats):
        found = [go(PROMPT, {"adapter": 1 - number}, adapter=number) for number in (0, 1)]
        assert stats()["moved_tokens"] == 160
        plain = go(PROMPT)
        assert stats()["moved_tokens"] == 240
    alone = opened(model, backend, adapters=paths)[0]
    right = [said(alone, PROMPT, adapter=number) for number in (0, 1, -1)]
    for one, other in zip([*found, plain], right, strict=True):
        check(one, other, backend == "turbomind")
    assert right[0][0] != right[1][0] != right[2][0]


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_pictures(backend: str, tiny_models: Callable[..., Path], opened: Any) -> None:
    """A picture's keys and values come over, and it is not encoded again; those of another one are not taken for it."""
    model = tiny_models("qwen2_vl")
    eyes = Eyes.open(model)
    assert eyes is not None
    tokenizer = Tokenizer.open(model)

    def prompt(seed: int) -> tuple[list[int], list[Any]]:
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 76, 3), np.uint8)).save(file, "PNG")
        pictures = eyes.look([{"role": "user", "content": [{"type": "image", "image": file.getvalue()}]}])
        text = eyes.spell(f"b{eyes.recipe.mark}what is it, and where " + "all happy families are alike " * 8, pictures)
        return tokenizer.encode(text, add_special_tokens=False), pictures

    alone = opened(model, backend)[0]
    with apart(opened, model, backend) as (go, stats):
        for seed in (1, 2):
            tokens, pictures = prompt(seed)
            before = stats().get("moved_tokens", 0)
            check(go(tokens, pictures=pictures), said(alone, tokens, pictures=pictures), backend == "turbomind")
            assert stats()["moved_tokens"] - before == (len(tokens) - 1) // 16 * 16
            assert stats()["pictures_encoded"] == 0


def test_a_start_that_fails_lends_nothing(
    tiny_models: Callable[..., Path], opened: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: EngineCore, *arguments: Any, **more: Any) -> None:
        raise ToolkitError(more["moving"].address)

    monkeypatch.setattr(EngineCore, "__init__", broken)
    with pytest.raises(ToolkitError) as told:
        opened(tiny_models("llama"), "turbomind", role="prefill")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(split("at", str(told.value)), 5).close()
    assert not list((Path(key).parent / "memory").iterdir())
