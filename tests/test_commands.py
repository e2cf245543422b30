"""The command line as a user meets it, as far as that needs no model: help, early checks, exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from toolkit.commands import convert, lite_options
from toolkit.commands import main as commands
from toolkit.commands.main import main
from toolkit.commands.output import say_how_it_runs, table
from toolkit.serve import run as serve_run

COMMANDS = [
    ["chat"],
    ["serve", "api_server"],
    ["profile", "throughput"],
    ["profile", "generation"],
    ["eval", "ppl"],
]
ENGINE_FLAGS = """--backend --device --dtype --tp --pp --dp --ep
--nnodes --node-rank --dist-init-addr --session-len --max-batch-size --cache-max-entry-count
--cache-block-seq-len --enable-prefix-caching --no-enable-prefix-caching --quant-policy --model-format --chat-template
--max-prefill-token-num --target-step-ms --adapters --revision --download-dir""".split()


@pytest.fixture(scope="module")
def tool(support: Any) -> Any:
    """``tool ARGUMENTS`` on a terminal of so many ``columns``."""
    return lambda *args, columns=80: support("command").tool(*args, COLUMNS=str(columns), NO_COLOR="1")


def test_piped_bytes_that_are_no_text_are_refused_in_any_locale() -> None:
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "toolkit", "chat", "nosuch"]
    done = subprocess.run(command, input=b"what is \xff\xfe", capture_output=True, env=env, timeout=500)
    assert done.returncode == 2 and b"0xff" in done.stderr and b"UTF-8" in done.stderr


def test_tables_show_brackets_and_colons_as_they_are() -> None:
    out = io.StringIO()
    rows = [("a[b]", "pip install 'x[torch]' :rocket:")]
    Console(file=out, width=80).print(table("of [c]", ("[d]", "e"), rows))
    for word in ("of [c]", "[d]", "a[b]", "'x[torch]' :rocket:"):
        assert word in out.getvalue()


def test_a_model_is_named_as_it_is_while_it_loads(tool: Any) -> None:
    done = tool("chat", "no[/such]", "--prompt", "hello")
    assert done.returncode == 2 and "no[/such]" in done.stderr and "internal error" not in done.stderr


def refused(arguments: Iterable[str | Path], *words: str, code: int = 2) -> None:
    """The command says one line and leaves. It is run in this process: starting another is mostly imports."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert (left.value.code, out.getvalue()) == (code, ""), err.getvalue()
    assert err.getvalue().count("\n") == 1, err.getvalue()
    for word in words:
        assert word in err.getvalue()


@pytest.mark.parametrize("typed", [["nosuch"], ["inspect", "--nosuch"]])
def test_what_was_mistyped_is_told_in_a_line_with_debug_too(typed: list[str]) -> None:
    refused(["--debug", *typed], f"o such {'command' if len(typed) == 1 else 'option'}: {typed[-1]}")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_every_engine_flag_whole_at_80_columns(tool: Any, command: list[str]) -> None:
    text = tool(*command, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert [flag for flag in ENGINE_FLAGS if f"{flag} " not in text] == []


@pytest.mark.parametrize("command", ["lite auto_awq", "serve proxy"])
def test_help_cuts_no_word_at_80_columns(tool: Any, command: str) -> None:
    text = tool(*command.split(), "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and "..." not in text
    own = commands._load(command.split()[0]).commands[command.split()[1]].params
    names = [name for p in own if not p.hidden for name in (*p.opts, *p.secondary_opts) if name.startswith("--")]
    assert len(names) > 20 and [name for name in names if f"{name} " not in text] == []


def test_no_word_of_help_is_taken_for_markup() -> None:
    """``toolkit[gradio]`` would be shown without its brackets."""

    def texts(command: Any) -> Iterator[str]:
        yield from (text for text in [command.help, *(getattr(p, "help", None) for p in command.params)] if text)
        for inner in getattr(command, "commands", {}).values():
            yield from texts(inner)

    found = [text for name in commands.COMMANDS for text in texts(commands._load(name))]
    assert len(found) > 300
    assert [text for text in found if Text.from_markup(text).plain != text.replace(r"\[", "[")] == []


def test_table_of_models_keeps_its_words_whole_at_80_columns(tool: Any) -> None:
    lines = tool("list", "models").stdout.splitlines()
    assert lines[1].split() == "models model_type turbomind lite GGUF".split()
    assert any(line.split() == ["EXAONE", "4.0", "exaone4", "yes", "all", "exaone4"] for line in lines)


def test_models_can_be_read_in_a_narrow_window(tool: Any) -> None:
    lines = tool("list", "models", columns=40).stdout.splitlines()
    assert max(map(len, lines)) <= 40
    at = lines.index("EXAONE 4.0")
    assert (
        " ".join(lines[at + 1 : at + 3]).split() == "model_type exaone4, turbomind yes, lite all, GGUF exaone4".split()
    )


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != ["chat"] and c[0] != "serve"], ids=" ".join)
def test_a_file_that_cannot_be_written_is_refused_before_the_model_loads(command: list[str], tmp_path: Path) -> None:
    data = ["--data", __file__] if command == ["eval", "ppl"] else []
    refused([*command, "nosuch", *data, "--json", tmp_path / "no" / "x.json"], "--json", "directory that exists")
    refused([*command, "nosuch", *data, "--json", tmp_path], "--json", "directory that exists")


def test_a_picture_of_another_kind_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    refused(["lite", "mxfp4", "nosuch", "--plot", tmp_path / "x.xyz"], "--plot", "ends in .png")
    refused(["lite", "blocked_fp8", "nosuch", "--calib-samples", "8"], "--calib-samples", "no use for it")


REFUSED = {
    "two names, two values": (["auto_awq", "M", "--calib-samples", "8", "--nsamples", "9"], "--nsamples 9"),
    "GPTQ's flags without it": (["auto_awq", "M", "--preset", "fast", "--desc-act"], "--rounding gptq"),
    "no number of bits": (["search", "M", "--bits", "nan"], "--bits: expected"),
    "nothing to choose for": (
        ["search", "M", "--bits", "4.5", "--skip", ".", "--quantize-lm-head"],
        "no linear of a layer is left",
    ),
    "no group size": (["auto_gptq", "M", "--w-group-size=--5"], "found '--5'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_be_are_refused_in_one_line(name: str, tiny_models: Any, tmp_path: Path) -> None:
    arguments, words = REFUSED[name]
    model = tiny_models("llama")
    arguments = [str(model) if a == "M" else a for a in arguments]
    refused(["lite", *arguments, "--work-dir", tmp_path / "out"], words)
    assert not (tmp_path / "out").exists()


def test_a_run_ends_with_the_error_by_layer_and_what_the_model_lost(
    tool: Any, tiny_models: Any, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike; every unhappy family is unhappy in its own way. " * 40)
    quick = ["--calib-dataset", text, "--calib-samples", "4", "--calib-seqlen", "32", "--eval-tokens", "128"]
    figures = tmp_path / "figures.json"
    done = tool("lite", "auto_gptq", tiny_models("llama"), "--work-dir", tmp_path / "out", *quick, "--json", figures)
    assert done.returncode == 0, done.stderr
    by_layer, _, summary = done.stdout.partition("Quantized")
    assert "perplexity after" in summary and "bits per weight" in summary
    linears = json.loads(figures.read_text())["quality"]["layers"]
    for layer in {x["name"].split(".")[2] for x in linears}:
        errors = {x["name"]: x["rel_error"] for x in linears if f".layers.{layer}." in x["name"]}
        worst = max(errors, key=errors.__getitem__)
        row = next(line for line in by_layer.splitlines() if line[1:].split()[:1] == [layer])
        assert f"{100 * errors[worst]:.1f} %" in row and worst.partition(f".{layer}.")[2] in row
        assert f"{100 * sum(errors.values()) / len(errors):.1f} %" in row


def test_what_to_type_next_is_quoted_where_a_shell_needs_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lite_options.say_next("tool", "convert", Path("my model"), "--dst-path", "my model-engine")
    assert capsys.readouterr().out == "next: tool convert 'my model' --dst-path 'my model-engine'\n"
    assert convert._next(tmp_path / "a b.gguf", 1, False) == ("try it", f"tool chat '{tmp_path / 'a b.gguf'}'")


def test_a_reader_that_leaves_is_no_failure() -> None:
    command = f"set -o pipefail; {sys.executable} -m toolkit list --json - | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed, shown", [(">&-", False), ("2>&-", True), ("<&- >&- 2>&-", False)])
def test_streams_that_are_closed_lead_nowhere(closed: str, shown: bool) -> None:
    command = ["bash", "-c", f"{sys.executable} -m toolkit list {closed}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, bool(done.stdout), done.stderr) == (0, shown, "")


def test_a_standard_input_that_is_closed_is_an_empty_one() -> None:
    command = ["bash", "-c", f"{sys.executable} -m toolkit render --template chatml <&-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "") and "standard input: expected JSON messages" in done.stderr


@pytest.mark.parametrize("typed", [["--help"], ["list", "models"], ["inspect"]])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_an_encoding_lacks_is_escaped(
    typed: list[str], encoding: str, tiny_models: Callable[[str], Path], tmp_path: Path
) -> None:
    """As on a terminal whose locale is not UTF-8, and with a name that is no UTF-8."""
    if typed == ["inspect"]:
        name = tmp_path / os.fsdecode(b"m\xc3\xbcde\xff")
        name.symlink_to(tiny_models("llama"))
        typed = ["inspect", str(name)]
    env = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-m", "toolkit", *typed], capture_output=True, env=env, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"") and len(done.stdout.splitlines()) > 10
    assert "→" in done.stdout.decode(encoding) or encoding != "utf-8" or typed != ["--help"]


def test_another_pipe_that_breaks_is_one(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("toolkit.chat.builtin.load", fail)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # Typer puts something else there
    with pytest.raises(SystemExit) as left:
        main(["list"])
    assert left.value.code == 1 and capfd.readouterr().err == "tool: error: BrokenPipeError: Broken pipe\n"


def test_a_method_without_calibration_offers_no_text_for_it(tool: Any) -> None:
    text = tool("lite", "mxfp4", "--help").stdout
    assert "calib" not in text.replace("no calibration", "") and "AWQ with" not in text and "--eval-tokens" in text
    assert "--calib-dataset" in tool("lite", "kv", "--help").stdout
    refused(["lite", "mxfp4", "nosuch", "--calib-dataset", "c4"], "--calib-dataset", "no use for it")
    refused(["lite", "search", "nosuch", "--calibration", "x"], "--calibration", "no use for it")


@pytest.mark.parametrize("much", [0.25, -1.0])
def test_who_has_lost_much_is_told(
    much: float, tool: Any, tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite_options, "MUCH", much)
    done = tool("lite", "mxfp4", tiny_models("llama"), "--work-dir", tmp_path / "out", "--eval-tokens", "128")
    assert done.returncode == 0, done.stderr
    assert ("warning: the perplexity rose by" in done.stderr) == (much < 0)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unknown_chat_template_is_refused_before_the_model_loads(command: list[str]) -> None:
    extra = ["--data", __file__] if command == ["eval", "ppl"] else []
    extra = ["--prompt", "x"] if command == ["chat"] else extra
    refused([*command, "nosuch", *extra, "--chat_template", "nope"], "'nope'", "tool list")


def test_prefix_caching_flags_that_contradict_each_other() -> None:
    both = ["--enable-prefix-caching", "--no-enable-prefix-caching"]
    refused(["chat", "nosuch", "--prompt", "x", *both], "--no-enable-prefix-caching", "one of them")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--adapters", "a=x", "--adapters", "b"], ("--adapters", "NAME=PATH", "'b'")),
        (["--adapters", "a=x", "--adapters", "a=y"], ("--adapters", "'a' twice")),
        (["--adapters", "a=nosuch/dir/x"], ("adapters: a:", "nosuch/dir/x")),
    ],
)
def test_adapters_that_cannot_be(flags: list[str], words: tuple[str, ...], tmp_path: Path) -> None:
    refused(["chat", tmp_path, "-p", "a", *flags], *words)


def test_limits_are_told_in_plain_numbers() -> None:
    refused(["chat", "nosuch", "--prompt", "x", "--session_len", "0"], "[1, 1073741824]")


def test_a_directory_of_another_kind_is_told_from_a_model_without_tokenizer(tmp_path: Path) -> None:
    refused(["chat", tmp_path, "--prompt", "x"], "config.json", code=1)


def test_an_error_is_one_line_where_a_progress_bar_would_be(tmp_path: Path) -> None:
    refused(["eval", "ppl", "nosuch", "--data", tmp_path / "none.txt"], "none.txt")
    refused(["profile", "throughput", "nosuch", "--dataset", tmp_path / "none.txt"], "none.txt")


def test_a_session_shorter_than_the_window_of_perplexity(tmp_path: Path) -> None:
    sizes = ["--session-len", "512", "--window", "1024"]
    refused(["eval", "ppl", "nosuch", "--data", __file__, *sizes], "--session-len 512", "--window")


@pytest.mark.parametrize(("told", "flags", "keys"), [("a,b", [], ["a", "b"]), ("a", ["--api-keys", "c"], ["c"])])
def test_keys_from_the_environment(
    told: str, flags: list[str], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(serve_run, "serve", lambda model, settings, **_: found.append(settings.api_keys))
    monkeypatch.setenv("TOOLKIT_API_KEYS", told)
    with pytest.raises(SystemExit) as left:
        main(["serve", "api_server", "model", *flags])
    assert left.value.code == 0 and found == [keys]


@pytest.mark.parametrize("told", ["", " ", "a,,b"])
def test_empty_keys_in_the_environment_open_no_server(
    told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_API_KEYS", told)
    with pytest.raises(SystemExit) as left:
        main(["serve", "api_server", "model"])
    assert left.value.code == 2 and "TOOLKIT_API_KEYS" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["inf", "nan", "3601"])
def test_a_grace_period_without_end(seconds: str) -> None:
    refused(["serve", "api_server", "nosuch", "--grace-period", seconds], "--grace-period")


def test_why_a_model_runs_otherwise_is_not_overlooked() -> None:
    """In a terminal it is marked; what is only worth knowing is not."""
    plan = SimpleNamespace(notices=("session_len reduced",))
    engine: Any = SimpleNamespace(runner_why="the [library] is stale; pytorch stands in", plan=plan)
    text = io.StringIO()
    say_how_it_runs(Console(file=text, force_terminal=True, color_system="standard", highlight=False), engine, "")
    first, second = text.getvalue().splitlines()
    assert first == "\x1b[1;33mthe [library] is stale; pytorch stands in\x1b[0m" and second == "session_len reduced"
