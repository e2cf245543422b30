"""What README and the guide's first page show is run as it stands, on the demo model; so are --help's examples, on a
small one."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.commands.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]  # a busy machine takes long to quantize
TOOL = [sys.executable, "-P", "-m", "toolkit"]
SERVER = "23333"  # the port that the pages name; another one is used here


NO_USE = {  # refused there, or more than the tiny encoder takes
    "lite blocked_fp8": "--calib",
    "lite mxfp4": "--calib",
    "lite calibrate": "--eval",
    "embed": "--session-len",
    "profile embeddings": "--session-len",
}


class Shell:
    """Runs shown commands one after another in one directory; a server that is started stays until the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[subprocess.Popen[str]] = []
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = str(s.getsockname()[1])

    def run(self, words: list[str]) -> str:
        words = [word.replace(SERVER, self.port) for word in words]
        if words[:2] == ["serve", "api_server"]:
            return "" if self.servers else self._serve(words)
        done = subprocess.run(
            [*TOOL, *words], cwd=self.folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, (words, done.stderr[-2000:])
        return done.stdout

    def python(self, code: str) -> str:
        code = code.replace(SERVER, self.port)
        done = subprocess.run([sys.executable, "-P", "-c", code], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, (code, done.stderr[-2000:])
        return done.stdout

    def _serve(self, words: list[str]) -> str:
        server = subprocess.Popen(
            [*TOOL, *words, "--server-port", self.port], cwd=self.folder, stderr=subprocess.PIPE, text=True
        )
        self.servers.append(server)
        assert server.stderr is not None
        for line in server.stderr:
            if "The server is ready" in line:
                return line
        raise AssertionError(f"{words}: the server left with {server.wait()}")

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
            assert server.wait(60) == 0


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("shown")
    (folder / "notes.txt").write_text("The harbour was quiet, and nobody asked where the boats had gone. " * 400)
    shell = Shell(folder)
    yield shell
    shell.close()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_page_is_true_as_pasted(page: str, shell: Shell, support: Any) -> None:
    shown = support("examples")
    text, ran = shown.ROOT / page, 0
    for block in shown.blocks(text, "sh"):
        for words in shown.lines(block):
            if words[0] == "tool":
                out, ran = shell.run(words[1:]), ran + 1
                if words[1] == "chat" or "api_client" in words:
                    assert "Paris" in out, words
    assert ran >= 5
    for block in shown.blocks(text, "python"):
        assert "Paris" in shell.python(block)


@pytest.fixture(scope="module")
def examples(support: Any) -> list[list[str]]:
    shown = support("examples")
    return [example[1:] for _, command in shown.commands() for example in shown.examples(command)]


def test_examples_of_help_run(
    examples: list[list[str]], tiny_models: Any, tmp_path: Path, support: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``demo`` is a tiny model here, text and steps are few; the rest is as shown."""
    shown = support("examples")
    known = {" ".join(words): shown.options(command) for words, command in shown.commands()}
    (tmp_path / "book.txt").write_text("The harbour was quiet, and nobody asked where the boats had gone. " * 100)
    little = {
        "--calib-dataset": "book.txt", "--calib-samples": "4", "--calib-seqlen": "32", "--eval-tokens": "128",
        "--tokens": "1024", "--steps": "4", "--window": "64",
        "--random-input-len": "8", "--random-output-len": "4", "--session-len": "2048",
    }  # fmt: skip
    changed = {
        "--iters": "1",
        "--prompt-tokens": "8",
        "--completion-tokens": "4",
        "--num-prompts": "4",
        "--lengths": "300",
    }
    monkeypatch.chdir(tmp_path)
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": asked})
    )
    (tmp_path / "in.csv").write_text("text\nHello\n")
    (tmp_path / "docs.jsonl").write_text('{"text": "The harbour was quiet."}\n')
    (tmp_path / "docs.csv").write_text("id,title,body\n1,Boats,Nobody asked where they had gone.\n")
    model = tiny_models("llama", max_position_embeddings=4096)
    stands_for = {"demo": str(model), "MODEL": str(model), "bge-m3": str(tiny_models("bert"))}
    support("adapters").write_adapter(tmp_path / "ADAPTER", model, "q_proj|v_proj")
    made = {"pull": 0, "lite": 1, "convert": 2}  # what others read is made first
    for words in sorted(examples, key=lambda words: made.get(words[0], 3)):
        command = next(name for name in (" ".join(words[:2]), words[0]) if name in known)
        if command.startswith(("serve", "plan")) or "<" in words or "lm_eval" in words:
            continue  # the pages start one; what was measured, standard input and a harness are not here
        words = [stands_for.get(word, word) for word in words]
        words = [changed.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        here = {o for o in known[command] - set(words) if not o.startswith(NO_USE.get(command, "none"))}
        more = [word for option, value in little.items() if option in here for word in (option, value)]
        if "--stride" in known[command]:
            more += ["--stride", "64"]
        (tmp_path / "out.jsonl").unlink(missing_ok=True)  # of another example: nothing is written over
        with pytest.raises(SystemExit) as left:
            main([*words, *more])
        assert not left.value.code, (words, more)


def test_help_in_a_pipe_that_closes() -> None:
    done = subprocess.run(
        f"{' '.join(TOOL)} lite auto_awq --help | head -1", shell=True, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "" and not re.search("\x1b", done.stdout)
