"""Ranks of the native runner: bit for bit what one process computes, for any number of them; a lost one is no hang."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.models.registry import families
from toolkit.parallel import native_runner
from toolkit.parallel import ranks as timing
from toolkit.parallel.choose import open_ranks
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.native_runner import NativeRanks
from toolkit.parallel.places import VARIABLE, cores_of
from toolkit.parallel.runner import RankedRunner
from toolkit.runners.base import RunnerError, RunnerLost, RunnerOptions
from toolkit.runners.choose import changes_of, open_model
from toolkit.runners.native import share
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.native.share import Share
from toolkit.runners.native.support import unsupported as no_native
from toolkit.runners.weights.new import open_new_weights

PROMPT = np.random.default_rng(3).integers(3, 300, 45).tolist()
# heads that do not divide; sizes in which codes travel, and some in which floats have to
UNEVEN = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
# attention with norms after, windows and softcaps; norms over all heads; one head of keys; experts, and a shared one;
# latent attention; convolutions; the delta rule; Mamba-2 with norms over all heads, and beside attention; pictures
FAST = ("gemma2", "olmo2", "falcon", "qwen2_moe", "deepseek_v2", "lfm2", "qwen3_next", "mamba2", "falcon_h1", "mllama")


@pytest.fixture(scope="module")
def steps(support: Any) -> Any:
    return support("steps")


def options(**fields: Any) -> RunnerOptions:
    return RunnerOptions(**{"dtype": "float32", "block_size": 16, "device": "cpu", "threads": 1} | fields)


@pytest.fixture
def pair(steps: Any, support: Any, tiny_models: Any) -> Iterator[Callable[..., Any]]:
    """``pair(family, ranks, load_format, sizes, options…)``: drivers of one process and of ranks over one model."""
    opened: list[NativeRunner] = []
    memory = os.memfd_create("ranks")

    def make(family: str, ranks: int, load_format: str = "auto", sizes: Any = None, **fields: Any) -> tuple[Any, Any]:
        model = open_model(tiny_models(family, **sizes or {}), load_format=load_format)
        changes = changes_of(model)
        made = [NativeRunner(model.spec, model.weights, options(**fields), changes=changes)]
        made += [
            NativeRunner(model.spec, model.weights, options(**fields), share=Share(r, ranks, memory), changes=changes)
            for r in range(ranks)
        ]
        opened.extend(made)
        return steps.Driver(made[0]), steps.Driver(support("native_together").Together(made[1:]))

    yield make
    for runner in opened:
        runner.close()
    os.close(memory)


def same(one: Any, several: Any, **more: Any) -> None:
    """Logits and hidden states of a prompt in chunks, and of steps of several sequences; greedy tokens. ``more``: of
    the steps of one sequence."""
    a, b = one.add(), several.add()
    for start, stop in ((0, 20), (20, 22), (22, 45)):  # few tokens and more take different ways
        expected, found = (d.step({n: PROMPT[start:stop]}, "all", **more) for d, n in ((one, a), (several, b)))
        assert found.logits.tobytes() == expected.logits.tobytes()
        assert found.hidden.tobytes() == expected.hidden.tobytes()
    new = [{driver.add(): PROMPT[:7], number: [5]} for driver, number in ((one, a), (several, b))]
    assert several.step(new[1], "all").logits.tobytes() == one.step(new[0], "all").logits.tobytes()
    assert several.generate(PROMPT, 6) == one.generate(PROMPT, 6)


@pytest.mark.parametrize("family", FAST)
def test_two_ranks_give_the_bits_of_one_process(family: str, pair: Any) -> None:
    same(*pair(family, 2))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", [f.name for f in families() if f.tiny is not None and not f.encodes])
def test_any_number_of_ranks_gives_the_bits_of_one_process(
    family: str, ranks: int, pair: Any, tiny_models: Any
) -> None:
    spec = open_model(tiny_models(family)).spec
    if reason := no_native(spec, options()):
        pytest.skip(reason)
    if reason := share.unsupported(spec, ranks):
        most = int(reason.removesuffix(" would do").rpartition(" ")[2])  # up to MOST would do
        assert most < ranks and share.unsupported(spec, most) is None
        return
    same(*pair(family, ranks))


@pytest.mark.parametrize(("ranks", "load_format", "sizes", "fields"), [
    (2, "int4", WIDE, {}),
    (3, "int4", UNEVEN, {"quant_policy": 44}),
    (3, "int8", WIDE, {"quant_policy": 8, "dtype": "bfloat16"}),
    (4, "int4", WIDE, {"quant_policy": 4, "threads": 2}),  # two ranks have the same head of keys
    (2, "auto", UNEVEN, {"dtype": "bfloat16", "threads": 3}),
])  # fmt: skip
def test_weights_and_caches_of_few_bits(ranks: int, load_format: str, sizes: Any, fields: Any, pair: Any) -> None:
    same(*pair("llama", ranks, load_format, sizes, **fields))


@pytest.mark.parametrize(("family", "load_format"), [("qwen3_moe", "int4"), ("deepseek_v2", "int8")])
def test_experts_of_few_bits(family: str, load_format: str, pair: Any) -> None:
    same(*pair(family, 2, load_format))


@pytest.mark.parametrize(("family", "ranks", "load_format", "sizes", "targets", "config"), [
    ("llama", 2, "int4", WIDE, r"(?:[qkvo]|gate|up|down)_proj|lm_head|embed_tokens", {}),  # where codes travel else
    ("llama", 3, "auto", UNEVEN, r"[qkvo]_proj|down_proj", {"use_dora": True}),
    ("mixtral", 2, "auto", None, r"experts\.\d+\.w[123]|[qkvo]_proj", {}),
    ("deepseek_v2", 2, "int8", None, "q_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|down_proj", {}),
    ("mamba2", 2, "auto", None, "(?:in|out)_proj", {}),
])  # fmt: skip
def test_adapters_give_the_bits_of_one_process(
    family: str, ranks: int, load_format: str, sizes: Any, targets: str, config: Any,
    pair: Any, tiny_models: Any, support: Any, tmp_path: Path,
) -> None:  # fmt: skip
    path = tiny_models(family, **sizes or {})
    made = support("adapters").write_adapter(tmp_path / "one", path, targets, **config)
    one, several = pair(family, ranks, load_format, sizes, adapters=(("one", str(made)),))
    same(one, several, adapter=np.array([0], np.int32))
    mixed = {"adapter": np.array([0, -1, 0], np.int32)}
    steps = [driver.step({driver.add(): PROMPT[:n] for n in (7, 9, 3)}, "all", **mixed) for driver in (one, several)]
    assert steps[0].logits.tobytes() == steps[1].logits.tobytes()
    plain = one.step({one.add(): PROMPT[:7]}, "all").logits
    assert np.abs(plain - steps[0].logits[:7]).max() > 0.01  # the adapter does something


@pytest.mark.parametrize(("family", "layer"), [("llama", 4), ("gemma2", 4), ("qwen2_moe", 4), ("mamba2", 2)])
def test_a_layer_has_four_gathers(family: str, layer: int, pair: Any) -> None:
    """After the heads, after o, after gate and up, after down; a step has one for the logits."""
    _, several = pair(family, 2)
    runner, number = several.runner.runners[0], several.add()
    before = runner.meetings()
    several.step({number: PROMPT})
    assert runner.meetings() - before == layer * len(several.runner.spec.layers) + 1


def test_a_rank_has_its_part_of_weights_and_cache(pair: Any) -> None:
    one, several = pair("llama", 3, "int4", UNEVEN)
    needs = [runner.memory() for runner in several.runner.runners]
    whole = one.runner.memory()
    assert sum(need.block_bytes[0] for need in needs) == whole.block_bytes[0]
    layers = sum(need.weights for need in needs)
    assert max(need.weights for need in needs) < whole.weights < layers  # the embedding is everybody's


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize(("heads", "keys"), [(9, 3), (8, 8), (8, 2), (16, 1), (12, 5)])
def test_heads_are_shared_out_once(heads: int, keys: int, count: int) -> None:
    keys = keys if heads % keys == 0 else 4
    found = [Share(rank, count).heads(heads, keys) for rank in range(count)]
    assert [h for part in found for h in range(part.first, part.first + part.number)] == list(range(heads))
    for part in found:
        read = {h // (heads // keys) for h in range(part.first, part.first + part.number)}
        assert read == set(range(part.first_kv, part.first_kv + part.kv_number))


# -- in processes of their own


@pytest.fixture
def ranks(steps: Any, tiny_models: Any) -> Iterator[Callable[..., Any]]:
    opened = []

    def make(family: str = "llama", world: int = 2, **fields: Any) -> Any:
        opened.append(NativeRanks(Model(str(tiny_models(family)), options(**fields), {}), world))
        return steps.Driver(opened[-1])

    yield make
    for runner in opened:
        runner.close()


def test_processes_blocks_and_a_step_that_cannot_be(pair: Any, ranks: Any, steps: Any) -> None:
    (one, _), several = pair("llama", 2, quant_policy=8), ranks(quant_policy=8)
    same(one, several)
    runner, number = several.runner, several.add()
    batch = several.batch({number: [5, 6, 7]})
    batch.token_ids[1] = 10**6
    failed, fine = runner.submit(batch), runner.submit(several.batch({several.add(): PROMPT}))
    assert len(fine.result().tokens) == 1  # which comes after the other, whoever is asked first
    with pytest.raises(RunnerError, match="token") as error:
        failed.result()
    assert not isinstance(error.value, RunnerLost)
    number = several.add()
    several.step({number: PROMPT[:40]})
    block = several.sequences[number].blocks[0][0]
    data = steps.leaves_and_comes_back(runner, block)
    assert len(data) == one.runner.memory().block_bytes[0]


def test_adapters_come_and_go_and_weights_are_replaced(
    pair: Any, ranks: Any, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    (one, _), several, path = pair("llama", 2), ranks(), tiny_models("llama")
    made = support("adapters").write_adapter(tmp_path / "one", path, "q_proj|down_proj")
    broken = tmp_path / "broken"
    broken.mkdir()
    with pytest.raises(ToolkitError, match="broken"):
        several.runner.add_adapter(3, broken)
    assert list(several.runner.adapter_numbers) == []
    for driver in (one, several):
        while not driver.runner.read_adapter(3, made):
            time.sleep(0.01)
        assert list(driver.runner.adapter_numbers) == []
        driver.runner.add_adapter(3, made)
    same(one, several, adapter=np.array([3], np.int32))
    several.runner.remove_adapter(3)
    new = open_new_weights(path, tiny_models("llama", seed=7), one.runner.spec)
    befores = [driver.runner.use_weights(new) for driver in (one, several)]
    for before in (None, befores):
        for i, driver in enumerate((one, several)):
            if before is not None:
                driver.runner.use_weights(before[i])
            driver.runner.release_weights()
            driver.runner.load_weights()
            driver.runner.allocate_cache((32,))
        same(*(support("steps").Driver(driver.runner) for driver in (one, several)))


def test_what_ranks_do_is_told(ranks: Any) -> None:
    several = ranks()
    several.runner.trace(True)
    several.step({several.add(): PROMPT})
    found = several.runner.trace(False)
    for events in found:
        (step,) = (event for event in events if event[0] == "step")
        messages = [event for event in events if event[0] == "gather"]
        assert step[3] == len(PROMPT) and len(messages) == 4 * len(several.runner.spec.layers) + 1
        assert all(step[1] <= begun <= ended <= step[2] and size > 0 for _, begun, ended, size in messages)
    several.step({several.add(): PROMPT})
    assert several.runner.trace(False) == [[], []]


@pytest.mark.parametrize(("number", "told"), [(signal.SIGKILL, "killed by signal 9"), (signal.SIGSTOP, "not answered")])
def test_a_lost_rank_is_told(number: int, told: str, ranks: Any, support: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    several = ranks()
    (pid,) = several.runner.pids
    sequence = several.add()
    several.step({sequence: PROMPT[:20]})
    monkeypatch.setattr(timing, "STEP_SECONDS", 2.0)  # only now: that step takes as long as it takes
    monkeypatch.setattr(timing, "GRACE_SECONDS", 0.5)
    support("lost_ranks").strike(pid, number)
    with pytest.raises(RunnerLost, match=rf"rank 1 \(process {pid}\).* {told}"):
        several.step({sequence: [5]})
    with pytest.raises(RunnerLost):
        several.step({sequence: [5]})
    assert not Path(f"/proc/{pid}").exists()


def test_a_rank_that_is_lost_while_nothing_runs_is_told(ranks: Any, support: Any) -> None:
    support("lost_ranks").lost_while_idle(ranks().runner)


def test_a_rank_that_draws_other_tokens_is_told(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    several = ranks()
    monkeypatch.setattr(native_runner, "digest", lambda output: 0)
    with pytest.raises(RunnerLost, match="rank 1 drew other tokens"):
        several.step({several.add(): PROMPT})


def test_ranks_that_find_another_model_do_not_begin(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models("llama")
    monkeypatch.setattr(native_runner, "signature", lambda opened, path, times: 0)
    with pytest.raises(ToolkitError, match="tp=2: the ranks have not met: rank 1 has found another model at"):
        NativeRanks(Model(str(path), options(), {}), 2)


def test_ranks_that_do_not_start_leave_nothing_open(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise ToolkitError("rank 1: not come")

    monkeypatch.setattr(native_runner, "Ranks", refused)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ToolkitError, match=r"^rank 1: not come$"):
        NativeRanks(Model(str(tiny_models("llama")), options(), {}), 2)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_what_cannot_be_split_is_said_and_pytorch_stands_in(tiny_models: Any) -> None:
    model = Model(str(tiny_models("falcon")), options(), {})
    with pytest.raises(UsageError, match=r"tp=3: .* layer 0: 2 heads are fewer than 3 ranks; up to 2 would do"):
        NativeRanks(model, 3)
    with pytest.raises(UsageError, match=r"tp=3: .*turbomind's native runner does not split it"):
        open_ranks(model, Layout(tp=3), None)
    adapted = Model(str(tiny_models("llama")), options(quant_policy=16), {})
    runner, why = open_ranks(adapted, Layout(tp=2), "turbomind")
    assert isinstance(runner, RankedRunner) and "float8" in why and "pytorch stands in" in why
    runner.close()


def test_cores_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for node, cores in enumerate(("0-3", "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    assert cores_of(2, tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cores_of(4, tmp_path) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cores_of(3, tmp_path) == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert cores_of(2, tmp_path / "none") is None
    monkeypatch.setenv(VARIABLE, "0,2;1,3-5")
    assert cores_of(2, tmp_path) == [[0, 2], [1, 3, 4, 5]]
    for value, told in (
        ("0;1;2", "2 lists"),
        ("0;9", "core 9"),
        ("0;x", "such as 0-7;8-15"),
        ("0;7-4", "such as 0-7;8-15"),
        ("0;4-99999999", "such as 0-7;8-15"),
    ):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(UsageError, match=told):
            cores_of(2, tmp_path)


# -- in an engine


def config(tp: int = 2, **fields: Any) -> TurbomindEngineConfig:
    same: dict[str, Any] = {"session_len": 256, "max_batch_size": 4, "dtype": "float32", "threads": 2}
    return TurbomindEngineConfig(tp=tp, **same | fields)


async def _answers(engine: AsyncEngine) -> list[list[int]]:
    """Of requests at the same time: greedy, drawn, several samples, one that a grammar leads."""
    wishes = [
        GenerationConfig(max_new_tokens=24, ignore_eos=True),
        GenerationConfig(max_new_tokens=24, ignore_eos=True, do_sample=True, temperature=0.8, top_p=0.9, random_seed=3),
        GenerationConfig(max_new_tokens=12, ignore_eos=True, do_sample=True, random_seed=5, repetition_penalty=1.2),
        GenerationConfig(max_new_tokens=12, response_format={"type": "regex_schema", "regex_schema": "[ab]{4,9}"}),
        *(GenerationConfig(max_new_tokens=20, ignore_eos=True, do_sample=True, random_seed=n) for n in range(3)),
    ]

    async def whole(i: int, wish: GenerationConfig) -> list[int]:
        done = Response()
        async for delta in engine.generate([*PROMPT, i % 2], wish):
            done.extend(delta)
        assert done.finish_reason in ("length", "stop"), done.error_message
        return done.token_ids

    return await asyncio.gather(*(whole(i, wish) for i, wish in enumerate(wishes)))


def test_an_engine_of_ranks_answers_as_one_of_one(tiny_models: Any) -> None:
    """With chunked prompts, the prefix cache, and so few blocks that requests are set aside."""
    path, answers = tiny_models("llama"), []
    for tp in (1, 2):
        fields = {"max_prefill_token_num": 16, "cache_max_entry_count": 7, "cache_block_seq_len": 64}
        with AsyncEngine.open(path, backend_config=config(tp, **fields)) as engine:
            answers.append(asyncio.run(_answers(engine)))
            assert engine.stats()["prefix_hit_tokens"] > 0
            assert ("2 ranks" in engine.runner_note) == (tp == 2)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_killed_rank_ends_its_requests_and_the_engine_comes_back(tiny_models: Any, support: Any) -> None:
    lost = support("lost_ranks")
    engine = AsyncEngine.open(tiny_models("llama"), backend_config=config(), process=True)
    try:
        expected = asyncio.run(_answers(engine))
        told = ""
        while "killed by signal 9" not in told:
            told = asyncio.run(lost.crash(engine, PROMPT))
        assert "rank 1" in told and "restarted" in told
        assert asyncio.run(_answers(engine)) == expected
        lost.back_without_a_request(engine)
        assert asyncio.run(_answers(engine)) == expected
        pid = engine._loop.pid  # type: ignore[attr-defined]
        ranks = lost.children(pid)
        assert len(ranks) == 1
        os.kill(pid, signal.SIGKILL)  # the first rank: nobody is left behind
        lost.all_gone(ranks)
    finally:
        engine.close()
