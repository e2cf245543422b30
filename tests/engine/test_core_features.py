"""What the engine loop owes a single request besides its tokens, and how it survives bad ones."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from toolkit.box.box import Box
from toolkit.engine.constraints import host_sampler
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams
from toolkit.models.spec import AttentionSpec, LayerSpec, LinearSpec, RopeSpec, Sublayer

VOCAB = 64
ALPHABET = b'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,. -truefalsn\\+Eyo!?_'


@dataclass
class LetterTokenizer:
    """One token a byte; the last id is eos. A few tokens are longer."""

    special_ids = frozenset({VOCAB - 1})
    eos_ids = (VOCAB - 1,)

    @property
    def token_bytes(self) -> list[bytes]:
        letters = [bytes([b]) for b in dict.fromkeys(ALPHABET)]
        longer = [b"ab", b"abc", b"bcd", b"ye", b"es", b"no", b"true", b'":']
        found = (letters + longer)[: VOCAB - 1]
        return found + [b"?!"] * (VOCAB - 1 - len(found)) + [b"<eos>"]


def logits_at(fake: Any, ids: list[int], windows: Any = (None,)) -> np.ndarray:
    """Logits after every position, from the model without a cache."""
    return fake.make_logits(fake.reference_states(ids, windows), VOCAB)


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


# -- prefix cache and sessions --------------------------------------------------------------------


def test_a_repeated_prompt_is_served_from_the_cache_but_for_its_last_token(fake: Any) -> None:
    core = fake.make_core()
    first = fake.ask(core, [*PROMPT, 7])
    before = core.runner.tokens_computed
    second = fake.ask(core, [*PROMPT, 7])
    assert fake.tokens_of(first) == fake.tokens_of(second)
    assert [o.cached_tokens for o in (first[-1], second[-1])] == [0, 11]
    assert core.runner.tokens_computed - before == 1 + 7
    assert core.stats()["prefix_hit_tokens"] == 11 and core.stats()["prefix_queried_tokens"] == 24


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), ("state",)])
def test_a_request_goes_on_in_the_middle_of_a_block(fake: Any, windows: tuple[Any, ...]) -> None:
    """Of an ended request, and of one that went another way; states are known at borders alone."""
    core, states = fake.make_core(windows, block_size=8), "state" in windows
    answer = fake.tokens_of(fake.ask(core, PROMPT, 10))
    turns = {"on": [*PROMPT, *answer, 7, 7], "aside": [*PROMPT, *answer[:7], 60, 60], "early": [*PROMPT[:5], 60, 60]}
    shared = {"on": len(PROMPT) + 9, "aside": len(PROMPT) + 7, "early": 5}
    for name, prompt in turns.items():
        last = fake.ask(core, prompt, 6)
        fresh = fake.ask(fake.make_core(windows, block_size=8), prompt, 6)
        assert fake.tokens_of(last) == fake.tokens_of(fresh)
        assert last[-1].cached_tokens == (shared[name] // 8 * 8 if states else shared[name]), name
    core.check_integrity()


def test_ends_are_kept_of_as_many_requests_as_run_at_once(fake: Any) -> None:
    core = fake.make_core(block_size=8, max_batch_size=2)
    prompts = [[i, *PROMPT[:5]] for i in range(20, 23)]
    for prompt in prompts:
        fake.ask(core, prompt, 1)
    usage = [sum(key is not None for key in pool._keys) for pool in core.blocks.pools]
    assert usage == [2]
    assert [fake.ask(core, prompt, 1)[-1].cached_tokens for prompt in reversed(prompts)] == [5, 5, 0]


def test_a_copy_whose_step_fails_is_made_again(fake: Any) -> None:
    core = fake.make_core(block_size=8)
    fake.ask(core, PROMPT, 1)
    prompt = [*PROMPT[:5], 60, 60]
    core.runner.fail_on = {core.runner.steps}
    last = fake.ask(core, prompt, 4)
    assert last[-1].cached_tokens == 5
    assert fake.tokens_of(last) == fake.tokens_of(fake.ask(fake.make_core(block_size=8), prompt, 4))
    core.check_integrity()


def test_equal_prompts_that_arrive_together_are_computed_once(fake: Any) -> None:
    core = fake.make_core()
    prompt = list(range(40))
    for i in range(6):
        core.add(EngineRequest(str(i), prompt, SamplingParams(1)))
    outputs = fake.run(core)
    assert len({tuple(fake.tokens_of(o)) for o in outputs.values()}) == 1
    assert core.runner.tokens_computed == 40 + 5


def test_without_prefix_caching_only_the_turns_of_a_session_share(fake: Any) -> None:
    core = fake.make_core(prefix_caching=False)
    fake.ask(core, PROMPT)
    assert fake.ask(core, PROMPT)[-1].cached_tokens == 0
    fake.ask(core, PROMPT, session="s")
    assert fake.ask(core, PROMPT, session="t")[-1].cached_tokens == 0
    assert fake.ask(core, PROMPT, session="s")[-1].cached_tokens == 10


def test_a_session_keeps_prompt_and_answer_through_others_traffic(fake: Any) -> None:
    core = fake.make_core(blocks=30, session_len=60)
    answer = fake.tokens_of(fake.ask(core, PROMPT, 9, session="s"))
    for i in range(12):  # would evict an unpinned prefix
        fake.ask(core, [(i * 5 + j) % 60 for j in range(44)], 4)
    turn = fake.ask(core, PROMPT + answer + [1, 2], 4, session="s")
    assert turn[-1].cached_tokens == (len(PROMPT) + 8) // 4 * 4
    assert core.blocks.usage() > 0
    core.end_session("s")
    assert core.blocks.usage() == 0


# -- scheduling -------------------------------------------------------------------------------------


def test_decoding_goes_on_while_a_long_prompt_comes_in_chunks(fake: Any) -> None:
    core = fake.make_core(max_prefill_token_num=10)
    core.add(EngineRequest("early", [1], SamplingParams(30)))
    core.step()
    core.add(EngineRequest("long", list(range(60)) * 2, SamplingParams(1)))
    chunks = 0
    while True:
        outputs = core.step()
        if "long" in {o.id for o in outputs}:
            break
        assert [o.id for o in outputs] == ["early"], "every step decodes"
        chunks += 1
    assert chunks >= 12 and core.runner.max_tokens <= 10


def test_the_latest_arrival_is_preempted_and_nothing_is_lost(fake: Any) -> None:
    core = fake.make_core(blocks=12, session_len=48)
    for i in range(3):
        core.add(EngineRequest(str(i), [i + 1] * 9, SamplingParams(30)))
    outputs = fake.run(core)
    assert core.stats()["preemptions"] > 0
    alone = {str(i): fake.tokens_of(fake.ask(fake.make_core(), [i + 1] * 9, 30)) for i in range(3)}
    assert {k: fake.tokens_of(v) for k, v in outputs.items()} == alone
    order = [next(iter(o for o in outputs[i] if o.finish_reason)) for i in "012"]
    assert all(o.finish_reason == "length" for o in order)


def test_waiting_requests_start_in_order_of_arrival(fake: Any) -> None:
    core = fake.make_core(max_batch_size=1, prefix_caching=False)
    for i in range(5):
        core.add(EngineRequest(str(i), [i], SamplingParams(2)))
    done = []
    while core.has_work:
        done += [o.id for o in core.step() if o.finish_reason]
    assert done == list("01234")


def test_abort_frees_blocks_at_once_and_reports_once(fake: Any) -> None:
    core = fake.make_core(max_batch_size=1)
    for name in "ab":
        core.add(EngineRequest(name, PROMPT, SamplingParams(50)))
    core.step()
    assert core.blocks.usage() > 0
    core.abort("a")
    assert core.blocks.usage() == 0
    core.abort("b")  # still waiting
    core.abort("a")
    core.abort("nobody")
    assert sorted((o.id, o.finish_reason) for o in core.step()) == [("a", "abort"), ("b", "abort")]
    assert not core.has_work


# -- bad requests and failures ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, VOCAB], {}, f"token id {VOCAB} is outside the model's vocabulary of {VOCAB}"),
        ([1, -1], {}, "token id -1 is outside"),
        ([1] * 200, {}, "has 200 tokens, but the session length is 200"),
        ([1], {"logit_bias": {999: 1.0}}, "logit_bias: token id 999"),
        ([1], {"bad_token_ids": [999]}, "bad_token_ids: token id 999"),
        ([1], {"bad_words": ["x"]}, "opened without a tokenizer"),
    ],
)
def test_a_bad_request_ends_alone(fake: Any, tokens: list[int], params: dict[str, Any], message: str) -> None:
    core = fake.make_core()
    core.add(EngineRequest("good", PROMPT, SamplingParams(5)))
    core.add(EngineRequest("bad", tokens, SamplingParams(5, **params)))
    outputs = fake.run(core)
    (error,) = outputs["bad"]
    assert error.finish_reason == "error" and error.error_code == 400
    assert message in str(error.error)
    assert fake.tokens_of(outputs["good"]) == fake.tokens_of(fake.ask(fake.make_core(), PROMPT, 5))


def test_a_second_request_of_the_same_id_is_refused(fake: Any) -> None:
    core = fake.make_core()
    core.add(EngineRequest("r", PROMPT, SamplingParams(3)))
    core.add(EngineRequest("r", PROMPT, SamplingParams(3)))
    outputs = fake.run(core)["r"]
    assert [o.finish_reason for o in outputs if o.finish_reason] == ["error", "length"]


def test_what_the_cache_cannot_hold_is_refused_with_the_number(fake: Any) -> None:
    core = fake.make_core(blocks=5)
    assert core.max_len == 20
    (error,) = fake.ask(core, [1] * 25)
    assert "25 tokens" in str(error.error) and "all that the KV cache holds" in str(error.error)
    outputs = fake.ask(core, [1] * 15, 50)
    assert len(fake.tokens_of(outputs)) == 5 and outputs[-1].finish_reason == "length"


def test_generation_is_cut_at_the_session_length(fake: Any) -> None:
    outputs = fake.ask(fake.make_core(session_len=16), PROMPT, 50)
    assert len(fake.tokens_of(outputs)) == 16 - len(PROMPT) and outputs[-1].finish_reason == "length"


def test_nan_logits_end_the_request_that_has_them(fake: Any) -> None:
    core = fake.make_core()
    core.runner.nan_on = {33}
    core.add(EngineRequest("sick", [1, 2, 33], SamplingParams(5)))
    core.add(EngineRequest("well", PROMPT, SamplingParams(5)))
    outputs = fake.run(core)
    assert outputs["sick"][-1].finish_reason == "error" and "NaN" in str(outputs["sick"][-1].error)
    assert len(fake.tokens_of(outputs["well"])) == 5


# -- sampling ---------------------------------------------------------------------------------------


def test_a_seed_decides_the_tokens_and_neighbours_do_not(fake: Any) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "top_k": 30, "seed": 2**64 - 5}
    one = fake.tokens_of(fake.ask(fake.make_core(), PROMPT, 12, **sampled))
    core = fake.make_core()
    for i in range(5):
        core.add(EngineRequest(f"other{i}", [i, i], SamplingParams(9, temperature=1.0, seed=i)))
    assert fake.tokens_of(fake.ask(core, PROMPT, 12, **sampled)) == one
    assert fake.tokens_of(fake.ask(fake.make_core(), PROMPT, 12, **(sampled | {"seed": 1}))) != one


def test_stop_tokens_end_the_answer_but_not_before_min_new_tokens(fake: Any) -> None:
    free = fake.tokens_of(fake.ask(fake.make_core(), PROMPT, 12))
    stop = free[3]
    outputs = fake.ask(fake.make_core(), PROMPT, 12, stop_token_ids=[stop, 10**6])
    assert fake.tokens_of(outputs) == free[: free.index(stop) + 1]
    assert outputs[-1].finish_reason == "stop" and outputs[-1].stop_token == stop
    late = fake.tokens_of(fake.ask(fake.make_core(), PROMPT, 12, stop_token_ids=[stop], min_new_tokens=7))
    assert stop not in late[:7] and late[:3] == free[:3]


def test_bias_and_bad_token_ids(fake: Any) -> None:
    free = fake.tokens_of(fake.ask(fake.make_core(), PROMPT, 6))
    assert fake.tokens_of(fake.ask(fake.make_core(), PROMPT, 6, logit_bias={17: 100.0})) == [17] * 6
    outputs = fake.ask(fake.make_core(), PROMPT, 6, logit_bias={17: 100.0}, bad_token_ids=[17, free[0]])
    assert not {17, free[0]} & set(fake.tokens_of(outputs))


def test_penalties_push_repeated_tokens_down(fake: Any) -> None:
    biased = {"logit_bias": {5: 17.0}}
    assert fake.tokens_of(fake.ask(fake.make_core(), [5], 8, **biased)) == [5] * 8
    tokens = fake.tokens_of(fake.ask(fake.make_core(), [5], 20, presence_penalty=2.0, frequency_penalty=2.0, **biased))
    assert 5 < tokens.count(5) < 15
    tokens = fake.tokens_of(fake.ask(fake.make_core(), [5], 12, repetition_penalty=100.0))
    assert len({5, *tokens}) == 13


def test_logprobs_are_of_the_adjusted_logits_with_the_best_ones_beside(fake: Any) -> None:
    outputs = fake.ask(fake.make_core(), PROMPT, 5, logprobs=3, logit_bias={7: 4.0})
    ids = list(PROMPT)
    for output in outputs:
        x = logits_at(fake, ids)[-1].copy()
        x[7] += 4
        expected = host_sampler.log_softmax(x)
        (token,), (found,) = output.token_ids, output.logprobs
        assert found == pytest.approx({i: float(expected[i]) for i in found}) and token in found
        assert set(np.argsort(-expected)[:3].tolist()) <= set(found)
        ids.append(token)
    plain = fake.ask(fake.make_core(), PROMPT, 1, logprobs=0)[0]
    assert list(plain.logprobs[0]) == plain.token_ids


# -- all positions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [200, 13])
@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_whatever_the_chunks_cache_hits_and_preemptions(fake: Any, top: int, blocks: int) -> None:
    core = fake.make_core(max_prefill_token_num=5, blocks=blocks, session_len=50, max_logit_bytes=4 * VOCAB * 3)
    prompt = (PROMPT * 3)[:26]
    fake.ask(core, prompt)  # would be hit
    core.add(EngineRequest("other", [8] * 20, SamplingParams(20)))
    core.step()
    outputs = fake.ask(core, prompt, 12, prompt_logprobs=top, logits="all", hidden="all")
    assert outputs[-1].cached_tokens == 0
    whole = [*prompt, *fake.tokens_of(outputs)]
    expected = logits_at(fake, whole)[: len(whole) - 1]
    np.testing.assert_array_equal(np.concatenate([o.logits for o in outputs if o.logits is not None]), expected)
    assert sum(len(o.hidden) for o in outputs if o.hidden is not None) == len(whole) - 1
    (found,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs]
    assert found[0] is None and len(found) == len(prompt)
    logprobs = host_sampler.log_softmax(expected)
    for p, given in enumerate(found[1:]):
        assert given is not None and prompt[p + 1] in given and len(given) >= max(1, top)
        assert given == pytest.approx({t: float(logprobs[p, t]) for t in given})


def test_generation_logits_and_hidden_have_a_row_for_every_drawn_token(fake: Any) -> None:
    core = fake.make_core()
    fake.ask(core, PROMPT)
    outputs = fake.ask(core, PROMPT, 6, logits="generation", hidden="generation", prompt_logprobs=1)
    whole = [*PROMPT, *fake.tokens_of(outputs)]
    rows = np.concatenate([o.logits for o in outputs if o.logits is not None])
    np.testing.assert_array_equal(rows, logits_at(fake, whole)[len(PROMPT) - 1 : -1])
    assert sum(len(o.hidden) for o in outputs if o.hidden is not None) == 6


@pytest.mark.parametrize("budget", [1, 4, 64])
def test_scoring_draws_nothing(fake: Any, budget: int) -> None:
    core = fake.make_core(max_prefill_token_num=budget)
    for prompt in (PROMPT, [5]):
        outputs = fake.ask(core, prompt, 1, only="score")
        assert not fake.tokens_of(outputs) and outputs[-1].finish_reason == "length"
        logprobs = host_sampler.log_softmax(logits_at(fake, prompt))
        found = outputs[-1].prompt_logprobs
        assert found is not None and found[0] is None
        expected = [{t: pytest.approx(float(logprobs[p, t]))} for p, t in enumerate(prompt[1:])]
        assert found[1:] == expected
    assert len(fake.ask(core, [1] * 200, 1, only="score")[-1].prompt_logprobs) == 200


# -- processors, words, grammars ----------------------------------------------------------------------


def test_logits_processors_see_the_tokens_and_change_the_draw(fake: Any) -> None:
    seen: list[list[int]] = []

    def only_even(ids: Any, logits: Any) -> Any:
        seen.append(ids.tolist())
        logits[1::2] = float("-inf")
        return logits

    core = fake.make_core()
    core.add(EngineRequest("plain", PROMPT, SamplingParams(6)))
    params: dict[str, Any] = {"temperature": 0.8, "seed": 3, "logprobs": 1, "repetition_penalty": 1.3}
    outputs = fake.ask(core, PROMPT, 6, [only_even], **params)
    tokens = fake.tokens_of(outputs)
    assert all(t % 2 == 0 for t in tokens) and all(o.logprobs[0][t] < 0 for o, t in zip(outputs, tokens, strict=True))
    assert seen == [PROMPT + tokens[:i] for i in range(6)]
    untouched = fake.ask(fake.make_core(), PROMPT, 6, [lambda ids, logits: logits], **params)
    assert fake.tokens_of(untouched) == fake.tokens_of(fake.ask(fake.make_core(), PROMPT, 6, **params))


def test_a_processor_that_fails_ends_its_request_alone(fake: Any) -> None:
    core = fake.make_core()
    core.add(EngineRequest("plain", PROMPT, SamplingParams(6)))
    core.add(EngineRequest("broken", PROMPT, SamplingParams(6)), [lambda ids, logits: 1 / 0])
    core.add(EngineRequest("short", PROMPT, SamplingParams(6)), [lambda ids, logits: logits[:3]])
    outputs = fake.run(core)
    assert "ZeroDivisionError" in str(outputs["broken"][-1].error)
    assert "expected logits of shape" in str(outputs["short"][-1].error)
    assert len(fake.tokens_of(outputs["plain"])) == 6


def test_bad_words_never_appear_across_token_borders(fake: Any) -> None:
    tokenizer = LetterTokenizer()
    vocabulary = tokenizer.token_bytes
    core = fake.make_core(tokenizer=tokenizer)
    likes = {i: 9.0 for i, b in enumerate(vocabulary) if (b and b in b"abcd") or b in (b"ab", b"abc", b"bcd")}
    params: dict[str, Any] = {"temperature": 1.0, "logit_bias": likes}
    words = ["abc", "bb", "dab"]
    for seed in range(6):
        free = b"".join(vocabulary[t] for t in fake.tokens_of(fake.ask(core, PROMPT, 60, seed=seed, **params)))
        assert any(w.encode() in free for w in words)
        held = b"".join(
            vocabulary[t] for t in fake.tokens_of(fake.ask(core, PROMPT, 60, seed=seed, bad_words=words, **params))
        )
        assert len(held) >= 60 and not any(w.encode() in held for w in words)


@pytest.mark.parametrize(("word", "reason"), [("e", "stop"), ("eos", "stop"), ("<eos>", "length")])
def test_a_bad_word_rules_a_special_token_out_by_its_whole_name_alone(fake: Any, word: str, reason: str) -> None:
    """It is no text; without the one that ends the answer this would go on to its limit."""
    core = fake.make_core(tokenizer=LetterTokenizer())
    params: dict[str, Any] = {"logit_bias": {VOCAB - 1: 100.0}, "stop_token_ids": [VOCAB - 1]}
    assert fake.ask(core, PROMPT, 5, bad_words=[word], **params)[-1].finish_reason == reason


@pytest.mark.parametrize(
    ("response_format", "pattern"),
    [
        ({"type": "choice", "choice": ["yes", "no", "yesno"]}, r"yes|no|yesno"),
        ({"type": "regex_schema", "regex_schema": "[abc]{3}-[0-9]{2}"}, r"[abc]{3}-[0-9]{2}"),
        ({"type": "grammar", "grammar": 'root ::= "a" [xyz] "b"'}, r"a[xyz]b"),
        (
            {"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "boolean"}}},
            r"true|false",
        ),
    ],
)
@pytest.mark.parametrize("stops", [[VOCAB - 1], []])
def test_constrained_output_follows_its_grammar_to_the_end(
    fake: Any, response_format: dict[str, Any], pattern: str, stops: list[int]
) -> None:
    import re

    tokenizer = LetterTokenizer()
    core = fake.make_core(tokenizer=tokenizer)
    core.add(EngineRequest("free", PROMPT, SamplingParams(20, temperature=1.0, seed=1)))
    for seed in range(4):
        outputs = fake.ask(core, PROMPT, 40, grammar=response_format, temperature=1.0, seed=seed, stop_token_ids=stops,
            min_new_tokens=seed * 10,
        )  # fmt: skip
        tokens = fake.tokens_of(outputs)
        text = b"".join(tokenizer.token_bytes[t] for t in tokens if t != VOCAB - 1).decode()
        assert outputs[-1].finish_reason == "stop"
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "regex_schema", "regex_schema": "(["},
        {"type": "grammar", "grammar": "root ::= ("},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"schema": {"const": object()}}},
        {"type": "json_schema", "json_schema": {"type": "nonsense"}},
        {"type": "choice", "choice": []},
        {"type": "poem"},
    ],
)
def test_a_grammar_that_does_not_compile_is_that_requests_error(fake: Any, response_format: dict[str, Any]) -> None:
    core = fake.make_core(tokenizer=LetterTokenizer())
    core.add(EngineRequest("good", PROMPT, SamplingParams(4)))
    core.add(EngineRequest("bad", PROMPT, SamplingParams(4, grammar=response_format)))
    outputs = fake.run(core)
    (error,) = outputs["bad"]
    assert error.error_code == 400 and str(error.error).startswith("response_format") and "\n" not in str(error.error)
    assert "/cpp/" not in str(error.error)
    assert len(fake.tokens_of(outputs["good"])) == 4


def test_a_grammar_that_takes_long_to_compile_holds_nobody_else_up(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.engine.constraints import request as constraints

    compile_it = Box.run
    go_on = threading.Event()

    def slow(self: Any, *args: Any, **more: Any) -> Any:
        assert go_on.wait(60)
        return compile_it(self, *args, **more)

    monkeypatch.setattr(Box, "run", slow)
    core = fake.make_core(tokenizer=LetterTokenizer())
    choice: dict[str, Any] = {"type": "choice", "choice": ["no"]}
    for name in ("slow", "unwanted"):
        core.add(EngineRequest(name, PROMPT, SamplingParams(9, grammar=choice)))
    core.add(EngineRequest("slow", PROMPT, SamplingParams(9)))  # the id is taken
    core.add(EngineRequest("quick", PROMPT, SamplingParams(4)))
    core.abort("unwanted")
    early = []
    while "length" not in [o.finish_reason for o in early]:
        early += core.step()
    assert {o.id: o.finish_reason for o in early if o.finish_reason} == {
        "slow": "error", "unwanted": "abort", "quick": "length"
    }  # fmt: skip
    assert core.has_work and core.stats()["waiting"] == 1
    go_on.set()
    outputs = fake.run(core)["slow"]
    text = b"".join(LetterTokenizer().token_bytes[t] for t in fake.tokens_of(outputs))
    assert text == b"no<eos>" and outputs[-1].finish_reason == "stop" and outputs[-1].stop_token == VOCAB - 1
    assert core.intake.constraints.find(SamplingParams(9, grammar=choice)) is not None
    go_on.clear()
    monkeypatch.setattr(constraints, "PATIENCE", 0.01)
    (late,) = fake.ask(core, PROMPT, 9, grammar={"type": "choice", "choice": ["yes"]})
    assert "not compiled after" in str(late.error) and late.error_code == 503
    go_on.set()


def test_many_choices_of_one_grammar_are_compiled_once_by_few_threads(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.engine.constraints import request as constraints

    compile_it, now, most, asked = Box.run, [0], [0], []
    counting = threading.Lock()

    def counted(self: Any, response_format: dict[str, Any], **more: Any) -> Any:
        with counting:
            asked.append(response_format["choice"][0])
            now[0] += 1
            most.append(now[0])
        try:
            return compile_it(self, response_format, **more)
        finally:
            with counting:
                now[0] -= 1

    monkeypatch.setattr(Box, "run", counted)
    core = fake.make_core(tokenizer=LetterTokenizer(), blocks=400)
    for i in range(200):
        core.add(EngineRequest(f"same {i}", PROMPT, SamplingParams(9, grammar={"type": "choice", "choice": ["no"]})))
    for i in range(9):
        own: dict[str, Any] = {"type": "choice", "choice": ["yes", "no"] + [f"n{i}"] * i}
        core.add(EngineRequest(f"own {i}", PROMPT, SamplingParams(9, grammar=own)))
    outputs = fake.run(core, limit=5000)
    assert len(outputs) == 209 and {o[-1].finish_reason for o in outputs.values()} == {"stop"}
    assert sorted(asked) == ["no"] + ["yes"] * 9 and max(most) <= constraints.THREADS


def test_the_engine_s_thread_waits_for_nothing_that_others_build(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.engine.constraints.bad_words import BadWords

    core = fake.make_core(tokenizer=LetterTokenizer())
    fake.ask(core, PROMPT, 1, bad_words=["ab"])
    search, go_on, began = BadWords.containing, threading.Event(), threading.Event()

    def slow(self: Any, words: Any) -> Any:
        began.set()
        assert go_on.wait(60)
        return search(self, words)

    monkeypatch.setattr(BadWords, "containing", slow)
    core.add(EngineRequest("new list", PROMPT, SamplingParams(3, bad_words=["bb"])))
    assert began.wait(60)
    late = threading.Timer(50, go_on.set)  # an engine that waits for it ends all the same
    late.start()
    core.add(EngineRequest("known list", PROMPT, SamplingParams(3, bad_words=["ab"])))
    early: list[EngineOutput] = []
    while "known list" not in [o.id for o in early if o.finish_reason]:
        early += core.step()
    assert not go_on.is_set()
    late.cancel()
    go_on.set()
    assert fake.run(core)["new list"][-1].finish_reason == "length"


def test_a_grammar_is_told_how_many_share_the_step(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.engine.constraints.grammar_pace import Pace

    told: list[int] = []
    take = Pace.next_token
    monkeypatch.setattr(Pace, "next_token", lambda self: told.append(self.among) or take(self))
    core = fake.make_core(tokenizer=LetterTokenizer())
    core.add(EngineRequest("free", PROMPT, SamplingParams(30)))
    for i in range(5):
        format_ = {"type": "regex_schema", "regex_schema": "[ab]{20}"}
        core.add(EngineRequest(str(i), PROMPT, SamplingParams(40, grammar=format_)))
    fake.run(core)
    assert max(told) == 5


@pytest.mark.parametrize("process", [True, False])
def test_requests_that_pour_in_do_not_hold_up_those_that_run(
    fake: Any, process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multiprocessing import Pipe

    from toolkit.engine.process import loop, records, worker

    core, events = fake.make_core(), []
    add, step = core.add, core.step
    monkeypatch.setattr(core, "add", lambda *args: events.append("add") or add(*args))
    monkeypatch.setattr(core, "step", lambda: events.append("step") or step())
    requests = [EngineRequest(str(i), PROMPT, SamplingParams(3)) for i in range(10)]
    monkeypatch.setattr(worker if process else loop, "INTAKE_SECONDS", 0.0)
    if process:
        ours, theirs = Pipe()
        for request in requests:
            ours.send_bytes(records.pack_add(request))
        ours.send_bytes(records.pack({"op": "close"}))
        worker._serve(theirs, core)
    else:
        go_on = threading.Event()
        thread = loop.ThreadLoop(core, None, lambda outputs: None, lambda outage: None)  # type: ignore[arg-type]
        thread._inbox.put(go_on.wait)
        for request in requests:
            thread.add(request, ())
        go_on.set()
        thread.close()
    first = events.index("add")
    assert events[first : first + 4] == ["add", "step", "add", "step"]


def test_a_grammar_that_reads_a_text_in_too_many_ways_ends_its_request_alone(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.engine.constraints import grammar_pace

    core = fake.make_core(tokenizer=LetterTokenizer())
    letters = {"type": "regex_schema", "regex_schema": "[ab]{60}"}
    core.add(EngineRequest("bad", PROMPT, SamplingParams(40, grammar=letters)))
    early: list[EngineOutput] = []
    while sum(len(o.token_ids) for o in early if o.id == "bad") < 3:
        early += core.step()
    core.add(EngineRequest("good", PROMPT, SamplingParams(9, grammar={"type": "choice", "choice": ["no"]})))
    core.add(EngineRequest("free", PROMPT, SamplingParams(30)))
    monkeypatch.setattr(grammar_pace, "EACH", -1.0)  # each token takes a second more than it may
    monkeypatch.setattr(grammar_pace, "AT_ONCE", 0.2)
    (request,) = [s for s in core.scheduler.running if s.id == "bad"]
    early += core.step()
    monkeypatch.setattr(grammar_pace, "EACH", 0.004)
    early += core.step()
    assert request.finished
    outputs = fake.run(core)
    last = [o for o in early if o.id == "bad"][-1]
    assert last.error_code == 400 and str(last.error).startswith("response_format: takes too long to follow")
    assert outputs["good"][-1].finish_reason == "stop"
    assert len(fake.tokens_of([o for o in early if o.id == "free"] + outputs["free"])) == 30


# -- rope -------------------------------------------------------------------------------------------


def two_sets(fake: Any, session_len: int) -> EngineCore:
    """Of a model that turns requests of more than 24 tokens by other frequencies."""
    runner = fake.FakeRunner((None,), VOCAB, 4)
    linear = LinearSpec("x", 4, 4)
    rope = RopeSpec(4, 1e4, kind="longrope", original_max_position=24)
    attention = AttentionSpec(linear, linear, linear, linear, 1, 1, 4, 1.0, rope)
    runner.spec = replace(runner.spec, layers=(LayerSpec((Sublayer(attention, None),)),))
    runner.allocate_cache((100,))
    return EngineCore(runner, EngineOptions(session_len, 4, 64, (100,)), None)


def test_long_requests_use_the_long_frequencies_and_never_share_with_short_ones(fake: Any) -> None:
    core = two_sets(fake, 100)
    short = fake.ask(core, PROMPT, 24 - len(PROMPT))
    long = fake.ask(core, PROMPT, 25 - len(PROMPT))
    assert long[-1].cached_tokens == 0 and fake.ask(core, PROMPT, 30)[-1].cached_tokens == 10
    ids = list(PROMPT)
    for token in fake.tokens_of(long):
        state = fake.reference_states(ids, (None,), 1)[-1:]
        assert token == int(np.argmax(fake.make_logits(state, VOCAB)[0]))
        ids.append(token)
    assert fake.tokens_of(short) != fake.tokens_of(long)[:-1]


def test_a_request_is_as_long_as_the_session_lets_it_be(fake: Any) -> None:
    """However many tokens it asks for: the frequencies are those of what can come."""
    core = two_sets(fake, 24)
    short, asks_for_more = (fake.ask(core, PROMPT, n) for n in (13, 500))
    assert asks_for_more[-1].cached_tokens == 10
    assert fake.tokens_of(asks_for_more) == fake.tokens_of(short) and len(fake.tokens_of(short)) == 13


@pytest.mark.parametrize("length", [24, 25])
def test_a_prompt_that_is_read_alone_is_as_long_as_it_is(fake: Any, length: int) -> None:
    ids = [i % 60 for i in range(length)]
    found = fake.ask(two_sets(fake, 100), ids, 1, only="score")[-1].prompt_logprobs
    states = fake.reference_states(ids, (None,), int(length > 24))
    wanted = host_sampler.log_softmax(fake.make_logits(states, VOCAB))
    assert [p[t] for p, t in zip(found[1:], ids[1:], strict=True)] == pytest.approx(
        [float(wanted[i, t]) for i, t in enumerate(ids[1:])], rel=1e-4
    )
