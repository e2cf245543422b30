"""Ctrl-C ends every command, in whatever phase, with exit code 130, one line and no traceback."""

from __future__ import annotations

import importlib.util
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.commands.app.interrupt import WITHIN

SLACK = 30.0  # seconds on top of the promise, for machines that do much else: it is a hang that is looked for
QUICK = ("lite auto_awq", "convert", "chat", "serve api_server")
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench" / "serving" / "interrupt.py"


def script() -> Any:
    """What measures it on a real model; its commands are tried here on a tiny one."""
    spec = importlib.util.spec_from_file_location("interrupt_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


BENCH = script()
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BENCH.COMMANDS]


@pytest.mark.parametrize("name", CASES)
def test_any_command_at_any_moment(name: str, tiny_models: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {n}th sentence says little, but at some length." for n in range(2000)))
    draw = random.Random(name)
    moments = sorted(draw.uniform(0.0, 6.0) for _ in range(2 if name in QUICK else 3))
    for row in BENCH.measure(name, {"model": tiny_models("llama"), "text": text}, moments, tmp_path):
        assert "Traceback" not in row["err"], row
        assert row["seconds"] < WITHIN + SLACK, row
        if row["code"] == 130:
            assert row["err"].rstrip().splitlines()[-1].endswith(("interrupted", "goes on from there")), row
            assert not list(tmp_path.glob(f"{name.replace(' ', '-')}-*")), "nothing is written half"
        else:  # it is the server, whose end this is, or it was ending by itself
            assert row["code"] == 0 or name == "pull", row


def test_the_script_shows_the_slowest_moment(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, "--only", "serve proxy", "--moments", "2", "--span", "1", "--json", figures],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    rows = json.loads(figures.read_text())
    assert {row["after"] for row in rows} == {0.0, 1.0} and "serve proxy" in done.stdout, done.stderr
    assert done.returncode == int(any(row["seconds"] > 1 or row["left"] for row in rows))


LOST = """
import signal, time, weakref
import toolkit.commands.main as main
class Thing: pass
def lose(**options):
    thing = Thing()
    watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    time.sleep(600)
main._whole = lambda: lose
main.main([])
"""


def test_an_interrupt_that_python_swallows() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


SAVED = """
import signal, sys, toolkit.commands.main as main
from pathlib import Path
from toolkit.artifacts.output.stage import open_stage
import torch
def work(**options):
    with open_stage(sys.argv[1], kind="quantized", stage="test", parent={}, options={}) as stage:
        if sys.argv[2] == "saved":
            stage.save("layer.0", {"x": torch.zeros(1)})
        signal.raise_signal(signal.SIGINT)
main._whole = lambda: work
main.main([])
"""


@pytest.mark.parametrize("saved", ["saved", "nothing"])
def test_an_interrupted_stage_says_where_its_work_lies(saved: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SAVED, tmp_path / "out", saved], capture_output=True, text=True, timeout=500
    )
    partial = tmp_path / ".out.partial"
    told = f"; what is done lies in {partial}, the same command goes on from there" if saved == "saved" else ""
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"interrupted{told}\n")
    assert list(partial.rglob("layer.0.safetensors")) if saved == "saved" else not partial.exists()


LOST_EARLY = """
import signal, sys, weakref, toolkit.__main__ as tool
class Thing: pass
class Finder:
    def find_spec(name, path, target=None):
        if name == "toolkit.commands.main":
            thing = Thing()
            watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
            del thing
            print("was not ended", flush=True)
sys.meta_path.insert(0, Finder)
tool.main()
"""


def test_an_interrupt_that_python_swallows_while_we_are_imported() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", LOST_EARLY], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


EXTENSION = """
import enum, signal, sys, toolkit.__main__ as tool, toolkit.commands.main as main
find = enum.EnumType._find_data_repr_
def interrupted(*args):
    signal.raise_signal(signal.SIGINT)
    return find(*args)
def load(**options):
    import dataclasses, functools, importlib, pathlib, re, subprocess, sysconfig, typing
    enum.EnumType._find_data_repr_ = staticmethod(interrupted)
    import triton._C.libtriton
    print("was not ended", "triton._C.libtriton" in sys.modules)
main._whole = lambda: load
tool.main()
"""


def test_an_interrupt_while_an_extension_is_set_up() -> None:
    """Triton's builds an enum then, by Python's own class, and aborts where that raises."""
    done = subprocess.run([sys.executable, "-P", "-c", EXTENSION], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


SLOW_END = """
import atexit, time, toolkit.__main__ as tool, toolkit.commands.main as main
def interrupted(**options):
    raise KeyboardInterrupt
atexit.register(time.sleep, 3600)  # as what a large library tidies up
main._whole = lambda: interrupted
print("begun", flush=True)
tool.main()
"""


def test_what_python_tidies_up_is_not_waited_for() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", SLOW_END], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun\n", "interrupted\n")


ENDED = """
import atexit, signal, sys, threading, toolkit.__main__ as tool, toolkit.commands.main as main
class Last:
    def __del__(self, write=sys.stderr.write):
        write("Python tidied up, and looked at all of torch's objects")
sys.last = Last()
def done(**options):
    WHEN
    print("done", flush=True)
    sys.exit(3)
main._whole = lambda: done
tool.main()
"""


TIDIES = "signal.raise_signal(signal.SIGINT); print('was not left', flush=True)"  # before what atexit knows
OWN = "print('what a command registered')"


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (f"threading._register_atexit(exec, {TIDIES!r}, globals())", "done\n"),
        (f"atexit.register(exec, {OWN!r}, globals())", "done\nwhat a command registered\n"),
    ],
)
def test_what_has_ended_keeps_its_exit_code(when: str, said: str) -> None:
    code = ENDED.replace("WHEN", when)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (3, said, "")


STUCK = """
import hashlib, sys
import toolkit.commands.main as main
def stuck(**options):
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)  # one call that takes an hour
main._whole = lambda: stuck
main.main([])
"""


def test_a_call_that_never_looks_at_signals_is_left_behind() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    try:
        err = process.communicate(timeout=500)[1]
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "interrupted\n")
    assert time.monotonic() - sent < WITHIN + SLACK


def test_while_it_is_being_imported() -> None:
    code = "import sys, signal; sys.argv = ['tool']\nclass Slow:\n def find_spec(self, name, *_):\n"
    code += "  if name == 'toolkit.commands.main': signal.raise_signal(signal.SIGINT)\n"
    code += "sys.meta_path.insert(0, Slow())\nfrom toolkit.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
