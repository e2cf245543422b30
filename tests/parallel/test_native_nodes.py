"""Ranks of the native runner on several machines: the bits of one process; who is lost ends the step with a reason.

Machines are memories of their own in this process, or what ``serve`` starts at the loopback address.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.convert.pack_cache import is_for
from toolkit.engine.load.ranks import check
from toolkit.errors import ToolkitError
from toolkit.parallel import native_runner
from toolkit.parallel import nodes as waiting
from toolkit.parallel import ranks as timing
from toolkit.parallel.bridge import Bridge, Span
from toolkit.parallel.choose import open_ranks
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.native_runner import NativeRanks
from toolkit.parallel.nodes import KEY, Nodes
from toolkit.runners.base import RunnerLost, RunnerOptions
from toolkit.runners.choose import changes_of, open_model
from toolkit.runners.native import library
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.native.share import Share

PROMPT = np.random.default_rng(3).integers(3, 300, 45).tolist()
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


def options(**fields: Any) -> RunnerOptions:
    return RunnerOptions(**{"dtype": "float32", "block_size": 16, "device": "cpu", "threads": 1} | fields)


def same(one: Any, several: Any) -> None:
    """Logits and hidden states of a prompt in chunks, of steps of several sequences; greedy tokens."""
    a, b = one.add(), several.add()
    for start, stop in ((0, 20), (20, 22), (22, 45)):
        expected, found = (d.step({n: PROMPT[start:stop]}, "all") for d, n in ((one, a), (several, b)))
        assert found.logits.tobytes() == expected.logits.tobytes()
        assert found.hidden.tobytes() == expected.hidden.tobytes()
    new = [{driver.add(): PROMPT[:7], number: [5]} for driver, number in ((one, a), (several, b))]
    assert several.step(new[1], "all").logits.tobytes() == one.step(new[0], "all").logits.tobytes()
    assert several.generate(PROMPT, 6) == one.generate(PROMPT, 6)


@pytest.fixture
def spread(support: Any, tiny_models: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``spread(family, ranks, machines, load_format, sizes)``: drivers of one process and of ranks over machines."""
    opened: list[NativeRunner] = []
    spans: list[Span] = []
    threads: list[threading.Thread] = []
    memories: list[int] = []

    def run(machine: int, machines: int) -> None:
        store = dist.FileStore(str(tmp_path / "meet"), machines)
        spans[machine].meet(store, "127.0.0.1", 60)
        spans[machine].carry()

    def make(family: str, ranks: int, machines: int = 2, load_format: str = "auto", sizes: Any = None) -> Any:
        model, here = open_model(tiny_models(family, **sizes or {}), load_format=load_format), ranks // machines
        for machine in range(machines):
            memories.append(os.memfd_create("ranks"))
            spans.append(Span(memories[-1], ranks, machine, here))
            threads.append(threading.Thread(target=run, args=(machine, machines), daemon=True))
        for thread in threads:
            thread.start()
        changes = changes_of(model)
        opened.append(NativeRunner(model.spec, model.weights, options(), changes=changes))
        for rank in range(ranks):
            share = Share(rank, ranks, memories[rank // here])
            opened.append(NativeRunner(model.spec, model.weights, options(), share=share, changes=changes))
        together = support("native_together").Together(opened[1:])
        return support("steps").Driver(opened[0]), support("steps").Driver(together)

    yield make
    for span in spans:
        span.lose()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for runner in opened:
        runner.close()
    for memory in memories:
        os.close(memory)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "deepseek_v2", "mamba2", "gemma2"])
def test_two_machines_give_the_bits_of_one_process(family: str, ranks: int, spread: Any) -> None:
    same(*spread(family, ranks))


@pytest.mark.parametrize(("family", "sizes"), [("llama", WIDE), ("qwen3_moe", None)])
def test_codes_travel_between_machines(family: str, sizes: Any, spread: Any) -> None:
    same(*spread(family, 4, 4, "int4", sizes))


def test_models_come_and_go(spread: Any) -> None:
    """Ranks that load again number their meetings anew."""
    one, several = spread("llama", 4)
    several.step({several.add(): PROMPT})
    for runner in several.runner.runners:
        runner.release_weights()
    several.runner.load_weights()
    several.runner.allocate_cache((32,))
    same(one, type(several)(several.runner))


@pytest.mark.parametrize(("head", "posted", "told"), [
    ((24 + 256, 0, 0), (0,), "no message of ranks"),  # of the machine that it comes to
    ((24 + 256, 0, 2), (0,), "no message of ranks"),
    ((1 << 40, 0, 1), (0,), "no message of ranks"),
    ((24 + 256, 5, 1), (0,), "at meeting 5, those here at 0"),
    ((24 + 256, 0, 1), (8,), "too many arrays"),
    ((24 + 256, 0, 1), (1, 1, 64, 0, 64), "does not fit"),
    ((24 + 256, 0, 1), (1, -1, 64, 0, 64), "does not fit"),
])  # fmt: skip
def test_a_message_that_is_none_is_refused(head: tuple[int, ...], posted: tuple[int, ...], told: str) -> None:
    """size, meeting, first rank; then of each rank how many arrays, and of each rows, width and which bytes of it."""
    memory = os.memfd_create("ranks")
    lib = library.load(library.library_path())
    bridge = lib.tk_bridge_open(memory, 2, 0, 1)
    data = struct.pack(f"{len(head + posted)}q", *head, *posted).ljust(24 + 256, b"\0")
    assert lib.tk_bridge_unpack(bridge, data) != 0 and told in library.error(lib)
    lib.tk_bridge_close(bridge)
    os.close(memory)


# -- in processes of their own


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv(KEY, "between us")
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def second(support: Any, port: int) -> Any:
    """``second(model)``: the second machine."""
    return lambda model, tp=2: support("second_machine").Second(model, port, tp)


def processes(module: str) -> dict[int, int]:
    """Those of this test's that run ``module``, with whoever has started them."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return {pid: parents[pid] for pid in mine if f"from {module} import" in _command(pid)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_ranks_of_two_commands_answer_as_one_process(port: int, second: Any, tiny_models: Any, support: Any) -> None:
    """Two on each machine, which the second one's command starts; turbomind without being asked for, as on one."""
    path, steps = tiny_models("llama"), support("steps")
    model = Model(str(path), options(device="auto"), {})
    other = second(model, 4)
    ranks, why = open_ranks(model, Layout(tp=4), None, Nodes(2, 0, "127.0.0.1", port))
    assert isinstance(ranks, NativeRanks) and why == "" and "4 ranks on 2 machines" in ranks.notes[0]
    opened = open_model(path)
    with closing(NativeRunner(opened.spec, opened.weights, options())) as one:
        try:
            same(steps.Driver(one), steps.Driver(ranks))
            assert len(processes("toolkit.parallel.bridge")) == 2
        finally:
            ranks.close()
    assert other.end() == "" and other.told[-1].endswith("has ended")
    assert processes("toolkit.parallel.bridge") == processes("toolkit.parallel.native_worker") == {}


@pytest.mark.parametrize("gone", [False, True])
def test_a_bridge_that_is_killed_as_it_starts(gone: bool, support: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    support("dying_children").kill_children(monkeypatch, gone)
    with pytest.raises(ToolkitError, match=r"^machines of ranks have not met: the bridge of ranks .* has ended$"):
        Bridge({}, lambda: None)


@pytest.mark.parametrize(("module", "child", "number", "before", "told"), [
    ("native_worker", True, signal.SIGKILL, 0.0, r"rank 1 \(at 127\.0\.0\.1\) is gone"),
    ("native_worker", True, signal.SIGSTOP, 0.0, r"rank 1 \(at 127\.0\.0\.1\) has not answered"),
    ("bridge", False, signal.SIGKILL, 0.0, r"node_rank 1"),  # the other machine's
    ("bridge", False, signal.SIGKILL, 0.5, r"node_rank 1"),  # the connection is known to be closed
    ("bridge", True, signal.SIGKILL, 0.0, r"the bridge of ranks \(process \d+\) has ended"),
])  # fmt: skip
def test_what_is_lost_is_told(
    module: str, child: bool, number: int, before: float, told: str, port: int, second: Any, tiny_models: Any,
    support: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = Model(str(tiny_models("llama")), options(), {})
    other = second(model)
    ranks = NativeRanks(model, 2, nodes=Nodes(2, 0, "127.0.0.1", port))
    try:
        driver = support("steps").Driver(ranks)
        sequence = driver.add()
        driver.step({sequence: PROMPT[:20]})
        monkeypatch.setattr(timing, "STEP_SECONDS", 3.0)
        monkeypatch.setattr(timing, "GRACE_SECONDS", 0.5)
        monkeypatch.setattr(waiting, "COME_SECONDS", 0.5)
        found = processes(f"toolkit.parallel.{module}").items()
        (victim,) = (pid for pid, parent in found if (parent == os.getpid()) == child)
        (support("lost_ranks").strike if number == signal.SIGSTOP else os.kill)(victim, number)
        time.sleep(before)
        with pytest.raises(RunnerLost, match=told):
            driver.step({sequence: [5]})
        with pytest.raises(RunnerLost):
            driver.step({sequence: [5]})
    finally:
        if number == signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
        ranks.close()
    assert "nobody is at" in other.end()
    assert processes("toolkit.parallel.native_worker") == {}


def test_machines_with_other_instructions_do_not_begin(
    port: int, second: Any, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(str(tiny_models("llama")), options(), {})
    monkeypatch.setattr(waiting, "COME_SECONDS", 5.0)
    monkeypatch.setattr(native_runner, "instructions", lambda: "abacus")
    other = second(model)
    with pytest.raises(ToolkitError, match=r"rank 1 computes with \w+, rank 0 with abacus.*; set TOOLKIT_CPU_ISA to"):
        NativeRanks(model, 2, nodes=Nodes(2, 0, "127.0.0.1", port))
    assert "nobody is at" in other.end()


def test_options_go_together_and_the_checkpoint_is_what_machines_have_alike(port: int) -> None:
    config = TurbomindEngineConfig(tp=2, nnodes=2, dist_init_addr=f"127.0.0.1:{port}", device="cpu")
    check(config)
    assert not is_for(config, None) and is_for(TurbomindEngineConfig(tp=2, device="cpu"), None)
