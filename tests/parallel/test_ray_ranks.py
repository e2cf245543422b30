"""Ranks that are actors of a real Ray: what one process gives, and what becomes of them when one is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from toolkit.errors import ToolkitError
from toolkit.parallel import nodes, on_ray
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.runners.base import RunnerLost, RunnerOptions
from toolkit.runners.choose import open_runner

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

PROMPT = np.random.default_rng(3).integers(3, 300, 30).tolist()


def model(path: Path) -> Model:
    return Model(str(path), RunnerOptions(dtype="float32", block_size=16, device="cpu", threads=2), {})


def workers() -> list[int]:
    """Processes of ranks, wherever Ray has put them."""
    found = []
    for one in psutil.process_iter(["pid", "cmdline"]):
        if any("toolkit.parallel.worker" in word for word in one.info["cmdline"] or ()):
            found.append(one.info["pid"])
    return found


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)], ids=str)
def test_ranks_on_ray_give_what_one_process_gives(layout: Layout, tiny_models: Any, support: Any) -> None:
    path, steps = tiny_models("llama"), support("steps")
    before = set(workers())
    ranks = on_ray.open_on_ray(model(path), layout)
    try:
        assert ranks.pids == [] and len(set(workers()) - before) == layout.world - 1
        one = open_runner(path, backend="pytorch", options=model(path).options)[0]
        assert steps.Driver(ranks).generate(PROMPT, 8) == steps.Driver(one).generate(PROMPT, 8)
    finally:
        ranks.close()
    assert not ray.is_initialized()


def test_a_rank_that_is_killed_ends_what_ran(tiny_models: Any, support: Any) -> None:
    path, steps = tiny_models("llama"), support("steps")
    before = set(workers())
    ranks = on_ray.open_on_ray(model(path), Layout(tp=2))
    try:
        driver = steps.Driver(ranks)
        driver.generate(PROMPT, 4)
        (victim,) = set(workers()) - before
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(RunnerLost, match="rank 1"):
            driver.generate(PROMPT, 4)
    finally:
        ranks.close()


@pytest.mark.parametrize(("how", "told"), [("killed", "died"), ("failing", "no memory$")])
def test_an_actor_that_fails_before_its_rank_comes_is_told_at_once(
    how: str, told: str, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(on_ray.Rank):  # here, so that Ray takes its text along
        def run(self, *_: Any) -> None:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ToolkitError("a rank's process cannot be started: no memory")

    path = tiny_models("llama")
    monkeypatch.setattr(on_ray, "Rank", Lost)
    monkeypatch.setattr(nodes, "COME_SECONDS", 3600.0)  # so long would be waited
    with pytest.raises(ToolkitError, match=rf"^rank 1 \(an actor of Ray\): .*{told}"):
        on_ray.open_on_ray(model(path), Layout(tp=2))
    assert not ray.is_initialized()


def test_a_cluster_without_room_and_one_that_is_not_there(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models("llama")
    monkeypatch.setenv(on_ray.ADDRESS, "127.0.0.1:1")
    with pytest.raises(ToolkitError, match=r"RAY_ADDRESS 127\.0\.0\.1:1: no cluster of Ray answers there"):
        on_ray.open_on_ray(model(path), Layout(tp=2))
    monkeypatch.delenv(on_ray.ADDRESS)
    monkeypatch.setattr(on_ray, "PLACE_SECONDS", 3.0)
    monkeypatch.setattr(on_ray, "connect", lambda *_: ray.init(num_cpus=1, include_dashboard=False))
    with pytest.raises(ToolkitError, match="tp=4: expected 3 free cores on the cluster, found 1"):
        on_ray.open_on_ray(model(path), Layout(tp=4))
    assert not ray.is_initialized()


def test_each_rank_has_a_gpu_that_no_other_has(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that Ray is told of stand in; the ranks are not started."""
    file = tmp_path / "second"

    class Told(on_ray.Rank):
        def run(self, *_: Any) -> None:
            file.write_text(os.environ["CUDA_VISIBLE_DEVICES"])

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(on_ray, "Rank", Told)
    monkeypatch.setattr(on_ray, "kind_of_ranks", lambda asked: "cuda")
    monkeypatch.setattr(on_ray, "RankedRunner", lambda model, *rest: (model, rest[-1]))
    monkeypatch.setattr(on_ray, "PLACE_SECONDS", 30.0)
    monkeypatch.setattr(on_ray, "connect", lambda *_: ray.init(num_cpus=2, num_gpus=2, include_dashboard=False))
    path = tiny_models("llama")
    try:
        opened, failed = on_ray.open_on_ray(model(path), Layout(tp=2))
        while not failed():
            time.sleep(0.1)
        assert {opened.devices[0], int(file.read_text())} == {0, 1}
    finally:
        ray.shutdown()
    monkeypatch.setattr(on_ray, "PLACE_SECONDS", 3.0)
    with pytest.raises(ToolkitError, match="tp=4: expected 4 free GPUs on the cluster, found 2"):
        on_ray.open_on_ray(model(path), Layout(tp=4))
    assert not ray.is_initialized()
