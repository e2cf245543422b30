"""AsyncEngine: text, stop words, aborts, errors — over the fake runner, with a tokenizer of letters."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.engine.constraints.grammar_cost import HOSTILE
from toolkit.engine.core import EngineCore
from toolkit.engine.load.memory_plan import MemoryPlan
from toolkit.engine.load.setup import Facts
from toolkit.engine.options import EngineOptions
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.engine.process.loop import ThreadLoop
from toolkit.engine.request import EngineOutput, EngineRequest
from toolkit.engine.sampling_params import resolve
from toolkit.engine.text.stream import Asked, RequestStream, Timings
from toolkit.errors import ToolkitError
from toolkit.messages import GenerationConfig, Response

VOCAB = 61
EOS = VOCAB - 1
LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"


class LetterTokenizer:
    """Byte-exact: token i is one letter, the last but one is the byte 0xC3, the last is eos."""

    path = Path(".")
    special_ids = frozenset({EOS})
    eos_ids = (EOS,)
    vocab_size = VOCAB
    byte_exact = True
    strips_leading_space = False

    def bytes_of(self, token: int) -> bytes:
        return b"<eos>" if token == EOS else b"\xc3" if token == EOS - 1 else LETTERS[token : token + 1]

    @property
    def token_bytes(self) -> list[bytes]:
        return [self.bytes_of(i) for i in range(VOCAB)]

    def token_id(self, text: str) -> int | None:
        return EOS if text == "<eos>" else None


@pytest.fixture
def open_engine(fake: Any) -> Iterator[Callable[..., AsyncEngine]]:
    """``open_engine(delay=…, **options)``: an engine over a fake runner whose steps take ``delay`` seconds."""
    opened = []

    def build(delay: float = 0.0, **options: Any) -> AsyncEngine:
        runner = fake.FakeRunner((None,), VOCAB, 4)
        if delay:
            forward = runner.run
            runner.run = lambda batch: (time.sleep(delay), forward(batch))[1]
        blocks = (options.pop("blocks", 300),)
        chosen = EngineOptions(
            **({"session_len": 200, "max_batch_size": 16, "max_prefill_token_num": 64} | options), num_blocks=blocks
        )
        runner.allocate_cache(blocks)
        tokenizer: Any = LetterTokenizer()
        engine = AsyncEngine(tokenizer, "letters")
        plan = MemoryPlan(200, 16, 64, 0.0, 4, blocks, 0, (), ())
        facts = Facts(plan, "", "", "fake", "turbomind", "cpu", "float32", VOCAB)
        core = EngineCore(runner, chosen, lambda: tokenizer)
        engine._loop = ThreadLoop(core, facts, engine._streams.deliver, engine._lost)
        opened.append(engine)
        return engine

    yield build
    for engine in opened:
        engine.close()
        engine.close()


def whole(engine: AsyncEngine, tokens: list[int], **config: Any) -> Response:
    done = Response()
    for delta in engine.generate_sync(tokens, GenerationConfig(**config)):
        done.extend(delta)
    return done


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.002)


PROMPT = [3, 1, 4, 1, 5, 9]


def test_text_is_the_tokens_text_and_counts_agree(open_engine: Any) -> None:
    engine = open_engine()
    r = whole(engine, PROMPT, max_new_tokens=20, ignore_eos=True, bad_token_ids=[EOS, EOS - 1])
    assert r.text == "".join(chr(LETTERS[t]) for t in r.token_ids)
    assert (r.generate_token_len, r.input_token_len, r.finish_reason, len(r.token_ids)) == (20, 6, "length", 20)
    assert engine.stats()["requests"] == 0


def test_many_at_once_from_one_event_loop_get_what_each_gets_alone(open_engine: Any) -> None:
    engine = open_engine()
    prompts = [[i, 7, i % 5] for i in range(40)]
    configs = [GenerationConfig(do_sample=True, random_seed=i, max_new_tokens=5 + i % 9) for i in range(40)]

    async def one(i: int) -> Response:
        done = Response()
        async for delta in engine.generate(prompts[i], configs[i]):
            done.extend(delta)
        return done

    async def everything() -> list[Response]:
        return list(await asyncio.gather(*(one(i) for i in range(40))))

    together = asyncio.run(everything())
    side_by_side = [Response() for _ in range(40)]
    for i, delta in engine.generate_all([Asked(*pair) for pair in zip(prompts, configs, strict=True)]):
        side_by_side[i].extend(delta)
    for i in range(40):
        alone = Response()
        for delta in engine.generate_sync(prompts[i], configs[i]):
            alone.extend(delta)
        side_by_side[i].cached_tokens = alone.cached_tokens = together[i].cached_tokens
        assert together[i] == side_by_side[i] == alone


def test_of_several_side_by_side_one_that_fails_ends_itself_alone(open_engine: Any) -> None:
    engine = open_engine()
    asked = [Asked(PROMPT, request_id="a"), Asked([1, VOCAB], request_id="b"), Asked(PROMPT, request_id="a")]
    found = [Response() for _ in asked]
    for i, delta in engine.generate_all(asked):
        found[i].extend(delta)
    assert found[0].finish_reason in ("stop", "length") and "already running" in str(found[2].error_message)
    assert [r.finish_reason for r in found[1:]] == ["error", "error"] and engine.stats()["requests"] == 0


def test_what_fails_before_it_begins_ends_itself_alone(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(config: GenerationConfig, *more: Any) -> Any:
        if config.max_new_tokens == 7:
            raise KeyError("a fault of ours")
        return resolve(config, *more)

    monkeypatch.setattr("toolkit.engine.process.frontend.resolve", resolved)
    found = [Response(), Response()]
    configs = [GenerationConfig(max_new_tokens=n) for n in (7, 8)]
    for i, delta in open_engine().generate_all([Asked(PROMPT, config) for config in configs]):
        found[i].extend(delta)
    assert (found[0].finish_reason, found[0].error_code, found[0].input_token_len) == ("error", 500, len(PROMPT))
    assert "a fault of ours" in str(found[0].error_message) and found[1].finish_reason in ("stop", "length")


def test_formats_are_hurried_while_hopeless_ones_come(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = open_engine(), list[bool]()
    add = EngineCore.add

    def added(core: EngineCore, request: EngineRequest, *more: Any) -> None:
        seen.append(request.params.hurried)
        add(core, request, *more)

    monkeypatch.setattr(EngineCore, "add", added)
    whole(engine, PROMPT, max_new_tokens=1)
    hopeless = {"type": "regex_schema", "regex_schema": "(ab|cd)?" * 900}
    for _ in range(HOSTILE):
        assert whole(engine, PROMPT, max_new_tokens=1, response_format=hopeless).error_code == 400
    whole(engine, PROMPT, max_new_tokens=1)
    assert seen == [False, True]


def test_leaving_several_frees_their_blocks(open_engine: Any) -> None:
    engine = open_engine(delay=0.005)
    long = GenerationConfig(max_new_tokens=150, ignore_eos=True)
    deltas = engine.generate_all([Asked(PROMPT, long), Asked(PROMPT[::-1], long)])
    next(deltas)
    deltas.close()
    wait_for(lambda: engine.stats()["running"] == 0)
    assert engine.stats()["requests"] == 0


def test_eos_is_counted_but_neither_text_nor_token(open_engine: Any) -> None:
    engine = open_engine()
    r = whole(engine, PROMPT, max_new_tokens=20, logit_bias={EOS: 100.0}, logprobs=0, output_logits="generation")
    assert (r.text, r.token_ids, r.generate_token_len, r.finish_reason, r.stop_reason) == ("", [], 1, "stop", None)
    assert len(r.logits) == 1 and not r.logprobs
    r = whole(engine, PROMPT, max_new_tokens=4, logit_bias={EOS: 100.0}, ignore_eos=True)
    assert r.generate_token_len == 4 and r.text == "" and r.finish_reason == "length"
    r = whole(engine, PROMPT, logit_bias={7: 100.0}, stop_token_ids=[7])
    assert (r.text, r.token_ids, r.stop_reason) == ("", [], 7)
    r = whole(engine, PROMPT, logit_bias={7: 100.0}, stop_token_ids=[7], include_stop_str_in_output=True)
    assert (r.text, r.token_ids) == ("h", [7])


@pytest.mark.parametrize("word, tokens, right", [("a", 1, 1), ("b", 2, 2), ("d", 4, 4), ("e", 5, 4), ("x", 5, 4)])
def test_guesses_behind_a_stop_word_do_not_count_as_accepted(word: str, tokens: int, right: int) -> None:
    """A step that verified six guesses drew five tokens: four that were guessed, and its own."""
    tokenizer: Any = LetterTokenizer()
    stream = RequestStream("a", PROMPT, GenerationConfig(stop_words=[word]), tokenizer, lambda: None)
    stream.deliver(EngineOutput("a", [0, 1, 2, 3, 4], guessed=6, guessed_right=4))
    r = stream.poll()
    assert r is not None
    assert (r.generate_token_len, r.accepted_tokens, r.rejected_tokens) == (tokens, right, 6 - right)


def test_a_stop_word_that_is_a_special_token_stops_by_its_id(open_engine: Any) -> None:
    r = whole(open_engine(), PROMPT, logit_bias={EOS: 100.0}, stop_words=["<eos>"])
    assert (r.text, r.finish_reason, r.stop_reason) == ("", "stop", "<eos>")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_word_across_tokens_cuts_text_tokens_and_the_engines_work(open_engine: Any, include: bool) -> None:
    base: dict[str, Any] = {"max_new_tokens": 150, "ignore_eos": True, "bad_token_ids": [EOS, EOS - 1]}
    free = whole(open_engine(), PROMPT, **base)
    word = free.text[10:13]
    end = free.text.index(word)
    engine = open_engine(delay=0.04)
    deltas = list(
        engine.generate_sync(
            PROMPT, GenerationConfig(**base, stop_words=[word, "123456789"], include_stop_str_in_output=include)
        )
    )
    text = "".join(d.text for d in deltas)
    assert text == free.text[: end + 3 if include else end]
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == word
    assert deltas[-1].generate_token_len == end + 3 == sum(len(d.token_ids) for d in deltas)
    wait_for(lambda: engine.stats()["running"] == 0)
    assert engine.stats()["steps"] < 140 and engine.stats()["kv_usage"] == 0


def test_no_character_of_a_stop_word_is_shown_early(open_engine: Any) -> None:
    engine = open_engine()
    base: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "bad_token_ids": [EOS, EOS - 1]}
    free = whole(engine, PROMPT, **base).text
    word = free[5:9] + "#"  # never comes: its beginning is held back, then shown
    assert whole(engine, PROMPT, **base, stop_words=[word]).text == free
    assert whole(engine, PROMPT, **base, stop_words=[free[-2:] + "#"]).text == free


def test_min_new_tokens_keeps_stop_words_from_stopping(open_engine: Any) -> None:
    engine = open_engine()
    base: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "bad_token_ids": [EOS, EOS - 1]}
    free = whole(engine, PROMPT, **base).text
    r = whole(engine, PROMPT, **base, stop_words=[free[3]], min_new_tokens=20)
    assert r.generate_token_len >= 20 and r.text == free[: len(r.text)]


def test_a_stop_word_may_begin_before_min_new_tokens(open_engine: Any) -> None:
    engine = open_engine()
    base: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "bad_token_ids": [EOS, EOS - 1]}
    free = whole(engine, PROMPT, **base).text
    for count in range(5, 30):  # the end of one token and all of the next
        before, after = (len(whole(engine, PROMPT, **base | {"max_new_tokens": n}).text) for n in (count, count + 1))
        word = free[before - 1 : after]
        if after > before and free.find(word) == before - 1:
            break
    r = whole(engine, PROMPT, **base, stop_words=[word], min_new_tokens=count + 1)
    assert (r.text, r.finish_reason, r.generate_token_len) == (free[: before - 1], "stop", count + 1)


def test_min_new_tokens_counts_beside_a_response_format_of_any_text(open_engine: Any) -> None:
    ends: dict[str, Any] = {"max_new_tokens": 40, "logit_bias": {EOS: 50.0}, "response_format": {"type": "text"}}
    assert whole(open_engine(), PROMPT, **ends, min_new_tokens=20).generate_token_len == 21


def test_a_slow_consumer_gets_longer_deltas_and_the_same_answer(open_engine: Any) -> None:
    engine = open_engine()
    base: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}
    free = whole(engine, PROMPT, **base)
    deltas = []
    for delta in engine.generate_sync(PROMPT, GenerationConfig(**base)):
        deltas.append(delta)
        wait_for(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0)
    assert len(deltas) < 40
    assert "".join(d.text for d in deltas) == free.text and [t for d in deltas for t in d.token_ids] == free.token_ids


def test_leaving_the_iteration_frees_the_blocks(open_engine: Any) -> None:
    engine = open_engine(delay=0.005)

    async def leave() -> None:
        stream = engine.generate(PROMPT, GenerationConfig(max_new_tokens=150, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        task = asyncio.ensure_future(anext(engine.generate(PROMPT, GenerationConfig(max_new_tokens=150))))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    wait_for(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0)
    assert engine.stats()["kv_usage"] == 0 and engine.stats()["requests"] == 0


def test_new_weights_wait_for_no_reader(open_engine: Any) -> None:
    """Who has not read an answer to its end may be the very thread that brings weights."""
    engine = open_engine(delay=0.02)
    deltas = engine.generate_sync(PROMPT, GenerationConfig(max_new_tokens=5, ignore_eos=True))
    first = next(deltas)
    assert engine.weights._busy()
    wait_for(lambda: not engine.weights._busy())
    assert engine.stats()["requests"] == 1
    assert first.generate_token_len + sum(len(delta.token_ids) for delta in deltas) == 5


def test_event_loops_that_have_ended_are_let_go(open_engine: Any) -> None:
    engine = open_engine()

    async def once() -> int:
        return len([delta async for delta in engine.generate(PROMPT, GenerationConfig(max_new_tokens=2))])

    for _ in range(3):
        assert asyncio.run(once())
    wait_for(lambda: gc.collect() >= 0 and not len(engine._bells))


def test_abort_ends_the_stream_with_a_reason(open_engine: Any) -> None:
    engine = open_engine(delay=0.02)
    endless = GenerationConfig(max_new_tokens=190, ignore_eos=True)
    deltas = engine.generate_sync(PROMPT, endless, request_id="mine")
    next(deltas)
    engine.abort("mine")
    *_, last = deltas
    assert last.finish_reason == "abort" and 0 < last.generate_token_len < 190
    engine.abort("mine")
    engine.abort("never heard of")


def test_a_name_that_was_left_is_free_and_gets_nothing_of_what_was_left(open_engine: Any) -> None:
    engine = open_engine(delay=0.02)
    endless, short = (GenerationConfig(max_new_tokens=n, ignore_eos=True) for n in (190, 4))
    alone = [token for delta in engine.generate_sync([9], short) for token in delta.token_ids]
    for _ in range(3):
        left = engine.generate_sync(PROMPT, endless, request_id="mine")
        next(left)
        left.close()
        again = list(engine.generate_sync([9], short, request_id="mine"))
        assert again[-1].finish_reason == "length" and [t for delta in again for t in delta.token_ids] == alone


@pytest.mark.parametrize(
    ("tokens", "change", "code", "message"),
    [
        ([], {}, 400, "empty"),
        ([VOCAB], {}, 400, "vocabulary"),
        ([1] * 200, {}, 400, "session length is 200"),
        ([1], {"temperature": 7.0}, 400, "temperature"),
        ([1], {"response_format": {"type": "sonnet"}}, 400, "response_format"),
        ([1], {"response_format": {"type": "regex_schema", "regex_schema": "(("}}, 400, "regex_schema"),
        ([1], {"logits_processors": [3]}, 400, "logits_processors"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, 400, "logit_bias"),
    ],
)
def test_a_bad_request_gets_an_error_response(
    open_engine: Any, tokens: list[int], change: dict[str, Any], code: int, message: str
) -> None:
    engine = open_engine()
    config = GenerationConfig(max_new_tokens=3)
    for name, value in change.items():
        setattr(config, name, value)
    (r,) = list(engine.generate_sync(tokens, config))
    assert (r.finish_reason, r.error_code, r.input_token_len) == ("error", code, len(tokens))
    assert message in str(r.error_message) and "\n" not in str(r.error_message)
    assert whole(engine, PROMPT, max_new_tokens=2).generate_token_len == 2


def test_max_new_tokens_none_fills_the_session(open_engine: Any) -> None:
    r = whole(open_engine(), PROMPT, max_new_tokens=None, ignore_eos=True)
    assert r.generate_token_len == 200 - len(PROMPT) and r.finish_reason == "length"


def test_score_is_the_log_probability_of_each_token(open_engine: Any, fake: Any) -> None:
    engine = open_engine()
    tokens = [(i * 7) % 50 for i in range(90)]
    found = engine.score(tokens)
    logits = fake.make_logits(fake.reference_states(tokens, (None,)), VOCAB)
    expected = fake.host_sampler.log_softmax(logits)[np.arange(89), tokens[1:]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == np.float32 and found.shape == (89,)
    with pytest.raises(ToolkitError, match="vocabulary"):
        engine.score([1, VOCAB])


def test_logprobs_logits_and_hidden_come_along(open_engine: Any) -> None:
    r = whole(
        open_engine(), PROMPT, max_new_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=0,
        output_logits="all", output_last_hidden_state="generation",
    )  # fmt: skip
    assert r.logits.shape == (len(PROMPT) + 4, VOCAB) and r.logits.dtype == np.float32
    assert r.last_hidden_state.shape == (5, 4)
    assert len(r.logprobs or []) == 5 and len(r.prompt_logprobs or []) == len(PROMPT)


def test_timings_are_filled_in(open_engine: Any) -> None:
    timings = Timings()
    list(open_engine(delay=0.01).generate_sync(PROMPT, GenerationConfig(max_new_tokens=4), timings=timings))
    assert 0 < timings.first_token < timings.finish


def test_closing_fails_what_runs(open_engine: Any) -> None:
    engine = open_engine(delay=0.02)
    deltas = engine.generate_sync(PROMPT, GenerationConfig(max_new_tokens=190, ignore_eos=True))
    next(deltas)
    engine.close()
    *_, last = deltas
    assert last.finish_reason == "error" and last.error_code == 503
    assert not engine.healthy
    (after,) = list(engine.generate_sync(PROMPT))
    assert after.error_code == 503 and "closed" in str(after.error_message)


@pytest.mark.parametrize("breaks", [False, True])
def test_who_waits_for_a_call_is_told_that_the_engine_has_ended(open_engine: Any, breaks: bool) -> None:
    engine = open_engine()
    loop, began, go_on = engine._loop, threading.Event(), threading.Event()

    def last_step() -> list[Any]:
        began.set()
        go_on.wait(60)
        if breaks:
            raise RuntimeError("broken")
        return []

    loop._core.step = last_step
    loop.add(EngineRequest("one", PROMPT, resolve(GenerationConfig(), engine.tokenizer, len(PROMPT), 200)), [])
    assert began.wait(60)
    closing = None if breaks else threading.Thread(target=engine.close)
    if closing is not None:
        closing.start()
        wait_for(lambda: not loop._inbox.empty())
    waiting = loop.call("sleep", [])
    go_on.set()
    with pytest.raises(ToolkitError, match="broken" if breaks else "closed"):
        waiting.result(60)
    with pytest.raises(ToolkitError):
        loop.call("sleep", []).result(60)
    if closing is not None:
        closing.join(60)


def test_a_loop_that_breaks_says_so_instead_of_hanging(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(delay=0.01)

    def no_memory(num_blocks: Any) -> None:
        raise MemoryError("no cache")

    engine._loop._core.runner.allocate_cache = no_memory
    monkeypatch.setattr("toolkit.engine.in_flight.BROKEN_AFTER", 1)
    engine._loop._core.runner.fail_on = {3, 4}
    deltas = list(engine.generate_sync(PROMPT, GenerationConfig(max_new_tokens=50, ignore_eos=True)))
    assert deltas[-1].finish_reason == "error" and "MemoryError" in str(deltas[-1].error_message)
    wait_for(lambda: not engine.healthy)
    (after,) = list(engine.generate_sync(PROMPT))
    assert after.error_code == 503 and "given up" in str(after.error_message)
