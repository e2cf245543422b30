"""lm-eval itself against our server, with no tokenizer argument; its numbers are those of the engine's own scoring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from toolkit import PytorchEngineConfig, serve
from toolkit.engine.process.frontend import AsyncEngine

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow
PAIRS = [("the quick brown", " fox jumps"), ("a", " b c d"), ("the lazy dog and", " the sea")]


@pytest.fixture(scope="module")
def config() -> PytorchEngineConfig:
    return PytorchEngineConfig(session_len=256, dtype="float32", device_type="cpu")


@pytest.fixture(scope="module")
def url(tiny_models: Any, config: PytorchEngineConfig) -> Iterator[str]:
    with serve(str(tiny_models("llama")), "tiny", backend_config=config, server_port=0) as server:
        yield server.url


@pytest.fixture(scope="module")
def scored(tiny_models: Any, config: PytorchEngineConfig) -> Iterator[Any]:
    """Sum of the log-probabilities of ``more`` after ``ids``."""
    with AsyncEngine.open(tiny_models("llama"), backend_config=config) as engine:
        yield lambda ids, more: float(engine.score([*ids, *more])[-len(more) :].sum())


def remote(url: str, **options: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(model="tiny", base_url=f"{url}/v1/completions", max_length=128, **options)


def asked(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0)


@pytest.mark.parametrize("batch", [1, 3])
def test_likelihoods_are_the_engine_s_own(url: str, scored: Any, batch: int) -> None:
    lm = remote(url, batch_size=batch)
    assert lm.tokenizer_backend == "remote"
    got = lm.loglikelihood([asked("loglikelihood", *pair) for pair in PAIRS])
    for (text, more), (likelihood, _) in zip(PAIRS, got, strict=True):
        before, after = lm._encode_pair(text, more)
        assert likelihood == pytest.approx(scored(before, after), abs=1e-4)


def test_rolling_likelihood_is_the_engine_s_own(url: str, scored: Any) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    lm = remote(url)
    text = "the quick brown fox jumps over the lazy dog and the sea " * 20
    (got,) = lm.loglikelihood_rolling([asked("loglikelihood_rolling", text)])
    ids = lm.tok_encode(text)
    windows = [
        make_disjoint_window(w) for w in get_rolling_token_windows(ids, lm.prefix_token_id, lm.max_length - 1, 1)
    ]
    assert len(windows) > 3 and got == pytest.approx(sum(scored(*window) for window in windows), abs=1e-3)


def test_answers_of_both_kinds(url: str) -> None:
    from lm_eval.models.openai_completions import LocalChatCompletion

    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    texts = remote(url).generate_until([asked("generate_until", "the fox", dict(options))])
    assert len(texts) == 1 and isinstance(texts[0], str)
    chat = LocalChatCompletion(model="tiny", base_url=f"{url}/v1/chat/completions")
    talk = chat.apply_chat_template([{"role": "user", "content": "the fox"}])
    assert isinstance(chat.generate_until([asked("generate_until", talk, dict(options))])[0], str)
