"""``tool chat``: talk to a model in the terminal, or get one answer in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.commands.options import EngineFlags, with_engine_flags
from toolkit.commands.output import show_engine, stderr
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.chat.conversation import Conversation
    from toolkit.chat.repl import Model

PANEL = "Sampling"


def _sampling(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PANEL)


@with_engine_flags
def run(
    model: Annotated[str, typer.Argument(help="Local directory, hub id, .gguf file, artifact, or demo.")],
    engine: EngineFlags,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this and leave; the answer alone is on stdout.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System text, instead of the chat template's own.")] = None,
    do_sample: Annotated[
        bool | None, _sampling("--do-sample/--greedy", help="Draw tokens, or take the likeliest. Default: the model's.")
    ] = None,
    temperature: Annotated[float | None, _sampling("--temperature", help="0 to 2; 0 is greedy.")] = None,
    top_p: Annotated[float | None, _sampling("--top-p", help="Keep the likeliest tokens of this mass.")] = None,
    top_k: Annotated[int | None, _sampling("--top-k", help="Keep this many likeliest tokens; 0 = all.")] = None,
    min_p: Annotated[
        float | None, _sampling("--min-p", help="Keep tokens of at least this share of the likeliest one's.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, _sampling("--repetition-penalty", help="Above 1 discourages repeats.")
    ] = None,
    presence_penalty: Annotated[
        float | None, _sampling("--presence-penalty", help="-2 to 2, once for every token used before.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, _sampling("--frequency-penalty", help="-2 to 2, for every time a token was used before.")
    ] = None,
    max_new_tokens: Annotated[int | None, _sampling("--max-new-tokens", help="Longest answer. Default: 512.")] = None,
    min_new_tokens: Annotated[int | None, _sampling("--min-new-tokens", help="Shortest answer.")] = None,
    keep: Annotated[
        int, typer.Option(min=0, metavar="<int>", help="Messages from the start that stay when the context is full.")
    ] = 0,
    seed: Annotated[int | None, _sampling("--seed", help="The same seed draws the same answer.")] = None,
    stop: Annotated[list[str] | None, _sampling("--stop", help="Text that ends the answer; repeatable.")] = None,
    ignore_eos: Annotated[
        bool | None, _sampling("--ignore-eos", help="Go on where the model would end its answer.")
    ] = None,
) -> None:
    """Talk to MODEL. /help shows the commands, exit or Ctrl-D leaves.

    With --prompt, or text piped into standard input: one answer on standard output, all else on standard error.

    Example: tool chat demo --prompt "What is the capital of France?"
    """
    question = read_question(prompt)
    config = engine.config()
    given = {
        "do_sample": do_sample,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "seed": seed,
        "stop": stop or None,
        "ignore_eos": ignore_eos,
    }
    from toolkit.api import Pipeline
    from toolkit.chat import settings
    from toolkit.chat.conversation import Conversation
    from toolkit.messages import GenerationConfig

    asked = settings.change(GenerationConfig(), **given)  # wrong values are told before the model is loaded
    console = stderr()
    for line in asked.without_effect():
        console.print(f"{line} (--greedy); leave it out", markup=False, soft_wrap=True)
    with console.status(f"Loading {model}"):
        # what is to be said about loading is said below, in plain lines
        adapter = next(iter(config.adapters or {}), None)
        pipe = Pipeline(
            model,
            config,
            engine.chat_template,
            backend=engine.backend,
            adapter_name=adapter,
            progress=lambda line: None,
            packed=engine.packed(config, lambda line: console.print(line, style="dim", markup=False, soft_wrap=True)),
        )
    with pipe:
        talk = Conversation(settings.change(pipe.gen_config, **given), system, keep=keep)
        if question is None:
            show_engine(console, pipe.engine)
            facts = f"chat template: {pipe.chat_template.note}", f" · context {pipe.engine.session_len}"
            converse(pipe, model, talk, *facts)
        else:
            note = pipe.engine.runner_note if engine.backend is not None else ""
            for line in filter(None, (note, *pipe.engine.plan.notices)):
                console.print(line, markup=False, soft_wrap=True)
            answer_once(pipe, talk, question)


def read_question(prompt: str | None) -> str | None:
    """The one question to answer, or None for a conversation."""
    if prompt is not None:
        if not prompt.strip():
            raise UsageError("--prompt: expected a text, found an empty one")
        return prompt
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        raw = getattr(sys.stdin, "buffer", None)  # its bytes: in a C locale Python would take any of them for text
        text = raw.read().decode("utf-8-sig") if raw is not None else sys.stdin.read()
    except UnicodeDecodeError as e:
        raise UsageError(f"standard input: expected UTF-8 text, found byte 0x{e.object[e.start]:02x}") from e
    if not text.strip():
        raise UsageError("standard input: expected a question, found nothing; give --prompt, or run it in a terminal")
    return text.rstrip("\n")


def answer_once(model: Model, talk: Conversation, question: str) -> None:
    """One answer on standard output, a line about it on standard error."""
    from toolkit.chat.repl import answer, how_it_ended
    from toolkit.chat.settings import describe
    from toolkit.chat.terminal import TerminalScreen

    screen = TerminalScreen()
    talk.say("user", question)
    whole, speed = answer(model, talk.messages(), talk.config, screen)
    ending = how_it_ended(whole, talk.config, "--max-new-tokens", "--session-len")
    screen.note(", ".join(filter(None, (speed, describe(talk.config), ending))))
    if whole.finish_reason == "abort":
        raise KeyboardInterrupt


def converse(model: Model, name: str, talk: Conversation, note: str = "", context: str = "") -> None:
    """Questions and answers until the user leaves. ``note``: to say first; ``context``: ends the status line."""
    from toolkit.artifacts.home import toolkit_home
    from toolkit.chat.repl import COMMANDS, Repl
    from toolkit.chat.settings import describe
    from toolkit.chat.terminal import TerminalScreen, reader

    screen = TerminalScreen()
    if note:
        screen.note(note)
    screen.note(f"sampling: {describe(talk.config)} (/set changes it)")
    screen.note("Enter sends, Alt-Enter starts a new line, /help shows the commands, Ctrl-D leaves.")

    def status() -> str:
        return f"{name} · {describe(talk.config)} · {len(talk.turns)} messages{context}"

    Repl(model, name, talk, screen).run(reader(toolkit_home() / "chat_history", COMMANDS, status))
