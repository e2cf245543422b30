"""What a command needs at its end is looked for at its beginning: before its model is, where that can be."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

# Runs every command of a JSON list where the modules named in another are not installed; prints (exit code, standard
# output, standard error) of each.
RUN_ALL = """
import contextlib, io, json, sys
from importlib import util
absent, commands = map(json.loads, sys.argv[1:])
found = util.find_spec
util.find_spec = lambda name, package=None: None if name in absent else found(name, package)
sys.modules |= dict.fromkeys(absent)  # and importing them fails
from toolkit.commands.main import main
done = []
for command in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(command)
        except SystemExit as e:
            code = e.code
    done.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def tool(support: Any) -> Any:
    return support("command").tool


def refused(done: Iterable[tuple[int, str, str]], commands: Iterable[Iterable[str | Path]]) -> list[str]:
    """What commands that end as misuse say, in one line each."""
    told = []
    for command, (code, out, err) in zip(commands, done, strict=True):
        assert (code, out) == (2, ""), (command, code, out, err)
        assert err.count("\n") == 1, (command, err)
        told.append(err)
    return told


def refused_without(absent: list[str], *commands: Iterable[str | Path]) -> list[str]:
    """``refused``, where some modules are not installed."""
    given = json.dumps(absent), json.dumps([[str(part) for part in command] for command in commands])
    done = subprocess.run([sys.executable, "-c", RUN_ALL, *given], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return refused(json.loads(done.stdout), commands)


def refused_here(tool: Any, *commands: Iterable[str | Path]) -> list[str]:
    found = (tool(*command) for command in commands)
    return refused(((done.returncode, done.stdout, done.stderr) for done in found), commands)


def test_a_picture_without_matplotlib(tmp_path: Path) -> None:
    methods = ["auto_awq", "auto_gptq", "auto_round", "smooth_quant", "mxfp4"]
    commands = [*(("lite", m) for m in methods), ("lite", "search", "--bits", "5")]
    commands += [("profile", "throughput"), ("profile", "generation")]
    for told in refused_without(["matplotlib"], *((*c, "nosuch", "--plot", tmp_path / "x.png") for c in commands)):
        assert "--plot: matplotlib is not installed" in told and "[plot]'" in told


RESULTS = [
    *(("lite", name, "nosuch", "--json") for name in ("auto_awq", "auto_gptq", "smooth_quant", "kv", "calibrate")),
    ("lite", "search", "nosuch", "--bits", "5", "--plot"),
    ("convert", "nosuch", "--dst-path", "x", "--json"),
    ("convert", "nosuch", "--dst-path", "x", "--to", "gguf", "--json"),
    ("profile", "throughput", "nosuch", "--json"),
    ("profile", "throughput", "nosuch", "--csv"),
    ("profile", "throughput", "nosuch", "--plot"),
    ("profile", "generation", "nosuch", "--json"),
    ("profile", "generation", "nosuch", "--plot"),
    ("eval", "ppl", "nosuch", "--data", "heldout", "--json"),
    ("eval", "compare", "nosuch", "nosuch", "--data", "heldout", "--json"),
    ("check_env", "--json"),
    ("inspect", "nosuch", "--json"),
    ("list", "models", "--json"),
]


def test_results_that_cannot_be_written(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    commands = [(*command, tmp_path / "file" / "result.png") for command in RESULTS]
    for command, told in zip(RESULTS, refused_here(tool, *commands), strict=True):
        assert command[-1] in told and "directory that exists" in told


def test_texts_that_are_not_there(tool: Any, tmp_path: Path) -> None:
    file = tmp_path / "nothere.json"
    evals = [("eval", "ppl", "nosuch", "--data", file), ("eval", "compare", "nosuch", "nosuch", "--data", file)]
    for told in refused_here(tool, *evals, ("profile", "throughput", "nosuch", "--dataset", file)):
        assert "nothere.json" in told


def test_packages_that_quantizing_takes(tiny_models: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.parquet").touch()
    command = ("lite", "auto_awq", tiny_models("llama"), "--work-dir", tmp_path / "out", "--calib-seqlen", "32")
    known, parquet, library = refused_without(
        ["datasets", "pyarrow", "auto_round"],
        (*command, "--calib-dataset", "c4"),
        (*command, "--calib-dataset", tmp_path / "texts"),
        ("lite", "auto_round", "nosuch", "--work-dir", tmp_path / "out"),
    )
    assert "--calib-dataset c4: datasets is not installed" in known and "[quant]'" in known
    assert "pyarrow is not installed" in parquet
    assert "auto-round is not installed" in library and "[quant]'" in library
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [("lite", "auto_awq"), ("convert",)], ids=" ".join)
def test_an_artifact_that_cannot_be_written(
    command: tuple[str, ...], tool: Any, tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    option = "--dst-path" if command == ("convert",) else "--work-dir"
    done = tool(*command, tiny_models("llama"), option, tmp_path / "file" / "out")
    assert done.returncode in (1, 2) and done.stdout == "" and "file" in done.stderr
    assert done.stderr.count("\n") == 1, "nothing was begun"


def test_what_engines_hand_prompts_over_by(tool: Any, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    start = ("serve", "api_server", "nosuch", "--role", "prefill", "--kv-transfer-address")
    told = refused_here(
        tool,
        (*start, "127.0.0.1:0", "--kv-transfer-key", tmp_path / "none"),
        (*start, "nowhere", "--kv-transfer-key", key),
        (*start, "127.0.0.1:0", "--kv-transfer-key", key, "--kv-transfer-cert", key),
    )
    for line, expected in zip(
        told,
        (
            f"--kv-transfer-key: {tmp_path / 'none'}: cannot be read",
            "--kv-transfer-address: expected HOST:PORT, such as 10.0.0.4:23400, found 'nowhere'",
            "--kv-transfer-cert: expected a file with a certificate and its key (PEM), without a password, found",
        ),
        strict=True,
    ):
        assert expected in line


def test_a_port_that_is_taken(tool: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = tool("serve", "api_server", "nosuch", "--server-port", port)
    assert done.returncode == 1 and f"--server-port {port}: in use" in done.stderr
    assert done.stderr.count("\n") == 1
