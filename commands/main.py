"""The ``tool`` command: finds the subcommand, loads it alone, and turns errors into one line and an exit code.

A subcommand's module is imported only when it is run, so that ``tool --help`` stays instant.
"""

from __future__ import annotations

import errno
import os
import re
import select
import sys
from importlib import import_module
from traceback import walk_tb
from typing import Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from toolkit import __version__
from toolkit.base import extras
from toolkit.commands.app import aliases
from toolkit.commands.app.config_file import expanded
from toolkit.commands.app.groups import Group, new_app
from toolkit.commands.app.interrupt import INTERRUPTED, Watch
from toolkit.commands.app.own_families import name_families, raised_in
from toolkit.commands.app.plain_values import spare
from toolkit.errors import ToolkitError

# name -> (one line of help, panel). A module with `app` is a group of commands, one with `run` a single command.
COMMANDS = {
    "pull": ("Fetch a model and print where it lies.", "Make"),
    "lite": ("Quantize: auto_awq, auto_gptq, auto_round, smooth_quant …", "Make"),
    "convert": ("Pack a checkpoint into an engine artifact that starts in milliseconds.", "Make"),
    "chat": ("Talk to a model in the terminal.", "Run"),
    "serve": ("Serve models: api_server speaks OpenAI's API, proxy joins servers.", "Run"),
    "deploy": ("Write what runs a model elsewhere: docker, k8s, systemd, other engines.", "Run"),
    "batch": ("Answer a file of requests, or of rows (CSV, Parquet) by a template.", "Run"),
    "embed": ("Turn a file of texts into vectors: .npy, Parquet or JSON lines.", "Run"),
    "profile": ("Measure speed: throughput, generation, api_server.", "Measure"),
    "plan": ("Plan a fleet: how many engines a load needs, and what they cost.", "Measure"),
    "eval": ("Measure quality: ppl, compare.", "Measure"),
    "parse": ("Show the message that a model's raw answer is: thoughts, text, tool calls.", "Look"),
    "render": ("Show the prompt that a chat template makes of messages.", "Look"),
    "inspect": ("Show what a model directory is and where it came from.", "Look"),
    "cache": ("List or clear the models packed for this processor.", "Look"),
    "list": ("List built-in chat templates, or models.", "Look"),
    "check_env": ("Show what runs on this machine, and test it.", "Look"),
}


def _load(name: str) -> Any:
    """Import the module behind ``name`` and return its command."""
    module = import_module(f"toolkit.commands.{name}")
    app = getattr(module, "app", None)
    if app is None:
        app = new_app()
        app.command(name=name)(module.run)
    command = typer.main.get_command(app)
    command.name = name
    spare(command)
    return command


# Options that take several values, and what each of these looks like.
SEVERAL = {
    "--adapters": r"[^=]+=.*",
    "--goodput": r"\w+:[^/]*",  # not the address that may follow
    "--allow-methods": r"[A-Z]+|\*",
    "--cudagraph-capture-batch-sizes": r"\d+",
}
_FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)  # else it is a text that begins with dashes


class LazyGroup(Group):
    """Lists subcommands from ``COMMANDS``; imports one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        name = cmd_name.replace("-", "_")
        if name not in COMMANDS:
            return None
        help_line, panel = COMMANDS[name]
        return TyperCommand(name, help=help_line, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and command.name is not None:
            command = _load(command.name)
        return name, command, rest


app = new_app(
    cls=LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # those of all commands
)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", "-v", help="Print version, commit and build, and exit."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error (works after any command)."),
    custom_module_map: str = typer.Option(
        None,
        "--custom-module-map",
        metavar="FILE",
        help="Run this Python file: it holds a model family of yours (docs/add-a-model.md; works after any command).",
    ),
) -> None:
    """Make large language models small and fast, and serve them: quantize → convert → run.

    MODEL is a local directory, a Hugging Face id, a .gguf file, one of our artifacts, or `demo`.
    """
    if version:
        from toolkit.base.build_info import build_info

        print(f"tool {__version__} ({build_info()})")
        raise typer.Exit


def _whole() -> Any:
    """``tool`` itself, as a command."""
    command = typer.main.get_command(app)
    spare(command)
    return command


def normalise(argv: list[str]) -> tuple[list[str], bool]:
    """Spell flags as the commands do, up to a bare ``--``, and take ``--debug`` out.

    ``--work_dir`` is ``--work-dir``; ``--adapters a=x b=y`` is ``--adapters a=x --adapters b=y``, and so is it with
    the other options of SEVERAL; other tools' words get our names (``aliases.py``). A file of options becomes them
    (``config_file.py``); raises UsageError for one that cannot.
    """
    out: list[str] = []
    debug = bool(os.environ.get("TOOLKIT_DEBUG"))
    argv = expanded(aliases.spelled_here(argv), lambda: _load("serve").commands["api_server"].params)
    ours = aliases.of_command(argv)
    last, values = "", 0  # the flag that stands before, and how many values it has had
    for i, arg in enumerate(argv):
        if arg == "--":
            return out + argv[i:], debug
        if arg == "--debug":
            debug = True
        elif _FLAG.fullmatch(arg):
            name, eq, value = arg.partition("=")
            last, values = name.replace("_", "-"), bool(eq)
            last = ours.get(last, last)
            out.append(last + eq + value)
        else:
            last = "" if arg.startswith("-") else last  # a short flag: what follows is its value
            more = values > 0 and last in SEVERAL and re.fullmatch(SEVERAL[last], arg) is not None
            out += [last, arg] if more else [arg]
            values += 1
    return out, debug


def _explain(error: BaseException) -> tuple[str, int]:
    """One line and the exit code for an exception that ended a command."""
    if isinstance(error, ToolkitError):
        return str(error), error.exit_code
    if isinstance(error, TyperException) and hasattr(error, "format_message"):
        from toolkit.configs.lmdeploy import flag_of

        ctx, option = getattr(error, "ctx", None), getattr(error, "option_name", "")
        if ctx is None or not hasattr(error, "possibilities"):  # any other misuse than an unknown option
            text = error.format_message()
        elif option not in aliases.INSTEAD and (here := flag_of(option)) is not None:
            text = f"{error.message}; did you mean {here}?"
        else:
            own = [name for parameter in ctx.command.params for name in (*parameter.opts, *parameter.secondary_opts)]
            text = error.message + aliases.option_meant(option, ctx.command_path.split()[1:], own)
        return text.rstrip(".") + (f" (see: {ctx.command_path} --help)" if ctx else ""), 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error.filename or 'the target'}: the disk is full; free some space and run the command again", 1
    if isinstance(error, MemoryError):
        return "out of memory; try a smaller --session-len, --max-batch-size or --batch-size", 1
    if isinstance(error, OSError):
        return f"{error.filename or type(error).__name__}: {error.strerror or error}", 1
    if isinstance(error, ModuleNotFoundError) and (told := extras.explain(error)):
        return told, 1
    text = str(error).strip()
    if (place := raised_in(error)) is not None:
        return f"{place}: {type(error).__name__}: {text or 'no message'} (--debug shows the traceback)", 2
    return f"internal error, {type(error).__name__}: {text or 'no message'} (--debug shows the traceback)", 1


def _after_broken_pipe(left: SystemExit, error: BrokenPipeError) -> int:
    """The exit code where Typer or Rich left for ``error``, without a word. Where the reader of our output went away
    (`tool … | head`) there is nothing to say, and nobody to say it to; another pipe that broke is a failure as any."""
    *_, (frame, _) = walk_tb(left.__traceback__)
    if frame.f_globals["__name__"].startswith("rich."):  # it writes nowhere else
        return 0
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLERR)
    if output.poll(0):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    message, code = _explain(error)
    print(f"tool: error: {message}", file=sys.stderr)
    return code


def main(argv: list[str] | None = None) -> None:
    """Run ``tool`` with ``argv`` (default: the process's) and exit: 0 done, 1 failure, 2 misuse, 130 interrupted."""
    code: Any = 0
    watch, debug = Watch(), False
    try:
        args, debug = normalise(sys.argv[1:] if argv is None else argv)
        code = _whole()(args=name_families(args), prog_name="tool", standalone_mode=False)
        if code == INTERRUPTED:  # that is how Typer hands on a KeyboardInterrupt
            watch.tell()
    except (KeyboardInterrupt, typer.Abort):
        watch.tell()
        code = INTERRUPTED
    except SystemExit as left:
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        code = _after_broken_pipe(left, left.__context__)
    except Exception as e:
        if type(e).__name__ == "NoArgsIsHelpError":  # Typer has printed the help already
            sys.exit(2)
        if watch.came():
            watch.tell()
            sys.exit(INTERRUPTED)
        if debug and not isinstance(e, TyperException):  # what was typed explains those
            raise
        message, code = _explain(e)
        print("tool: error: " + " ".join(message.split()), file=sys.stderr)
    if code != INTERRUPTED:
        watch.close()
    sys.exit(code if isinstance(code, int) else 0)
