"""``kv_window``: texts without end on a few blocks, as a user asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.commands.main import main
from toolkit.errors import UsageError

WINDOW, SINKS, BLOCK = 64, 4, 16
GREEDY = {"do_sample": False, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> str:
    return str(tiny_models("llama", max_position_embeddings=128))


def config(**more: Any) -> TurbomindEngineConfig:
    settings = {"device": "cpu", "dtype": "float32", "cache_block_seq_len": BLOCK, "max_batch_size": 2}
    return TurbomindEngineConfig(**{"kv_window": WINDOW, "kv_sinks": SINKS, **settings, **more})


@pytest.mark.parametrize("more", [{}, {"tp": 2}, {"quant_policy": 8}], ids=str)
def test_an_answer_of_seven_times_the_model_s_length_takes_the_blocks_of_a_window(model: str, more: Any) -> None:
    with pipeline(model, config(cache_max_entry_count=16, max_prefill_token_num=32, **more)) as pipe:
        assert pipe.engine.session_len == 1 << 20
        text = pipe("The quick brown fox", GenerationConfig(max_new_tokens=900, **GREEDY), do_preprocess=False)
        assert text.finish_reason == "length" and len(text.token_ids) == 900
        prompt = pipe.tokenizer.decode(pipe.tokenizer.encode("The quick brown fox") + text.token_ids[:450])
        ids = pipe.tokenizer.encode(prompt)
        again = pipe(prompt, GenerationConfig(max_new_tokens=40, **GREEDY), do_preprocess=False)
        assert len(ids) > 256 and again.finish_reason == "length"
    with pipeline(model, config(cache_max_entry_count=64, enable_prefix_caching=False, **more)) as pipe:
        # another's chunks, no cached prefix: the same bits
        other = pipe(prompt, GenerationConfig(max_new_tokens=40, **GREEDY), do_preprocess=False)
        assert other.token_ids == again.token_ids


@pytest.mark.slow
def test_memory_of_a_text_without_end_stays_flat(model: str) -> None:
    """But for its own tokens, and what is looked up in them: some hundred bytes each."""
    asked = GenerationConfig(max_new_tokens=24_000, do_sample=True, random_seed=1, ignore_eos=True)
    process, taken, blocks = psutil.Process(), list[int](), set[int]()
    with pipeline(model, config(cache_max_entry_count=16)) as pipe:
        for part in pipe.stream_infer("The quick brown fox", gen_config=asked, do_preprocess=False):
            if part.generate_token_len >= 4_000 * (len(taken) + 1) and part.finish_reason is None:
                taken.append(process.memory_info().rss)
                blocks.add(round(16 * pipe.engine.stats()["kv_usage"]))
    assert part.generate_token_len == 24_000 and len(taken) == 5
    assert max(blocks) <= -(-(WINDOW + SINKS) // BLOCK) + 2
    assert taken[-1] - taken[0] < 600 * 16_000


def test_a_text_that_is_shorter_is_answered_as_ever(model: str) -> None:
    asked = GenerationConfig(max_new_tokens=WINDOW + SINKS - 8, **GREEDY, logprobs=1)
    with pipeline(model, config()) as pipe:
        found = pipe("fox", asked, do_preprocess=False)
    with pipeline(model, config(kv_window=None)) as pipe:
        assert pipe.engine.session_len == 128
        whole = pipe("fox", asked, do_preprocess=False)
    assert len(pipe.tokenizer.encode("fox")) < 8
    assert (found.token_ids, found.logprobs) == (whole.token_ids, whole.logprobs)


def test_the_second_turn_of_a_long_chat_finds_the_first_ones_blocks(model: str, tmp_path: Path) -> None:
    text = "the fox and the sea " * 40
    asked = GenerationConfig(max_new_tokens=8, **GREEDY)
    kept = config(kv_cache_dir=str(tmp_path / "kv"))
    with pipeline(model, kept) as pipe:
        first = pipe(text, asked, do_preprocess=False)
        second = pipe(text + "again", asked, do_preprocess=False)
        assert second.cached_tokens > first.input_token_len - 2 * BLOCK
    with pipeline(model, config(enable_prefix_caching=False)) as pipe:
        alone = pipe(text + "again", asked, do_preprocess=False)
    assert alone.cached_tokens == 0 and alone.token_ids == second.token_ids
    with pipeline(model, kept) as pipe:  # after a restart
        third = pipe(text + "again", asked, do_preprocess=False)
        assert third.cached_tokens > first.input_token_len - 2 * BLOCK and third.token_ids == second.token_ids
    with pipeline(model, config(kv_cache_dir=str(tmp_path / "kv"), kv_sinks=8)) as pipe:  # other numbers: none of them
        assert pipe(text + "again", asked, do_preprocess=False).cached_tokens == 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kv_window": 0}, "kv_window"),
        ({"kv_window": 64, "kv_sinks": 129}, "kv_sinks"),
        ({"kv_sinks": 8}, "kv_sinks: found 8 without kv_window"),
        ({"kv_window": "many"}, "kv_window"),
    ],
)
def test_values_that_cannot_be(fields: Any, told: str) -> None:
    for kind in (TurbomindEngineConfig, PytorchEngineConfig):
        with pytest.raises(UsageError, match=told):
            kind(**fields)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--kv-window", "64", "--backend", "pytorch"], "--kv-window: the tensor runner keeps no first tokens"),
        (["--kv-window", "125"], "expected at most 128 together"),
        (["--kv-sinks", "9"], "--kv-sinks: found 9 without"),
        (["--kv-window", "x"], "--kv-window"),
    ],
)
def test_commands_refuse_in_one_line(
    flags: list[str], told: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", model, "--prompt", "x", *flags])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
