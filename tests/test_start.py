"""What a command does without until it answers: modules that take longer to import than the rest of its work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from toolkit.commands.main import COMMANDS, _load
from toolkit.convert.convert import convert

TOGETHER = "torch transformers datasets safetensors gguf xgrammar triton huggingface_hub pydantic markdown_it "
TOGETHER += "pygments rich.markdown rich.traceback"
# To render a help no model, no network and no template is needed …
OF_HELP = f"{TOGETHER} numpy jinja2 tokenizers asyncio ssl psutil importlib.metadata toolkit.engine toolkit.models"
# … and to answer a text no picture, no URL, no Jinja, no event loop, no other machine in this process.
OF_CHAT = f"{TOGETHER} jinja2 psutil http.client urllib.request numpy.ma toolkit.artifacts.gguf.export toolkit.serve "
OF_CHAT += "asyncio ssl toolkit.parallel.nodes toolkit.engine.cache.kept multiprocessing orjson csv statistics "
OF_CHAT += "importlib.resources rich.table rich.status toolkit.parsers.registry toolkit.vision.eyes "
OF_CHAT += "toolkit.engine.process.process_loop toolkit.engine.constraints.grammar_format toolkit.engine.drafts.model "
OF_CHAT += "toolkit.artifacts.formats toolkit.artifacts.adapters.adapter toolkit.artifacts.output.stage "
OF_CHAT += "toolkit.runners.native.towers.encoders toolkit.artifacts.text.tokenizer_pieces"
RUN = """
import json, sys
from toolkit.commands.main import main
arguments, forbidden, light = json.loads(sys.argv[1])
if not light:
    import typer.rich_utils
try:
    main(arguments)
except SystemExit as end:
    code = end.code
there = [name for name in forbidden if name in sys.modules]
print(json.dumps([code, there]), file=sys.stderr)
"""

TEXTS: dict[Any, tuple[str, ...]] = {
    str: ("a text", "7"),
    int: ("7", "-1", "0", "007", "99999999", "9" * 30, "1.5", "1_000", "+4", " 3", "٣", "a text", ""),
    float: ("7", "-1", "0.25", "-0", "1e3", ".5", "1.", "nan", "inf", "+4", "٣", "0." + "1" * 30, "a text", ""),
}


def ran(*arguments: object, forbidden: str = "", light: bool = True) -> tuple[str, int, list[str]]:
    """What a command writes, its exit code, and which of the modules it has imported that are not for it."""
    told = json.dumps([list(map(str, arguments)), forbidden.split(), light])
    command = [sys.executable, "-P", "-c", RUN, told]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500)
    code, there = json.loads(done.stderr.splitlines()[-1])
    return done.stdout, code, there


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "-h"], ["lite", "auto_awq", "--help"]], ids=" ".join)
def test_a_help_needs_nothing_heavy_and_is_the_one_that_typer_renders(arguments: list[str]) -> None:
    forbidden = OF_HELP if arguments == ["--help"] else TOGETHER
    text, code, there = ran(*arguments, forbidden=forbidden)
    assert (code, there) == (0, [])
    assert text == ran(*arguments, light=False)[0] != ""


def test_a_chat_that_cannot_begin_has_imported_nothing_to_run_it(tmp_path: Path) -> None:
    given = ["chat", tmp_path / "nothing", "--prompt", "Hi", "--top-p", "0.9", "--max-new-tokens", "20"]
    assert ran(*given, forbidden=OF_CHAT) == ("", 2, [])
    assert ran(*given, "--top-k", "+4", forbidden=TOGETHER)[1:] == (2, ["pydantic"])  # more than digits


def test_one_answer_needs_nothing_heavy(tiny_models: Any, tmp_path: Path) -> None:
    path = convert(str(tiny_models("llama")), tmp_path / "engine").path
    text, code, there = ran("chat", path, "--prompt", "Name three colours.", forbidden=OF_CHAT)
    assert (code, there) == (0, []) and text


BUILT = """
from pydantic import BaseModel
import toolkit.serve.run

def kinds(base):
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)

made = [kind for kind in kinds(BaseModel) if kind.__module__.startswith("toolkit.")]
print(len(made), *(kind.__qualname__ for kind in made if kind.__pydantic_complete__))
"""


def test_a_server_that_nobody_has_asked_has_made_nothing_that_checks_bodies() -> None:
    """What pydantic makes of 170 classes took a fifth of the time until a server was ready."""
    done = subprocess.run([sys.executable, "-P", "-c", BUILT], capture_output=True, text=True, timeout=500, check=True)
    count, *built = done.stdout.split()
    assert int(count) > 100 and not built


@pytest.mark.parametrize("name", COMMANDS)
def test_values_are_those_that_typer_converts(name: str) -> None:
    """Of every option that is not given, and of a text for each that takes one; numbers in and out of range."""

    def value(parameter: Any, context: typer.Context, given: Any) -> Any:
        try:
            made = parameter.process_value(context, given)
        except typer.BadParameter as error:
            return str(error)
        return repr(made)  # nan is no nan

    def values(command: Any, context: typer.Context) -> dict[str, list[Any]]:
        return {
            parameter.name: [
                value(parameter, context, given)
                for given in (parameter.get_default(context), *TEXTS.get(parameter.type_descriptor.annotation, ()))
                if not (parameter.required and given is None)
            ]
            for parameter in command.get_params(context)
        }

    def compare(ours: Any, theirs: Any) -> int:
        assert values(ours, typer.Context(ours)) == values(theirs, typer.Context(theirs))
        inner = getattr(theirs, "commands", {})
        return 1 + sum(compare(ours.commands[name], command) for name, command in inner.items())

    ours, theirs = _load(name), _unspared(name)
    assert compare(ours, theirs) >= 1


def _unspared(name: str) -> Any:
    """The command as Typer makes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.commands.main.spare", lambda command: None)
        return _load(name)
