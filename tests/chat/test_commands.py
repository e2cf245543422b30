"""``tool chat`` in pipes and ``tool list``, as a shell runs them."""

from __future__ import annotations

import fcntl
import io
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.template import ChatTemplate
from toolkit.commands.main import main
from toolkit.errors import UsageError
from toolkit.models import registry


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """``tool ARGS`` in this process; ``text`` is piped into it."""

    def run(*args: str, text: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        with pytest.raises(SystemExit) as left:
            main(list(args))
        captured = capsys.readouterr()
        return Done(int(left.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> str:
    return str(tiny_models("llama"))


@pytest.fixture(scope="module")
def expected(model: str) -> str:
    """What transformers answers to "the fox", greedily, in 8 tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    tok = Tokenizer.open(model)
    ids = ChatTemplate.open(tok, model).encode("the fox")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()
    return tok.decode(made[len(ids) :])


QUICK = ("--max-new-tokens", "8", "--dtype", "float32", "--session-len", "256")


def test_prompt_gives_the_answer_alone_on_standard_output(model: str, expected: str) -> None:
    """As a shell runs it, in a process of its own, from another folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "toolkit", "chat", model, *QUICK, "--prompt", "the fox"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == expected.rstrip("\n")
    assert "token" in done.stderr


def test_piped_input_is_a_prompt_too(tool: Callable[..., Done], model: str, expected: str) -> None:
    done = tool("chat", model, *QUICK, text="the fox\n")
    assert (done.code, done.out.rstrip("\n")) == (0, expected.rstrip("\n"))


def test_piped_input_goes_before_the_prompt(tool: Callable[..., Done], model: str, monkeypatch: Any) -> None:
    from toolkit.commands import chat

    asked: list[str] = []
    monkeypatch.setattr(chat, "answer_once", lambda model, talk, question: asked.append(question))
    tool("chat", model, *QUICK, "-p", "the fox", text="A fable.\nOf animals.\n")
    tool("chat", model, *QUICK, "-p", "the fox", text="")
    assert asked == ["A fable.\nOf animals.\n\nthe fox", "the fox"]


def test_a_standard_input_that_is_closed_has_no_question(monkeypatch: Any) -> None:
    from toolkit.commands import chat

    monkeypatch.setattr("sys.stdin", None)
    assert chat.read_question("the fox") == "the fox"
    with pytest.raises(UsageError, match="standard input: expected a question"):
        chat.read_question(None)


def test_a_standard_input_that_never_ends_is_told(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a script's loop that reads its own lines, or under a supervisor that holds the pipe open."""
    from toolkit.commands import chat

    reading, writing = os.pipe()
    monkeypatch.setattr("sys.stdin", os.fdopen(reading, encoding="utf-8"))
    monkeypatch.setattr(chat, "PATIENCE", 0.01)
    chat._say_what_is_awaited()
    assert "reading standard input" in capsys.readouterr().err
    os.write(writing, b"words")
    os.close(writing)
    chat._say_what_is_awaited()
    assert capsys.readouterr().err == "" and chat.read_question("the fox") == "words\n\nthe fox"


def test_a_chat_is_planned_for_one_and_says_one_line(tool: Callable[..., Done], model: str, monkeypatch: Any) -> None:
    from toolkit.chat import terminal
    from toolkit.commands import chat

    plans: list[Any] = []
    monkeypatch.setattr(chat, "read_question", lambda prompt: None)
    monkeypatch.setattr("toolkit.chat.repl.Repl.run", lambda self, read: plans.append(self.model.engine.plan))
    monkeypatch.setattr(terminal, "reader", lambda *args: None)
    done = tool("chat", model, *QUICK)
    assert done.code == 0 and plans[0].max_batch_size == 1
    (line,) = done.out.splitlines() + done.err.splitlines()
    assert line.startswith(f"{model} on cpu, at most ") and "/help" in line
    tool("chat", model, *QUICK, "--max-batch-size", "3")
    assert plans[1].max_batch_size == 3


def test_notices_are_plain_lines(model: str, expected: str) -> None:
    command = [sys.executable, "-m", "toolkit", "chat", model, *QUICK[:-1], "100000", "--prompt", "the fox"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd="/")
    assert done.stdout.rstrip("\n") == expected.rstrip("\n")
    notice, speed = done.stderr.splitlines()
    assert notice == "session_len 100000 is beyond the 512 positions that the model states"
    assert speed.startswith("8 tokens, ")


def test_flags_reach_the_model(tool: Callable[..., Done], model: str, expected: str) -> None:
    hot = ("chat", model, *QUICK, "-p", "the fox", "--temperature", "1.5", "--seed")
    one, other, again = (tool(*hot, seed).out for seed in ("1", "2", "1"))
    assert one != other and one == again
    assert tool("chat", model, *QUICK, "-p", "the fox", "--chat_template", "vicuna").out.strip() != expected.strip()
    assert tool("chat", model, *QUICK, "-p", "the fox", "--system", "Be odd.").out.strip() != expected.strip()


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["-p", ""], "--prompt"),
        (["-p", "caf\udce9"], "--prompt: expected UTF-8 text, found byte 0xe9"),
        (["-p", "x", "--temperature", "3"], "--temperature:"),
        (["-p", "x", "--top-p", "-1"], "--top-p:"),
        (["-p", "x", "--max-new-tokens", "0"], "--max-new-tokens:"),
        (["-p", "x", "--backend", "tensorrt"], "--backend"),
        (["-p", "x", "--chat-template", "no-such"], "no-such"),
        (["-p", "x", "--chat-template", "/no/such.jinja"], "/no/such.jinja"),
        (["-p", "x", "--no-such-flag"], "--no-such-flag"),
        ([], "standard input"),
    ],
)
def test_misuse_is_one_line_and_exit_2(tool: Callable[..., Done], model: str, args: list[str], names: str) -> None:
    done = tool("chat", model, *args)
    assert (done.code, done.out) == (2, "")
    assert names in done.err and done.err.strip().count("\n") == 0


def test_a_request_that_fails_is_exit_1(tool: Callable[..., Done], model: str) -> None:
    done = tool("chat", model, *QUICK, "-p", "word " * 3000)
    assert (done.code, done.out) == (1, "")
    assert "256" in done.err


def test_a_hostile_template_is_one_line(tool: Callable[..., Done], model: str, tmp_path: Path) -> None:
    file = tmp_path / "evil.jinja"
    file.write_text("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    done = tool("chat", model, *QUICK, "-p", "x", "--chat-template", str(file))
    assert done.code == 1 and "processor time" in done.err and done.err.strip().count("\n") == 0


def test_an_interrupt_ends_the_one_answer(model: str) -> None:
    long = ("--ignore-eos", "--max-new-tokens", "100000", "--session-len", "100000")
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "chat", model, "-p", "x", *long],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 130 and b"Traceback" not in err


def test_list_shows_the_templates(tool: Callable[..., Done]) -> None:
    done = tool("list")
    assert done.code == 0 and "vicuna" in done.out and "llama3_1" in done.out
    rows = json.loads(tool("list", "--json", "-").out)
    assert {"name", "aliases", "for_models_like"} == set(rows[0])
    done = tool("list", "--json", "-", "models")  # of the templates, or of the models?
    assert done.code == 2 and "tool list models --json -" in done.err and done.out == ""


def test_list_models_comes_from_the_registry(tool: Callable[..., Done]) -> None:
    done = tool("list", "models")
    assert done.code == 0
    assert all(family.name in done.out for family in registry.families())
    known = {name for family in registry.families() for name in family.architectures}
    rows = {row["architecture"]: row for row in json.loads(tool("list", "models", "--json", "-").out)}
    assert set(rows) == known
    assert all(
        {"hf", "awq", "gguf"} <= set(rows[f"{x}ForCausalLM"]["formats"]) for x in ("Llama", "Qwen3Moe", "Mixtral")
    )
    assert rows["InternLM2ForCausalLM"]["gguf"] == "llama", "as which its GGUF files come back"
    assert {"gguf"} <= set(rows["LlavaForConditionalGeneration"]["formats"])
    other = rows["MllamaForConditionalGeneration"]
    assert "gguf" not in other["formats"] and other["no_gguf"]


def test_a_session_on_a_terminal(model: str, tmp_path: Path) -> None:
    """A real pseudo-terminal: ask, interrupt an endless answer with Ctrl-C, ask again, leave."""
    import pty

    leader, follower = pty.openpty()
    extra = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "TOOLKIT_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "chat", model, "--session-len", "100000", "--max-new-tokens", "6"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=os.environ | extra,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(follower)
    seen = ""

    def until(text: str, length: int = 0) -> None:
        """Read what is shown until ``text`` comes, and so much more; what lies before it is gone then."""
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen or len(seen) < length:
            assert time.monotonic() < end, f"no {text!r} in {seen!r}"
            if select.select([leader], [], [], 1)[0]:
                seen += os.read(leader, 65536).decode(errors="replace")
        seen = seen.partition(text)[2]

    def say(text: str) -> None:
        os.write(leader, text.encode())

    try:
        until("/help")  # one word: where lines wrap depends on how long the folder's name is
        until("> ")
        say("the fox\r")
        until("6 tokens")
        until("> ")
        say("/set max_new_tokens 90000\r")
        until("max_new_tokens = 90000")
        say("/set ignore_eos true\r")
        until("ignore_eos = True")
        say("again\r")
        until("again", 5000)  # in the middle of the answer
        say("\x03")
        until("stopped")
        say("/clear\r")
        until("forgotten")
        say("/set max_new_tokens 5\r")
        until("max_new_tokens = 5")
        say("more\r")
        until("5 tokens")
        say("exit\r")
        assert process.wait(timeout=200) == 0
    finally:
        process.kill()
        os.close(leader)
