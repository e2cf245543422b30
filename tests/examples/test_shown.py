"""Commands, options and Python that README, docs and --help show exist, and help can be read everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from toolkit.commands.app.aliases import ALIASES
from toolkit.commands.main import main

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = {
    "--pure",
    "--args",
    "--tasks",
    "--model_args",
    "--include_path",
    "--apply_chat_template",
    "--build",
    "--build-arg",
    "--gpus",
    "--ipc",
    "--net",
    "--user",
    "--no-python",
    "--now",
    "--nproc-per-node",
    "--print",
    "--push",
    "--rm",
    "--set",
    "--shm-size",
    "--standalone",
    "--address",
    "--head",
    "--http-port",
    "--router-mode",
}  # llama.cpp, gdb, lm-eval, docker, helm, torchrun, systemctl, ray, Dynamo
SHOWN = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]")


@pytest.fixture(scope="module")
def shown(support: Any) -> Any:
    return support("examples")


@pytest.fixture(scope="module")
def known(shown: Any) -> dict[str, set[str]]:
    """Options by command."""
    return {" ".join(words): shown.options(command) for words, command in shown.commands()}


def command_of(words: list[str], known: dict[str, set[str]]) -> str | None:
    """The command that a command line means, by the names in it."""
    names = [word.replace("-", "_") for word in words[:2]]
    return next((name for name in (" ".join(names), names[0]) if name in known), None) if names else None


def unknown_options(words: list[str], known: dict[str, set[str]]) -> list[str]:
    """Options of a `tool …` command line that its command does not have; the whole where the command does not exist."""
    found = command_of(words, known)
    if found is None:
        groups = {name.split()[0] for name in known}
        whole = words and (words[0].isupper() or words[0].startswith("-") or words[0].replace("-", "_") in groups)
        return [] if whole or not words else [" ".join(words)]
    given = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    return [f"{found} {option}" for option in given if option not in known[found]]


def test_commands_that_pages_show_exist_with_their_options(shown: Any, known: dict[str, set[str]]) -> None:
    wrong, count = [], 0
    for page in shown.PAGES:
        told = [words for block in shown.blocks(page, "sh", "bash", "console") for words in shown.lines(block)]
        told += [
            words for span in shown.spans(page) if span.startswith("tool ") for words in shown.lines(span.split("|")[0])
        ]
        for words in told:
            words = words[1:] if words[0] == "$" else words
            if words[0] in ("tool", ".venv/bin/tool"):
                count += 1
                wrong += [f"{page.relative_to(ROOT)}: {what}" for what in unknown_options(words[1:], known)]
    assert count > 30 and not wrong, wrong


def test_command_lines_that_pages_show_are_understood(shown: Any) -> None:
    """By the commands themselves: their arguments, options and the values of these."""
    wrong, count = [], 0
    for page in shown.PAGES:
        for words in shown.tool_lines(page):
            count += 1
            try:
                shown.parse(words)
            except Exception as error:
                wrong.append((page.name, words, str(error)))
    assert count > 40 and not wrong, wrong


def test_files_that_pages_name_exist(shown: Any) -> None:
    """Paths of the repository between backticks, and scripts that are called."""
    named = re.compile(r"(?<![\w./-])((?:tests|toolkit|kernels|scripts|commands|templates|deploy|docs)/[\w./-]*\w)")
    wrong = {
        (page.name, path)
        for page in shown.PAGES
        for text in [*shown.spans(page), *shown.blocks(page, "sh")]
        for path in named.findall(text)
        if not (ROOT / path).exists() and not path.endswith("triton/tuned")  # made by tuning
    }
    assert not wrong, wrong


def test_options_that_pages_name_exist(shown: Any, known: dict[str, set[str]]) -> None:
    ours = set().union(*known.values(), *ALIASES.values()) | FOREIGN
    scripts = [f for f in (ROOT / "scripts").rglob("*") if f.is_file() and f.suffix in ("", ".py")]
    builders = [*scripts, *(ROOT / "toolkit" / "runners" / "native").glob("build.py"), ROOT / "kernels/cuda/build.py"]
    builders.append(ROOT / "commands" / "main.py")  # options that any command takes
    ours |= {option for file in builders for option in SHOWN.findall(file.read_text(encoding="utf-8"))}
    wrong = {
        f"{page.relative_to(ROOT)}: {option}"
        for page in shown.PAGES
        for option in SHOWN.findall("\n".join([*shown.spans(page), *shown.blocks(page, "sh", "bash", "console")]))
        if option.replace("_", "-") not in ours and option not in ours
    }
    assert not wrong, sorted(wrong)


def test_python_that_pages_show_compiles(shown: Any) -> None:
    found = [(page, block) for page in shown.PAGES for block in shown.blocks(page, "python", "py")]
    assert len(found) > 3
    for page, block in found:
        compile(block, str(page), "exec")


def test_every_command_has_an_example_with_options_that_exist(shown: Any, known: dict[str, set[str]]) -> None:
    for words, command in shown.commands():
        told = shown.examples(command)
        for example in told:
            assert example[0] == "tool" and not unknown_options(example[1:], known), example
        assert told or words[0] in ("check_env", "list"), f"tool {' '.join(words)}: no example in its help"


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_help_fits_the_terminal_and_has_no_colours_in_a_pipe(
    columns: int, shown: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    for words, _ in [([], None), *shown.commands()]:
        with pytest.raises(SystemExit) as left:
            main([*words, "--help"])
        said = capsys.readouterr()
        assert not left.value.code and not said.err and "\x1b" not in said.out, words
        assert max(map(len, said.out.splitlines())) <= columns, words
        assert "Usage" in said.out and len(said.out) > 200
