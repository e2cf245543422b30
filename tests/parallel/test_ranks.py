"""Tensor parallel ranks: what they compute together is what one process does, and a lost one is no hang."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.models.eyes.pictures import Picture
from toolkit.models.registry import get, names
from toolkit.parallel import balance, wire
from toolkit.parallel import ranks as timing
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.runner import RankedRunner, shared_out
from toolkit.runners.base import RunnerError, RunnerLost, RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.step import Views

# fp32 logits of some units: sums of two or four parts instead of one, in every layer
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = np.random.default_rng(3).integers(3, 300, 45).tolist()


@pytest.fixture(scope="module")
def steps(support: Any) -> Any:
    return support("steps")


def options(**fields: Any) -> RunnerOptions:
    return RunnerOptions(**{"dtype": "float32", "block_size": 16, "device": "cpu"} | fields)


@pytest.fixture
def pair(steps: Any) -> Iterator[Callable[..., Any]]:
    """``pair(path, world, options…)``: drivers of one process, and of ranks, so many or laid out so."""
    opened = []

    def make(path: Path, world: int | Layout, load_format: str = "auto", **fields: Any) -> tuple[Any, Any]:
        one, _ = open_runner(path, backend="pytorch", options=options(**fields), load_format=load_format)
        layout = Layout(tp=world) if isinstance(world, int) else world
        several = RankedRunner(Model(str(path), options(**fields), {"load_format": load_format}), layout)
        opened.extend((one, several))
        return steps.Driver(one), steps.Driver(several)

    yield make
    for runner in opened:
        runner.close()


def same(one: Any, several: Any, close: dict[str, float] = CLOSE) -> None:
    """Logits of a prompt in chunks and greedy tokens are alike."""
    a, b = one.add(), several.add()
    for start, stop in ((0, 20), (20, 27), (27, 45)):
        expected, found = one.step({a: PROMPT[start:stop]}, "all"), several.step({b: PROMPT[start:stop]}, "all")
        np.testing.assert_allclose(found.logits, expected.logits, **close)
        np.testing.assert_allclose(found.hidden, expected.hidden, **close)
    assert several.generate(PROMPT, 20) == one.generate(PROMPT, 20)
    assert several.generate(PROMPT, 5, chunk=7) == one.generate(PROMPT, 5)


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_two_ranks_give_what_one_process_gives(family: str, tiny_models: Any, pair: Any) -> None:
    """Of all families: test_families.py."""
    one, several = pair(tiny_models(family), 2)
    same(one, several)


def test_pictures_are_shared_out(tiny_models: Any, pair: Any) -> None:
    one, several = pair(tiny_models("qwen2_vl"), 2)
    rng = np.random.default_rng(5)
    pictures = [
        Picture(
            rng.standard_normal((1, 6, 56, width), np.float32), (2, width // 28), (56, width), 2 * (width // 28), b""
        )
        for width in (56, 84, 28)
    ]
    expected, found = one.runner.encode(pictures), several.runner.encode(pictures)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)
    assert shared_out([4, 6, 2], 2) == [[1], [0, 2]]


def test_threads_of_ranks_are_not_what_another_runner_has_left(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    try:
        with closing(RankedRunner(Model(str(tiny_models("llama")), options(), {}), Layout(tp=2))) as runner:
            assert "threads of each: 2" in runner.notes[0] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_messages_of_a_layer_are_two_sums(tiny_models: Any, pair: Any) -> None:
    _, several = pair(tiny_models("llama"), 2)
    group, number = several.runner._group, several.add()
    before = group.sums, group.gathers
    several.step({number: PROMPT})
    layers = len(several.runner.spec.layers)
    assert (group.sums - before[0], group.gathers - before[1]) == (2 * layers + 1, 1)  # … the embedding; the logits


@pytest.mark.slow
@pytest.mark.parametrize(("family", "overrides"), [
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),  # two ranks have the same head of keys
    ("qwen2_moe", {"num_attention_heads": 4, "num_key_value_heads": 4}),
])  # fmt: skip
def test_four_ranks(family: str, overrides: dict[str, Any], tiny_models: Any, pair: Any) -> None:
    one, several = pair(tiny_models(family, **overrides), 4)
    same(one, several)


@pytest.mark.parametrize(("load_format", "policy", "close"), [
    ("int4", 0, CLOSE), ("int8", 0, {"rtol": 0.05, "atol": 0.1}), ("auto", 8, {"rtol": 1e-3, "atol": 1e-3}),
])  # fmt: skip
def test_quantized_weights_and_caches(
    load_format: str, policy: int, close: dict[str, float], tiny_models: Any, pair: Any
) -> None:
    """int8: activations are rounded by each rank for its own inputs, so that numbers differ more."""
    one, several = pair(tiny_models("llama"), 2, load_format=load_format, quant_policy=policy)
    if load_format == "int8":
        expected = one.step({one.add(): PROMPT}, "all").logits
        np.testing.assert_allclose(several.step({several.add(): PROMPT}, "all").logits, expected, **close)
    else:
        same(one, several, close)


UNEVEN = {
    "hidden_size": 144,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "intermediate_size": 101,
}


def test_blocks_leave_and_come_back_whole(tiny_models: Any, pair: Any, steps: Any) -> None:
    """Of ranks with unequal parts, too: two heads of keys and one, and then 4-bit keys."""
    one, several = pair(tiny_models("llama", **UNEVEN), 2, quant_policy=4)
    runner, number = several.runner, several.add()
    several.step({number: PROMPT[:40]})
    block = several.sequences[number].blocks[0][0]
    data = steps.leaves_and_comes_back(runner, block)
    assert len(data) == one.runner.memory().block_bytes[0]
    with pytest.raises(RunnerError, match="expected"):
        runner.import_block(0, block, data[1:])


def test_heads_and_widths_that_do_not_divide_are_shared_out_unevenly(tiny_models: Any, pair: Any) -> None:
    same(*pair(tiny_models("llama", **UNEVEN), 2))


def test_a_step_that_cannot_be_fails_alone(tiny_models: Any, pair: Any) -> None:
    one, several = pair(tiny_models("llama"), 2)
    number = several.add()
    batch = several.batch({number: [5, 6, 7]})
    batch.token_ids[1] = 10**6
    with pytest.raises(RunnerError) as error:
        several.runner.submit(batch).result()
    assert not isinstance(error.value, RunnerLost)
    assert several.generate(PROMPT, 5) == one.generate(PROMPT, 5)


def test_a_step_is_the_same_behind_the_wire(tiny_models: Any, pair: Any) -> None:
    one, _ = pair(tiny_models("llama"), 2)
    batch = one.batch({one.add(): [5, 6, 7]}, "all")
    name, (found,) = wire.unpack(wire.pack(["submit", [batch]]))
    assert name == "submit" and found.embeds is None
    assert found.sampling.seed.dtype == np.uint64 and isinstance(found.block_tables, tuple)
    for field, value in vars(batch).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(found, field), value)
            assert getattr(found, field).dtype == value.dtype
    np.testing.assert_array_equal(found.block_tables[0], batch.block_tables[0])
    for at in (12, -1):  # in the head, in an array
        data = bytearray(wire.pack(["submit", [batch]]))
        data[at] ^= 4
        with pytest.raises(wire.Damaged):
            wire.unpack(bytes(data))


def test_stages_and_parts_together(tiny_models: Any, pair: Any) -> None:
    one, several = pair(tiny_models("qwen2_moe"), Layout(tp=2, pp=2))
    same(one, several)
    several.step({several.add(): PROMPT}, routes_index=np.arange(3, dtype=np.int32))
    routes = several.step({several.add(): PROMPT}, routes_index=np.arange(3, dtype=np.int32)).routes
    expected = one.step({one.add(): PROMPT}, routes_index=np.arange(3, dtype=np.int32)).routes
    np.testing.assert_array_equal(routes, expected)


@pytest.mark.parametrize(("family", "layout"), [
    ("llama", Layout(dp=2)), ("qwen2_moe", Layout(dp=2, ep=2)), ("mamba2", Layout(dp=2)),
], ids=str)  # fmt: skip
def test_copies_give_what_one_process_gives(family: str, layout: Layout, tiny_models: Any, pair: Any) -> None:
    """Sequences of one step on both copies, or on one while the other has none."""
    one, several = pair(tiny_models(family), layout)
    rng = np.random.default_rng(2)
    prompts = {i: rng.integers(3, 300, n).tolist() for i, n in enumerate((20, 33, 5, 18))}
    for driver in (one, several):
        assert [driver.add() for _ in prompts] == list(prompts)
    for new in (prompts, {0: [9], 2: [8, 7], 3: [4]}, {1: [3]}, {i: [6 + i] for i in prompts}):
        expected, found = one.step(new, "all"), several.step(new, "all")
        np.testing.assert_allclose(found.logits, expected.logits, **CLOSE)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
    homes = several.runner._homes
    assert {homes.home(0, several.sequences[i].blocks[0][0]) for i in prompts} == {0, 1}
    block = several.sequences[1].blocks[0][0]
    assert len(several.runner.export_block(0, block)) == one.runner.memory().block_bytes[0]


def test_a_step_of_copies_still_says_which_blocks_were_copied(tiny_models: Any, pair: Any) -> None:
    """Until the engine reads there that they were, it holds those that were copied from."""
    found = []
    for driver in pair(tiny_models("llama"), Layout(dp=2)):
        source, twin = driver.add(), driver.add()
        driver.step({source: PROMPT[:20]})
        sources = driver.sequences[source].blocks[0]
        driver.sequences[twin].blocks[0], driver.sequences[twin].length = driver._free[0][: len(sources)], 20
        del driver._free[0][: len(sources)]
        pairs = np.array([sources, driver.sequences[twin].blocks[0]], np.int32).T
        batch = driver.batch({source: [9], twin: [8]}, "all", copy_blocks=(pairs,))
        found.append(driver.runner.submit(batch).result().logits)
        assert len(batch.copy_blocks) == 1 and batch.copy_blocks[0] is pairs
    np.testing.assert_allclose(found[1], found[0], **CLOSE)


def test_a_picture_is_there_for_all_copies(tiny_models: Any, pair: Any) -> None:
    """Also for one that had no sequence in the step which it came with."""
    found = []
    nothing = np.zeros(0, np.int32)
    for driver in pair(tiny_models("mllama"), Layout(dp=2)):
        first, second = driver.add(), driver.add()
        rows = np.random.default_rng(5).standard_normal((6, driver.runner.spec.hidden_size), np.float32)
        ptr, at = np.array([0, 1, 2], np.int32), np.array([[0, 5]], np.int32)
        views = Views(rows, np.array([[0, 6]], np.int32), nothing, at, ptr[:2], ptr[:1])
        driver.step({first: PROMPT[:5]}, views=views)
        views = Views(rows[:0], views.new[:0], nothing, np.array([[0, 1], [1, 6]], np.int32), ptr, ptr[:1].repeat(2))
        found.append(driver.step({first: [9], second: PROMPT[5:10]}, "all", views=views).logits)
    np.testing.assert_allclose(found[1], found[0], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, ep=2)], ids=str)
@pytest.mark.parametrize("family", [name for name in names() if not get(name).encodes])
def test_copies_of_every_family(family: str, layout: Layout, tiny_models: Any, pair: Any) -> None:
    """Two sequences on a copy each, together and while the other copy has none."""
    try:
        one, several = pair(tiny_models(family), layout)
    except UsageError as e:
        assert "it has no experts to share out" in str(e), e
        pytest.skip(str(e))
    size = max(one.runner.spec.block, 8)  # of models that guess blocks, whole ones
    for driver in (one, several):
        assert [driver.add(), driver.add()] == [0, 1]
    for who, start in (((0, 1), 0), ((0,), 1), ((1,), 2), ((1, 0), 0)):
        new = {i: PROMPT[start * size : (start + 1) * size] for i in who}
        expected, found = one.step(new, "all"), several.step(new, "all")
        np.testing.assert_allclose(found.logits, expected.logits, **CLOSE)
    homes = several.runner._homes
    assert {homes.home(0, several.sequences[i].blocks[0][0]) for i in (0, 1)} == {0, 1}


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2, eplb=True), Layout(tp=2, ep=2, pp=2, eplb=True)], ids=str)
def test_experts_move_to_where_less_is_chosen(
    layout: Layout, tiny_models: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts of two tokens alone, which choose a few experts again and again; numbers stay those of one process,
    also of requests that began before."""
    monkeypatch.setattr(balance, "TOKENS", 64)
    monkeypatch.setattr(balance, "WORTH", 0.999)
    one, several = pair(tiny_models("qwen2_moe"), layout)
    moved: list[dict[int, Any]] = []
    better = balance.better
    monkeypatch.setattr(balance, "better", lambda loads, held: moved.append(better(loads, held)) or moved[-1])
    group, begun = several.runner._group, [driver.add() for driver in (one, several)]
    for driver, number in zip((one, several), begun, strict=True):
        driver.step({number: PROMPT[:9]})
    skewed = [{i: [5 + i % 2] * 30 for i in range(1, 4)} for _ in range(2)]
    for new in skewed:
        for driver in (one, several):
            numbers = [driver.add() for _ in new]
            driver.step(dict(zip(numbers, new.values(), strict=True)))
    assert any(moved) and all(group.held[layer] == seats for layer, seats in moved[-1].items())
    a, b = begun
    expected, found = one.step({a: PROMPT[9:]}, "all"), several.step({b: PROMPT[9:]}, "all")
    np.testing.assert_allclose(found.logits, expected.logits, **CLOSE)
    assert several.generate(PROMPT, 12) == one.generate(PROMPT, 12)


def test_experts_that_cannot_be_moved_lose_the_ranks(
    tiny_models: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance, "TOKENS", 8)
    monkeypatch.setattr(balance, "better", lambda loads, held: {0: held[0][::-1]})
    _, several = pair(tiny_models("qwen2_moe"), Layout(dp=2, ep=2, eplb=True))

    def full(*_: Any) -> None:
        raise RunnerError("no room for experts")

    monkeypatch.setattr(several.runner._local, "place_experts", full)
    with pytest.raises(RunnerLost, match="a rank of the model is lost: no room for experts"):
        several.step({several.add(): PROMPT})


@given(st.integers(2, 5), st.lists(st.integers(0, 1000), min_size=5, max_size=40))
def test_a_balance_keeps_all_experts_and_is_never_worse_by_much(seats: int, load: list[int]) -> None:
    held = balance.evenly(len(load), seats)
    found = balance.balanced(load, held)
    assert sorted(expert for experts in found for expert in experts) == list(range(len(load)))
    assert [len(experts) for experts in found] == [len(experts) for experts in held]
    best = max(*load, -(-sum(load) // seats))  # no placement has less
    assert best <= balance.busiest(load, found)
    moves = balance.better({0: load}, {0: held})
    assert not moves or balance.busiest(load, moves[0]) < balance.busiest(load, held)


def test_an_engine_of_copies_answers_as_one_of_one(tiny_models: Any) -> None:
    """Prompts that share what others have begun with, which is brought to where they are."""
    path, answers = tiny_models("qwen2_moe"), []
    for more in ({"tp": 1}, {"tp": 1, "dp": 2, "ep": 2}):
        with AsyncEngine.open(path, backend_config=config(**more, max_prefill_token_num=64)) as engine:
            answers.append(asyncio.run(_asked_at_once(engine)))
            assert engine.stats()["prefix_hit_tokens"] > 0
    assert answers[0] == answers[1]


async def _asked_at_once(engine: AsyncEngine) -> list[list[int]]:
    asked = [[*PROMPT, 0], [*PROMPT, 1], [*PROMPT, 2], [*PROMPT[:33], 3], [*PROMPT[:33], 4], [7, 8, 5], [7, 8, 6]]

    async def one(ids: list[int]) -> list[int]:
        found: list[int] = []
        async for delta in engine.generate(ids, GenerationConfig(ignore_eos=True, max_new_tokens=12)):
            found += delta.token_ids
        return found

    first = await one(asked[0])
    return [first, *await asyncio.gather(*map(one, asked)), *await asyncio.gather(*map(one, asked))]


# -- what cannot be


@pytest.mark.parametrize(("family", "overrides", "world", "message"), [
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}, 3, "4 heads and 2 .* 3 ranks; 2, 4 would do"),
    ("deepseek_v2", {}, 9, "[0-9] heads do not divide among 9 ranks"),
    ("mamba2", {}, 99, "heads .*do not divide among 99 ranks"),
    ("lfm2", {}, 100, "64 channels are fewer than 100 ranks"),
])  # fmt: skip
def test_what_does_not_divide_is_said_before_weights_are_read(
    family: str, overrides: dict[str, Any], world: int, message: str, tiny_models: Any
) -> None:
    path = tiny_models(family, **overrides)
    with pytest.raises(UsageError, match=rf"tp={world}: .*{message}"):
        RankedRunner(Model(str(path), options(), {}), Layout(tp=world))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")
@pytest.mark.parametrize("size", ["size=64k,nr_inodes=1", "size=64k"])
def test_a_full_disk_is_told(size: str, tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(str(tiny_models("llama")), options(), {})
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(tmp_path)], check=True)
    try:
        if "inodes" not in size:
            with suppress(OSError):
                (tmp_path / "fill").write_bytes(bytes(1 << 20))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with pytest.raises(ToolkitError, match=r"ranks meet in a folder of .* where none can be: No space left"):
            RankedRunner(model, Layout(tp=2))
        assert not list(tmp_path.glob("toolkit-ranks-*"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(("config", "message"), [
    (TurbomindEngineConfig(tp=9), r"tp=9: .*heads .*turbomind's native runner does not split it: .* would do"),
    (TurbomindEngineConfig(tp=2, pp=2), "tp=2, pp=2: turbomind splits by tp alone"),
    (PytorchEngineConfig(tp=2, ep=3), "ep=3: .*expected 2, tp × dp, or 1"),
    (PytorchEngineConfig(tp=2, enable_eplb=True), "enable_eplb: .*ep=1"),
    (PytorchEngineConfig(tp=2, attn_tp_size=1), "attn_tp_size: found 1, expected 2"),
    (PytorchEngineConfig(dp=2, ep=2), "ep=2: .*no experts to share out"),
    (PytorchEngineConfig(pp=99, device_type="cpu"), "pp=99: .*layers are fewer than 99 stages"),
    (PytorchEngineConfig(tp=2, device_type="cuda"), "device: 'cuda' asked for, but this torch was built without CUDA"),
    (PytorchEngineConfig(tp=2, device_type="cuda:1"), "device: found 'cuda:1', expected cuda: each rank takes"),
])  # fmt: skip
def test_configs_that_cannot_be(config: Any, message: str, tiny_models: Any) -> None:
    with pytest.raises(UsageError, match=message):
        AsyncEngine.open(tiny_models("llama"), backend_config=config)


# -- in an engine


def config(tp: int = 2, **fields: Any) -> PytorchEngineConfig:
    same: dict[str, Any] = {"session_len": 256, "max_batch_size": 8, "device_type": "cpu", "dtype": "float32"}
    return PytorchEngineConfig(tp=tp, threads=2, **same | fields)


def whole(engine: AsyncEngine, ids: list[int], **fields: Any) -> Response:
    done = Response()
    for delta in engine.generate_sync(ids, GenerationConfig(ignore_eos=True, **fields)):
        done.extend(delta)
    return done


def test_an_engine_of_ranks_answers_as_one_of_one(tiny_models: Any) -> None:
    path, answers = tiny_models("llama"), []
    for tp in (1, 2):
        with AsyncEngine.open(path, backend_config=config(tp, max_prefill_token_num=16)) as engine:
            first = [whole(engine, [*PROMPT, i], max_new_tokens=10).token_ids for i in (7, 8, 7)]
            drawn = whole(engine, PROMPT, max_new_tokens=10, do_sample=True, temperature=0.8, random_seed=3)
            answers.append((first, drawn.token_ids))
            assert engine.stats()["prefix_hit_tokens"] > 0
            assert ("2 ranks" in engine.runner_note) == (tp == 2)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_killed_rank_ends_its_requests_and_the_engine_comes_back(tiny_models: Any, support: Any) -> None:
    lost = support("lost_ranks")
    engine = AsyncEngine.open(tiny_models("llama"), backend_config=config(), process=True)
    try:
        expected = whole(engine, PROMPT, max_new_tokens=12).token_ids
        told = ""
        while "killed by signal 9" not in told:
            told = asyncio.run(lost.crash(engine, PROMPT))
        assert "rank 1" in told and "restarted" in told
        assert whole(engine, PROMPT, max_new_tokens=12).token_ids == expected
        lost.back_without_a_request(engine)
        assert whole(engine, PROMPT, max_new_tokens=12).token_ids == expected
        pid = engine._loop.pid  # type: ignore[attr-defined]
        ranks = lost.children(pid)
        assert len(ranks) == 1
    finally:
        engine.close()
    lost.all_gone(ranks)


def test_a_rank_that_stands_still_is_told_after_a_while(
    tiny_models: Any, pair: Any, support: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "STEP_SECONDS", 5.0)  # an honest step takes less, also where much else runs
    monkeypatch.setattr(timing, "GRACE_SECONDS", 0.5)
    _, several = pair(tiny_models("llama"), 2)
    (pid,) = several.runner.pids
    number = several.add()
    several.step({number: PROMPT[:20]})
    support("lost_ranks").strike(pid, signal.SIGSTOP)
    with pytest.raises(RunnerLost, match=rf"rank 1 \(process {pid}\) has not answered"):
        several.step({number: [5]})
    with pytest.raises(RunnerLost):
        several.step({number: [5]})
    assert not Path(f"/proc/{pid}").exists()


def test_a_rank_that_is_lost_while_nothing_runs_is_told(tiny_models: Any, pair: Any, support: Any) -> None:
    support("lost_ranks").lost_while_idle(pair(tiny_models("llama"), 2)[1].runner)


def test_a_message_that_a_rank_does_not_take_is_no_hang(
    tiny_models: Any, pair: Any, support: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "STEP_SECONDS", 1.0)
    monkeypatch.setattr(timing, "GRACE_SECONDS", 0.2)
    _, several = pair(tiny_models("llama"), 2)
    support("lost_ranks").strike(several.runner.pids[0], signal.SIGSTOP)
    with pytest.raises(timing.RankLost, match=r"rank 1 .* takes no messages"):
        several.runner._ranks.tell("import_block", 0, 0, bytes(10**7))


def test_in_a_process_of_the_users_a_lost_rank_is_an_engine_that_is_down(tiny_models: Any) -> None:
    engine = AsyncEngine.open(tiny_models("llama"), backend_config=config())
    try:
        (pid,) = engine._loop._core.runner.pids  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        failed = whole(engine, PROMPT, max_new_tokens=5)
        assert failed.finish_reason == "error" and "rank 1" in str(failed.error_message)
        assert not engine.healthy
    finally:
        engine.close()
