"""The Python API on a tiny random model: shapes of results, streaming, sessions, errors."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit import (
    ChatTemplateConfig,
    GenerationConfig,
    PytorchEngineConfig,
    TurbomindEngineConfig,
    pipeline,
)
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import Response
from toolkit.pipeline.pipeline import Pipeline
from toolkit.pipeline.session import Session

SHORT = GenerationConfig(max_new_tokens=12, ignore_eos=True)
DRAWN = GenerationConfig(max_new_tokens=12, ignore_eos=True, do_sample=True, temperature=1.0, random_seed=7)


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> Path:
    path: Path = tiny_models("llama")
    return path


@pytest.fixture(scope="module")
def pipe(model: Path) -> Iterator[Pipeline]:
    config = PytorchEngineConfig(session_len=256, max_batch_size=8, dtype="float32")
    with pipeline(str(model), backend_config=config) as made:
        yield made


def test_one_in_one_out_list_in_list_out(pipe: Pipeline) -> None:
    one = pipe("the fox", gen_config=SHORT)
    assert isinstance(one, Response)
    assert one.finish_reason == "length" and one.generate_token_len == 12 == len(one.token_ids)
    many = pipe(["the fox", "a", "the fox and the sea"], gen_config=SHORT)
    assert [r.index for r in many] == [0, 1, 2] == [r.session_id for r in many]
    assert many[0].text == one.text and many[0].token_ids == one.token_ids
    assert pipe([]) == []
    assert isinstance(pipe(["the fox"], gen_config=SHORT), list)


def test_messages_are_one_prompt_and_lists_of_messages_many(pipe: Pipeline) -> None:
    talk = [{"role": "user", "content": "the fox"}]
    one = pipe(talk, gen_config=SHORT)
    assert one.text == pipe("the fox", gen_config=SHORT).text
    assert one.input_token_len == len(pipe.chat_template.encode(talk))
    assert [r.text for r in pipe([talk, "the fox"], gen_config=SHORT)] == [one.text] * 2


def test_do_preprocess_off_takes_the_text_as_it_is(pipe: Pipeline) -> None:
    plain = pipe("the fox", gen_config=SHORT, do_preprocess=False)
    assert plain.input_token_len == len(pipe.tokenizer.encode("the fox"))
    talk: Any = [{"role": "user", "content": "x"}]
    assert pipe(talk, do_preprocess=False).finish_reason == "error"


def test_a_config_for_each_prompt(pipe: Pipeline) -> None:
    configs = [GenerationConfig(max_new_tokens=n, ignore_eos=True) for n in (3, 5)]
    assert [r.generate_token_len for r in pipe(["a", "b"], gen_config=configs)] == [3, 5]
    with pytest.raises(UsageError, match="gen_config"):
        pipe(["a", "b", "c"], gen_config=configs)
    with pytest.raises(UsageError, match="gen_config"):
        pipe("a", gen_config={"top_k": 1})  # type: ignore[arg-type]


def test_default_config_of_the_pipeline(model: Path) -> None:
    with pipeline(str(model), gen_config=GenerationConfig(max_new_tokens=2, ignore_eos=True)) as made:
        assert made("x").generate_token_len == 2
        assert made("x", gen_config=SHORT).generate_token_len == 12


def test_tokens_that_the_model_rules_out_never_come(model: Path, tmp_path: Path) -> None:
    (target := tmp_path / "model").mkdir()
    for file in model.iterdir():
        (target / file.name).symlink_to(file)
    file, config = target / "generation_config.json", GenerationConfig(max_new_tokens=16, ignore_eos=True)
    with pipeline(str(target)) as pipe:
        first = pipe("Once", gen_config=config).token_ids
    never = sorted(set(first))[:8]
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(settings | {"suppress_tokens": [*never, -1, 10**9]}))
    with pipeline(str(target)) as pipe:
        for some in (config, replace(config, do_sample=True, temperature=2.0, bad_token_ids=[300])):
            assert not set(pipe("Once", gen_config=some).token_ids) & {*never, *(some.bad_token_ids or ())}
    file.write_text(json.dumps(settings | {"suppress_tokens": [-1, 10**9, "x"]}))
    with pytest.raises(ToolkitError, match=r"suppress_tokens: expected a list of token ids, found"):
        pipeline(str(target))


@pytest.mark.parametrize("heard", [True, False])
def test_what_runs_the_model_instead_is_said(heard: bool, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    config = TurbomindEngineConfig(quant_policy=16, session_len=256, max_batch_size=1, dtype="float32", device="cpu")
    with Pipeline(str(model), config, progress=lines.append if heard else None) as made:
        assert made.engine.runner_name == "tensor"
    said = "turbomind's native runner does not run here: its KV cache knows no float8"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.startswith(said) for line in warnings] == ([] if heard else [True])
    assert any(line.startswith(said) for line in lines) == heard


def test_n_choices_use_consecutive_seeds(pipe: Pipeline) -> None:

    choices = pipe("the fox", gen_config=replace(DRAWN, n=3))
    assert [c.token_ids for c in choices] == [
        pipe("the fox", gen_config=replace(DRAWN, random_seed=7 + i)).token_ids for i in range(3)
    ]
    assert len({tuple(c.token_ids) for c in choices}) == 3
    rows = pipe(["the fox", "b"], gen_config=[replace(DRAWN, n=2), SHORT])
    assert [isinstance(r, list) for r in rows] == [True, False]


def test_streams_join_to_the_whole(pipe: Pipeline) -> None:
    prompts = ["the fox", "the sea is never full", "x"]
    whole = pipe(prompts, gen_config=DRAWN)
    joined = {i: Response() for i in range(3)}
    pieces = list(pipe.stream_infer(prompts, gen_config=DRAWN))
    for piece in pieces:
        joined[piece.index].extend(piece)
    assert len(pieces) > 6
    assert [joined[i].text for i in range(3)] == [r.text for r in whole]
    assert [joined[i].token_ids for i in range(3)] == [r.token_ids for r in whole]
    assert sum(p.finish_reason is not None for p in pieces) == 3
    final = sorted(pipe.stream_infer(prompts, gen_config=DRAWN, stream_response=False), key=lambda r: r.index)
    assert [r.text for r in final] == [r.text for r in whole]
    with pytest.raises(UsageError, match="n:"):
        pipe.stream_infer("x", gen_config=GenerationConfig(n=2))


def test_leaving_a_stream_stops_the_request(pipe: Pipeline) -> None:
    endless = GenerationConfig(max_new_tokens=200, ignore_eos=True)
    stream = pipe.stream_infer(["a", "b"], gen_config=endless)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert pipe("the fox", gen_config=SHORT).finish_reason == "length"
    waited = threading.Event()
    for _ in range(1200):
        if pipe.engine.stats()["requests"] == 0:
            break
        waited.wait(0.05)
    assert pipe.engine.stats()["requests"] == 0


def test_stop_words_and_text_options(pipe: Pipeline) -> None:
    text = pipe("the fox", gen_config=SHORT).text
    word = text[4:6]
    cut = pipe("the fox", gen_config=GenerationConfig(max_new_tokens=12, ignore_eos=True, stop_words=[word]))
    assert cut.finish_reason == "stop" and cut.text == text[: text.index(word)]


def test_a_failing_request_leaves_its_siblings_alone(pipe: Pipeline) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    prompts: list[Any] = ["the fox", "word " * 2000, image, "the fox"]
    results = pipe(prompts, gen_config=SHORT)
    assert [r.finish_reason for r in results] == ["length", "length", "error", "length"]
    assert [r.index for r in results] == [0, 1, 2, 3]
    assert "256" in results[1].error_message and "image_url" in results[2].error_message
    assert results[1].text == "" and results[1].error_code is None and results[2].error_code == 400
    assert results[0].text == results[3].text
    streamed = [p for p in pipe.stream_infer(prompts, gen_config=SHORT) if p.error_message]
    assert sorted(p.index for p in streamed) == [1, 2]


def test_chat_keeps_the_history(pipe: Pipeline) -> None:
    session = pipe.chat("the fox", gen_config=SHORT)
    assert isinstance(session, Session) and session.response is not None
    first = session.response.text
    assert first == pipe("the fox", gen_config=SHORT).text
    assert session.history == [("the fox", first)]
    again = pipe.chat("and then", session)
    assert again is session
    talk = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and then"},
    ]
    assert session.response.text == pipe(talk, gen_config=SHORT).text
    session.close()
    session.close()
    with pytest.raises(UsageError, match="closed"):
        pipe.chat("x", session)


def test_chat_streams_and_counts_what_was_read(pipe: Pipeline) -> None:
    session = pipe.session()
    pieces: Any = pipe.chat("the fox", session, gen_config=SHORT, stream_response=True)
    text = "".join(p.text for p in pieces)
    assert session.history == [("the fox", text)]
    some: Any = pipe.chat("more", session, stream_response=True)
    read = next(some).text
    some.close()
    assert session.history[1] == ("more", read)
    with session:
        session.abort()
    assert session.closed


def test_a_session_may_be_closed_while_its_answer_is_read(pipe: Pipeline) -> None:
    session = pipe.session()
    endless = GenerationConfig(max_new_tokens=200, ignore_eos=True)
    pieces: Any = pipe.chat("the fox", session, gen_config=endless, stream_response=True)
    next(pieces)
    session.close()
    *_, last = pieces
    assert last.finish_reason == "abort" and session.history == []


def test_a_turn_that_fails_is_not_history(pipe: Pipeline) -> None:
    session: Any = pipe.chat("word " * 2000)
    assert session.response.error_message
    assert session.history == []


def test_sessions_give_stream_infer_their_history(pipe: Pipeline) -> None:
    session: Any = pipe.chat("the fox", gen_config=SHORT)
    pieces = list(pipe.stream_infer("and then", sessions=session, gen_config=SHORT))
    text = "".join(p.text for p in pieces)
    assert text == pipe(session.messages("and then"), gen_config=SHORT).text
    assert len(session.history) == 1
    with pytest.raises(UsageError, match="sessions"):
        pipe.stream_infer(["a", "b"], sessions=[session])


def test_abort_from_another_thread_ends_the_answer(pipe: Pipeline) -> None:
    session = pipe.session()
    pieces: Any = pipe.chat(
        "x", session, gen_config=GenerationConfig(max_new_tokens=200, ignore_eos=True), stream_response=True
    )
    next(pieces)
    threading.Thread(target=session.abort).start()
    rest = list(pieces)
    assert rest[-1].finish_reason == "abort"
    assert session.response is not None and session.response.generate_token_len < 200


def test_perplexity_is_transformers_cross_entropy(pipe: Pipeline, model: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ids = pipe.tokenizer.encode("the quick brown fox jumps over the lazy dog")
    reference = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    with torch.no_grad():
        loss = reference(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    assert pipe.get_ppl(ids) == pytest.approx([loss], abs=1e-3)
    assert pipe.get_ppl([ids, ids[:5]])[0] == pytest.approx(loss, abs=1e-3)
    for bad in ([1], [[1, 2], [3]], ["a", "b"], [1, 10**5000], [1, -1], [True, False], [], "text", [[1, 2], 3]):
        with pytest.raises(UsageError, match="input_ids"):
            pipe.get_ppl(bad)  # type: ignore[arg-type]


def test_logits_and_hidden_states_are_tensors(pipe: Pipeline) -> None:
    torch = pytest.importorskip("torch")
    config = GenerationConfig(
        max_new_tokens=3, ignore_eos=True, output_logits="generation", output_last_hidden_state="all", logprobs=2
    )
    one = pipe("the fox", gen_config=config)
    assert isinstance(one.logits, torch.Tensor) and one.logits.shape[0] == 3
    assert one.last_hidden_state.shape[0] >= one.input_token_len
    assert one.logits.argmax(-1).tolist() == one.token_ids
    assert [t in p for t, p in zip(one.token_ids, one.logprobs, strict=True)] == [True] * 3


def test_async_batch_infer(pipe: Pipeline) -> None:
    async def ask() -> Any:
        return await asyncio.gather(
            pipe.async_batch_infer("the fox", gen_config=SHORT), pipe.async_batch_infer(["a"], gen_config=SHORT)
        )

    one, many = asyncio.run(ask())
    assert one.text == pipe.batch_infer("the fox", gen_config=SHORT).text
    assert len(many) == 1


def test_threads_share_a_pipeline(pipe: Pipeline) -> None:
    expected = pipe("the fox", gen_config=SHORT).text
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(pipe("the fox", gen_config=SHORT).text)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6


def test_progress_goes_to_standard_error(
    pipe: Pipeline, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.base.progress.EVERY", 0.0)
    pipe(["a", "b"], gen_config=SHORT, use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "answers: 1 of 2, 0 s\nanswers: 2 of 2, 0 s\n"
    pipe(["a", "b"], gen_config=SHORT)
    assert capsys.readouterr().err == ""


def test_info_shows_the_prompt_after_templating(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "toolkit"), pipeline(str(model), log_level="INFO", max_log_len=20) as made:
        made("the fox " * 10, gen_config=SHORT)
        assert "<|im_start|>user" in caplog.text
        assert "the fox the fox the fox" not in caplog.text
    logging.getLogger("toolkit").setLevel(logging.NOTSET)


def test_chat_template_can_be_named(model: Path) -> None:
    with pipeline(str(model), chat_template_config=ChatTemplateConfig(model_name="vicuna")) as made:
        assert made.chat_template.render("x").endswith("USER: x ASSISTANT:")
        made.chat_template.meta_instruction = None
        assert made.chat_template.render("x") == "USER: x ASSISTANT:"
        assert made("x", gen_config=SHORT).finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"model_name": "x"}, "ChatTemplateConfig"),
        ({"tp": 2}, "TurbomindEngineConfig"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"log_level": "LOUD"}, "log_level"),
        ({"max_log_len": -1}, "max_log_len"),
        ({"gen_config": {"n": 1}}, "gen_config"),
        ({"chat_template_config": "no-such"}, "no-such"),
        ({"backend": "tensorrt"}, "backend"),
    ],
)
def test_misuse_of_pipeline(model: Path, arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names) as error:
        pipeline(str(model), **arguments)
    assert "\n" not in str(error.value)


def test_lmdeploy_s_arguments_without_effect_are_taken_with_a_notice(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = TurbomindEngineConfig(session_len=64, cache_chunk_size=8)
    with pipeline(str(model), config, trust_remote_code=True) as pipe:
        assert pipe("a", GenerationConfig(max_new_tokens=1)).generate_token_len == 1
    said = [m.partition(":")[0] for m in caplog.messages if "without effect" in m]
    assert said == ["trust_remote_code", "cache_chunk_size=8"]


def test_more_ranks_than_heads(model: Path) -> None:
    with pytest.raises(UsageError, match="tp=9") as error:
        pipeline(str(model), backend_config=TurbomindEngineConfig(tp=9))
    assert "\n" not in str(error.value)


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(ToolkitError, match="/no/such/model"):
        pipeline("/no/such/model")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"prompts": ("text",)}, "images"),
        ({"prompts": ["a", (1, 2)]}, "images"),
        ({"prompts": 3}, "prompts"),
        ({"prompts": ["a", 3]}, r"prompts\[1\]"),
        ({"prompts": ["a", []]}, r"prompts\[1\]"),
        ({"prompts": "a", "adapter_name": "lora"}, "adapter_name"),
        ({"prompts": "a", "request_output_len": 5}, "max_new_tokens"),
        ({"prompts": "a", "temperature": 5}, "GenerationConfig"),
        ({"prompts": "a", "nonsense": 5}, "nonsense"),
        ({"prompts": "a", "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: expected a dict"),
        ({"prompts": "a", "chat_template_kwargs": [1]}, "chat_template_kwargs: expected a dict"),
    ],
)
def test_misuse_of_calls(pipe: Pipeline, arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        pipe(**arguments)


def test_template_arguments_pass_through(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ tools | tojson }}{{ mood }}{{ messages[0].content }}")
    with pipeline(str(model), chat_template_config=str(tmp_path / "t.jinja")) as made:
        made.infer("x", gen_config=SHORT, tools=[{"a": 1}], chat_template_kwargs={"mood": "calm"})
        longer = made("x", gen_config=SHORT, chat_template_kwargs={"mood": "calm " * 20})
        assert longer.input_token_len > made("x", gen_config=SHORT).input_token_len


def test_a_closed_pipeline_says_so(model: Path) -> None:
    made = pipeline(str(model))
    made.close()
    made.close()
    with pytest.raises(UsageError, match="closed"):
        made("x")
    with pytest.raises(UsageError, match="closed"):
        made.get_ppl([1, 2])


def test_closing_ends_the_streams_that_are_still_read(model: Path) -> None:
    made = pipeline(str(model), backend_config=PytorchEngineConfig(session_len=1024))
    stream = made.stream_infer(["a", "b"], gen_config=GenerationConfig(max_new_tokens=900, ignore_eos=True))
    next(stream)
    made.close()
    found: list[Response] = []
    reader = threading.Thread(target=lambda: found.extend(stream), daemon=True)
    reader.start()
    reader.join(60)
    assert not reader.is_alive()
    assert [r.index for r in found if r.finish_reason == "error"] in ([0, 1], [1, 0])
    assert all("closed" in (r.error_message or "") for r in found if r.finish_reason == "error")


def test_a_script_may_end_while_requests_run(model: Path) -> None:
    script = f"""
import atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name == "toolkit-engine"]))
from toolkit import GenerationConfig, PytorchEngineConfig, pipeline
pipe = pipeline({str(model)!r}, backend_config=PytorchEngineConfig(session_len=2048))
stream = pipe.stream_infer("a", gen_config=GenerationConfig(max_new_tokens=2000, ignore_eos=True))
next(stream)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"  # the loop had stopped before the interpreter went away


def test_a_prompt_that_fills_the_session_ends_empty_by_its_length(pipe: Pipeline) -> None:
    long, fits = "the fox " * 400, "the fox"
    full, other = pipe([long, fits], gen_config=SHORT)
    assert (full.text, full.finish_reason, full.generate_token_len) == ("", "length", 0)
    assert full.input_token_len >= 256 and full.error_code is None and "session holds 256" in (full.error_message or "")
    assert other.finish_reason == "length" and other.generate_token_len == 12 and other.error_message is None
    (only,) = pipe.stream_infer([long], gen_config=SHORT)
    assert (only.text, only.finish_reason, only.index) == ("", "length", 0)
    session = pipe.chat(long, gen_config=SHORT)
    assert isinstance(session, Session) and session.history == [] and session.response.finish_reason == "length"


def test_the_model_says_how_to_sample_where_nobody_else_does(tiny_checkpoint: Any, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    config = TurbomindEngineConfig(session_len=64, device="cpu")
    with pipeline(str(model), config) as greedy:
        assert greedy.gen_config.greedy
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9}')
    with pipeline(str(model), config) as drawn, pipeline(str(model), config, gen_config=SHORT) as told:
        assert (drawn.gen_config.do_sample, drawn.gen_config.temperature, drawn.gen_config.top_p) == (True, 0.6, 0.9)
        assert told.gen_config is SHORT


def test_what_the_model_s_file_says_of_sampling_is_no_warning_where_answers_are_greedy(
    tiny_checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `tool chat --greedy` asks for it; what the caller says besides is still told."""
    from toolkit.chat import settings

    model = tiny_checkpoint("llama", tmp_path / "model")
    (model / "generation_config.json").write_text('{"do_sample": true, "top_p": 0.8, "temperature": 0.7}')
    config = PytorchEngineConfig(session_len=64, dtype="float32")
    with pipeline(str(model), backend_config=config) as pipe:
        greedy = settings.change(pipe.gen_config, do_sample=False, max_new_tokens=2)
        assert greedy.top_p == 0.8
        pipe("the fox", gen_config=greedy)
        pipe("the fox", gen_config=settings.change(greedy, do_sample=False, top_p=0.3))
    assert [line for line in caplog.messages if "no effect" in line] == [
        "top_p 0.3 has no effect: do_sample is off; give do_sample=True too, or leave it out"
    ]


def test_a_temperature_without_effect_is_warned_about_once(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        pipe("the fox", gen_config=GenerationConfig(max_new_tokens=2, temperature=0.2))
    assert [r.message for r in caplog.records if "no effect" in r.message] == [
        "temperature 0.2 has no effect: do_sample is off; give do_sample=True too, or leave it out"
    ]


@pytest.mark.parametrize(("told", "found"), [(None, 2000.0), (40.0, 40.0), (0.0, 0.0)])
def test_prompts_take_longer_steps_than_where_somebody_watches(
    model: Path, told: float | None, found: float | None
) -> None:
    config = TurbomindEngineConfig(session_len=64, max_batch_size=2, device="cpu", target_step_ms=told)
    with pipeline(str(model), backend_config=config) as made:
        assert made.engine.plan.target_step_ms == found
    assert config.target_step_ms == told
