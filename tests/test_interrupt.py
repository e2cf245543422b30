"""Ctrl-C ends every command, in whatever phase, with exit code 130, one line and no traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.commands.interrupt import WITHIN

pytestmark = pytest.mark.alone  # a promise in seconds
SLACK = 30.0  # seconds on top, for machines that do much else
SMALL = ("--calib-dataset", "{text}", "--calib-samples", "64", "--calib-seqlen", "64", "--eval-tokens", "20000")
QUICK = {
    "auto_awq": ("lite", "auto_awq", "{model}", "--work-dir", "{out}", *SMALL),
    "convert": ("convert", "{model}", "--dst-path", "{out}"),
    "chat": ("chat", "{model}", "-p", "x", "--ignore-eos", "--max-new-tokens", "50000", "--session-len", "60000"),
    "serve": ("serve", "api_server", "{model}", "--server-port", "0"),
}
SLOW = {
    "auto_gptq": ("lite", "auto_gptq", "{model}", "--work-dir", "{out}", *SMALL, "--tune-steps", "64"),
    "smooth_quant": ("lite", "smooth_quant", "{model}", "--work-dir", "{out}", *SMALL),
    "search": ("lite", "search", "{model}", "--bits", "5", "--work-dir", "{out}", *SMALL),
    "calibrate": ("lite", "calibrate", "{model}", "--work-dir", "{out}", *SMALL[:-2]),
    "kv": ("lite", "kv", "{model}", "--work-dir", "{out}", *SMALL),
    "convert --to gguf": ("convert", "{model}", "--to", "gguf", "--gguf-type", "q4_0", "--dst-path", "{out}.gguf"),
    "throughput": ("profile", "throughput", "{model}", "--num-prompts", "5000"),
    "generation": ("profile", "generation", "{model}", "--rounds", "1000"),
    "ppl": ("eval", "ppl", "{model}", "--data", "heldout", "--stride", "8", "--window", "64"),
    "compare": ("eval", "compare", "{model}", "{model}", "--data", "heldout", "--window", "32"),
    "check_env": ("check_env",),
    "inspect": ("inspect", "{model}", "--verify"),
    "pull": ("pull", "nobody/nothing"),
}
CASES = [pytest.param(QUICK[name], id=name) for name in QUICK]
CASES += [pytest.param(SLOW[name], id=name, marks=pytest.mark.slow) for name in SLOW]


START = "import sys, toolkit.__main__ as tool; print('started', file=sys.stderr, flush=True); tool.main()"


def interrupted(command: list[str], after: float) -> tuple[int, str, float]:
    """Exit code, standard error, and the seconds from the signal to the end. ``after``: seconds from the start."""
    env = os.environ | {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", START, *command],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    assert process.stderr is not None and process.stderr.readline() == "started\n"
    time.sleep(after)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    try:
        err = process.communicate(timeout=500)[1]
    finally:
        process.kill()
    return process.returncode, err, time.monotonic() - sent


@pytest.mark.parametrize("command", CASES)
def test_any_command_at_any_moment(
    command: tuple[str, ...], tiny_models: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {n}th sentence says little, but at some length." for n in range(2000)))
    names = {"model": tiny_models("llama"), "text": text}
    moments = random.Random(request.node.callspec.id)
    rounds = 3 if command in SLOW.values() else 2
    for i in range(rounds):
        filled = [part.format(**names, out=tmp_path / f"out{i}") for part in command]
        code, err, seconds = interrupted(filled, moments.uniform(0.0, 6.0))
        assert "Traceback" not in err, err
        assert seconds < WITHIN + SLACK, err
        if code == 130:
            assert err.rstrip().endswith("interrupted"), err
            assert not (tmp_path / f"out{i}").exists(), "nothing is written half"
        else:  # it had ended, or it is the server, whose end this is
            assert code in (0, 1 if command[0] == "pull" else 0), err


LOST = """
import signal, time, weakref
import toolkit.commands.main as main
class Thing: pass
def lose(**options):
    thing = Thing()
    watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    time.sleep(600)
main.app = lose
main.main([])
"""


def test_an_interrupt_that_python_swallows() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


STUCK = """
import hashlib, sys
import toolkit.commands.main as main
def stuck(**options):
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)  # one call that takes an hour
main.app = stuck
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
