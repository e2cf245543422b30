"""Engines whose ranks are on two machines do all that one process does, and answer with its bits: adapters, new
weights, files of ranks, guesses, a kept cache, sessions. Machines are network namespaces; the second does not see the
first one's model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.support.draft_head import write
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.parallel.nodes import KEY

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[1] / "support" / "far_engine.py"
PORT = 29519
CONFIG = {"dtype": "float32", "session_len": 256, "device": "cpu", "threads": 2, "cache_max_entry_count": 40}
SIZES = {"turbomind": {"cache_block_seq_len": 16}, "pytorch": {"block_size": 16}}
PROMPT = np.random.default_rng(5).integers(3, 300, 70).tolist()
ASK = ["ask", {"prompt": PROMPT}]
DRAWN = ["ask", {"prompt": PROMPT[:33], "temperature": 0.8, "tokens": 20}]


class Machines:
    """``alone(kind, model, deeds, options…)`` and ``both(…)``: what the program prints; ``both`` also: what the second
    machine says."""

    def __init__(self, cable: Any, folder: Path) -> None:
        self._cable, self._folder = cable, folder

    def alone(self, kind: str, model: Path, deeds: list[Any], **more: Any) -> Any:
        done = subprocess.run(self._command(kind, model, deeds, more), capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def both(self, kind: str, model: Path, deeds: list[Any], hidden: tuple[Path, ...] = (), **more: Any) -> Any:
        """``hidden``: what the second machine has not, beside the first one's model."""
        copy = self._folder / "elsewhere"
        if not copy.exists():
            shutil.copytree(model, copy)
        fields = {"tp": 2, "nnodes": 2, "dist_init_addr": f"10.97.5.1:{PORT}"} | more
        first = self._command(kind, model, deeds, fields)
        second = self._command(kind, copy, [], fields | {"node_rank": 1, "kv_cache_dir": None})
        without = "".join(f"mount -t tmpfs none '{path}' && " for path in (model, *hidden))
        second = ["unshare", "-m", "sh", "-c", f'{without}exec "$@"', "sh", *second]
        env = os.environ | {KEY: "between us", "TOOLKIT_RANKS_TIMEOUT": "60"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
        started = [
            subprocess.Popen(["ip", "netns", "exec", name, *command], **pipes)
            for name, command in zip(self._cable.names, (first, second), strict=True)
        ]
        try:
            (told, errors), (said, why) = (process.communicate(timeout=200) for process in started)
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0, 0], (errors, said, why)
        assert said.splitlines()[-1].endswith("has ended")
        return json.loads(told.splitlines()[-1])

    @staticmethod
    def _command(kind: str, model: Path, deeds: list[Any], more: dict[str, Any]) -> list[str]:
        fields = CONFIG | SIZES[kind] | more
        if kind == "pytorch":
            fields["device_type"] = fields.pop("device")
        return [sys.executable, str(PROGRAM), str(model), kind, json.dumps(fields), json.dumps(deeds)]


@pytest.fixture
def machines(support: Any, tmp_path: Path) -> Iterator[Machines]:
    with support("namespaces").cable() as cable:
        yield Machines(cable, tmp_path)


@pytest.fixture
def model(tiny_models: Any, tmp_path: Path) -> Path:
    """A folder of this test's own, which the second machine cannot see."""
    return shutil.copytree(tiny_models("llama"), tmp_path / "model")


def same(kind: str, one: Any, several: Any) -> None:
    """Bits of turbomind; pytorch's ranks add up otherwise, and draw the same tokens."""
    assert "2 ranks" in several[1]["note"] and "2 ranks" not in one[1]["note"]
    if kind == "turbomind":
        assert several[0] == one[0]
    else:
        assert [x and x[::2] for x in several[0]] == [x and x[::2] for x in one[0]]


KINDS = pytest.mark.parametrize("kind", ["turbomind", "pytorch"])


@KINDS
def test_adapters(kind: str, machines: Machines, model: Path, support: Any, tmp_path: Path) -> None:
    write = support("adapters").write_adapter
    paths = [
        str(write(tmp_path / name, model, "[qv]_proj|down_proj", rank=rank, seed=rank))
        for name, rank in (("a", 4), ("b", 9))
    ]
    with_a = ["ask", {"prompt": PROMPT, "adapter": 0}]
    deeds = [ASK, with_a]
    if kind == "turbomind":  # which takes new ones in
        with_b = ["ask", {"prompt": PROMPT, "adapter": 1, "temperature": 0.7}]
        deeds += [["load", 1, str(tmp_path)], ["load", 1, paths[1]], with_b, with_a, ["unload", 1], ASK]
        deeds += [["load", 2, paths[1]], ["ask", {"prompt": PROMPT[:40], "adapter": 2}]]
    one, several = (run(kind, model, deeds, adapters={"a": paths[0]}) for run in (machines.alone, machines.both))
    same(kind, one, several)
    assert one[0][0] != one[0][1]
    if kind == "turbomind":
        assert "adapter_config.json" in one[0][2] and one[0][4] != one[0][1]


@KINDS
def test_new_weights(kind: str, machines: Machines, model: Path, tmp_path: Path) -> None:
    """They lie where all machines see them; those that one does not see are refused, and the old ones go on."""
    paths = []
    for name, rows in (("new", 7), ("near", 9)):
        tensors = load_file(model / "model.safetensors")
        tensors = {key: x.roll(rows, 0) if key.endswith("q_proj.weight") else x for key, x in tensors.items()}
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        paths.append(tmp_path / name)
    deeds = [ASK, ["renew", str(paths[0])], ASK, DRAWN]
    one, several = (run(kind, model, deeds) for run in (machines.alone, machines.both))
    same(kind, one, several)
    assert one[0][0] != one[0][2]
    refused = machines.both(kind, model, [ASK, ["renew", str(paths[1])], ASK], hidden=(paths[1],))
    bits = 2 if kind == "turbomind" else 1
    assert refused[0][0][:bits] == refused[0][2][:bits]
    assert "rank 1" in refused[0][1] and str(paths[1]) in refused[0][1]


def test_files_of_ranks(machines: Machines, tiny_models: Any, tmp_path: Path) -> None:
    """Each machine has its own rank's alone."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    convert(str(tiny_models("llama")), whole, Packing(target="cpu", load_format="int4"))
    convert(str(tiny_models("llama")), cut, Packing(target="cpu", load_format="int4", tp=2))
    for mine, other, rank in ((cut, tmp_path / "elsewhere", 1),):
        shutil.copytree(mine, other)
        (mine / f"rank-{rank}-of-2.safetensors").unlink()
        (other / f"rank-{1 - rank}-of-2.safetensors").unlink()
    one = machines.alone("turbomind", whole, [ASK, DRAWN])
    same("turbomind", one, machines.both("turbomind", cut, [ASK, DRAWN]))


@pytest.mark.parametrize(("kind", "guess"), [
    ("turbomind", "lookup"), ("turbomind", "mtp"), ("turbomind", "draft_model"), ("turbomind", "eagle3"),
    ("pytorch", "lookup"), ("pytorch", "draft_model"), ("pytorch", "eagle3"),
])  # fmt: skip
def test_guesses(kind: str, guess: str, machines: Machines, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"speculative_algorithm": guess}
    if guess == "mtp":
        mtp = support("mtp")
        path = mtp.add_mtp(tiny_models("qwen2", **mtp.CONFIGS["qwen2"]), tmp_path / "model", right=True)
    else:
        layers = {"num_hidden_layers": 4} if guess == "eagle3" else {}
        path = shutil.copytree(tiny_models("llama", **layers), tmp_path / "model")
    if guess == "eagle3":
        fields["speculative_draft_model"] = str(write(tmp_path / "head"))
    if guess == "draft_model":
        fields["speculative_draft_model"] = str(shutil.copytree(path, tmp_path / "draft"))
    deeds = [["ask", {"prompt": PROMPT[:20] * 3, "tokens": 40}], DRAWN]
    one = machines.alone(kind, path, deeds)
    several = machines.both(kind, path, deeds, **fields)
    same(kind, one, several)
    counts = {name: count["tokens"] for name, count in several[1]["spec_by_method"].items()}
    assert counts[guess] > 0
    if guess in ("mtp", "draft_model"):  # of a head with random weights no guess need be right
        assert several[1]["spec_by_method"][guess]["accepted"] > 0


@KINDS
def test_a_kept_cache(kind: str, machines: Machines, model: Path, tmp_path: Path) -> None:
    one = machines.alone(kind, model, [ASK])
    found = [machines.both(kind, model, [ASK], kv_cache_dir=str(tmp_path / "kv")) for _ in range(2)]
    assert [x[1]["kept_hit_tokens"] for x in found] == [0, 64] and not found[1][1]["kept_refused_files"]
    one[0][0][2] = found[1][0][0][2] = 0
    for several in found:
        same(kind, one, several)


@KINDS
def test_sessions(kind: str, machines: Machines, model: Path) -> None:
    turn = ["ask", {"prompt": PROMPT, "session": "ada"}]
    more = ["ask", {"prompt": PROMPT + PROMPT[:30], "session": "ada"}]
    others = [["ask", {"prompt": PROMPT[i:] + PROMPT[:i], "tokens": 60}] for i in range(1, 12)]  # the cache is full
    deeds = [turn, *others, more, ["end", "ada"], *others, more]
    one, several = (run(kind, model, deeds, cache_max_entry_count=16) for run in (machines.alone, machines.both))
    same(kind, one, several)
    assert one[0][12][2] >= 64 and one[0][-1][2] < 64
