"""``tool chat``: talk to a model in the terminal, or get one answer in a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from toolkit.commands.app.interrupt import answered
from toolkit.commands.options import EngineFlags, with_engine_flags
from toolkit.commands.output import say, say_how_it_runs, stderr
from toolkit.commands.sampling_options import SamplingFlags, with_answer_flags
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from toolkit.chat.conversation import Conversation
    from toolkit.chat.repl import Model
    from toolkit.chat.sessions import Session
    from toolkit.configs.engine import EngineConfig
    from toolkit.pipeline.pipeline import Pipeline

PATIENCE = 1.0  # seconds for piped text to come before it is said that it is waited for
MEDIA: Any = {"rich_help_panel": "Images and videos"}


@with_engine_flags
@with_answer_flags
def run(
    model: Annotated[str, typer.Argument(help="Local directory, hub id, .gguf file, artifact, or demo.")],
    engine: EngineFlags,
    sampling: SamplingFlags,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Answer this, after piped text, and leave; the answer alone is on stdout."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System text, instead of the chat template's own.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="The first question is about it: file or URL. Repeatable.", **MEDIA),
    ] = None,
    video: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Likewise, a video. Repeatable.", **MEDIA),
    ] = None,
    media_io_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="<json>", help='How videos are read: \'{"video": {"num_frames": 16, "fps": 1}}\'.', **MEDIA
        ),
    ] = None,
    allow_private_media: Annotated[
        bool, typer.Option("--allow-private-media", help="Fetch them from private addresses too.", **MEDIA)
    ] = False,
    session: Annotated[
        str | None, typer.Option(metavar="<name>", help="Go on with what was said under this name, and keep it.")
    ] = None,
    keep: Annotated[
        int, typer.Option(min=0, metavar="<int>", help="Messages from the start that stay when the context is full.")
    ] = 0,
) -> None:
    """Talk to MODEL. /help shows the commands, exit or Ctrl-D leaves.

    With --prompt, text piped into standard input, or both: one answer on standard output, all else on standard error.

    Example: tool chat demo --prompt "What is the capital of France?"
    """
    question = read_question(prompt)
    config = engine.config()
    config.max_batch_size = config.max_batch_size or 1  # one user
    given = sampling.given()
    from toolkit.chat import settings
    from toolkit.chat.conversation import Conversation
    from toolkit.chat.sessions import Session
    from toolkit.messages import GenerationConfig
    from toolkit.vision.sampling import media_sampling

    media_sampling(media_io_kwargs, name="--media-io-kwargs")
    kept = None if session is None else Session(session)
    settings.change(GenerationConfig(), **given)  # wrong values are told before the model is loaded
    console = stderr()
    pipe = _loaded(model, engine, config, console, media_io_kwargs, allow_private_media)
    with pipe:
        talk = Conversation(settings.change(pipe.gen_config, **given), system, keep=keep)
        if kept is not None:
            kept.go_on(talk, **given)
            if talk.turns:
                say(f"{session}: {len(talk.turns)} messages", console, "dim")
        _show(pipe, talk, image or (), video or ())
        if question is None:
            say_how_it_runs(console, pipe.engine, pipe.engine.runner_note)
            converse(pipe, model, talk, _facts(model, pipe), f" · context {pipe.engine.plan.session_len}", session=kept)
        else:
            note = pipe.engine.runner_note if engine.backend is not None else ""
            say_how_it_runs(console, pipe.engine, note)
            answer_once(pipe, talk, question)
            if kept is not None:
                kept.keep(talk, model)


def _loaded(
    model: str,
    engine: EngineFlags,
    config: EngineConfig,
    console: Console,
    media_io_kwargs: str | None,
    allow_private_media: bool,
) -> Pipeline:
    """The model of the flags, ready to answer."""
    from toolkit.pipeline.pipeline import Pipeline
    from toolkit.runners.base import Backend

    with _loading(console, model):
        # what is to be said about loading is said once it has loaded, in plain lines
        return Pipeline(
            model,
            config,
            engine.chat_template,
            backend=cast(Backend | None, engine.backend),
            media_io_kwargs=media_io_kwargs,
            allow_private_media=allow_private_media,
            adapter_name=config.first_adapter,
            progress=lambda line: None,
            packed=engine.packed(config, lambda line: say(line, console, "dim")),
        )


def _loading(console: Console, model: str) -> AbstractContextManager[object]:
    """Tells somebody at a terminal what is awaited; what moves there is not imported elsewhere."""
    if not console.is_terminal:
        return nullcontext()
    from rich.text import Text

    return console.status(Text(f"Loading {model}"))


def _show(pipe: Pipeline, talk: Conversation, images: Sequence[str], videos: Sequence[str]) -> None:
    """Put them before the first question."""
    for source in images:
        talk.show(pipe.checked_image(source))
    for source in videos:
        talk.show(pipe.checked_video(source), "video_url")


def _facts(model: str, pipe: Pipeline) -> str:
    """Where it runs, and what a user should know of it."""
    from toolkit.engine.load.memory_plan import show_bytes

    template = pipe.chat_template
    facts = f"{model} on {pipe.engine.device}, at most {show_bytes(pipe.engine.plan.total)}"
    return facts + ("" if template.name == "hf" else f", chat template: {template.note}")


def read_question(prompt: str | None) -> str | None:
    """The one question to answer: ``prompt`` after what is piped in, either alone; None for a conversation."""
    if prompt is not None and not prompt.strip():
        raise UsageError("--prompt: expected a text, found an empty one")
    if prompt is not None and (odd := re.search("[\udc80-\udcff]", prompt)):  # how Python takes a byte that is no text
        raise UsageError(f"--prompt: expected UTF-8 text, found byte 0x{ord(odd[0]) - 0xDC00:02x}")
    closed = sys.stdin is None or sys.stdin.closed
    if closed and prompt is None:
        raise UsageError("standard input: expected a question, found it closed; give --prompt, or run it in a terminal")
    if closed or sys.stdin.isatty():
        return prompt
    if prompt is not None:
        _say_what_is_awaited()
    piped = read_piped()
    if prompt is not None:
        return f"{piped}\n\n{prompt}" if piped.strip() else prompt
    if not piped.strip():
        raise UsageError("standard input: expected a question, found nothing; give --prompt, or run it in a terminal")
    return piped


def _say_what_is_awaited() -> None:
    """Whoever started the command may hold its standard input open without a word to come: tell what is waited for."""
    import select

    try:
        there, _, _ = select.select([sys.stdin], [], [], PATIENCE)
    except (OSError, ValueError):  # no file of the system's
        return
    if not there:
        line = "reading standard input, which goes before --prompt; with `< /dev/null` there is none"
        say(line, style="dim")


def read_piped() -> str:
    """What is piped into standard input; nothing of one that cannot be read. Raises UsageError for what is no text."""
    try:
        raw = getattr(sys.stdin, "buffer", None)  # its bytes: in a C locale Python would take any of them for text
        text = raw.read().decode("utf-8-sig") if raw is not None else sys.stdin.read()
    except OSError:
        return ""
    except UnicodeDecodeError as e:
        raise UsageError(f"standard input: expected UTF-8 text, found byte 0x{e.object[e.start]:02x}") from e
    return text.rstrip("\n")


def answer_once(model: Model, talk: Conversation, question: str, sampling: str = "greedy") -> None:
    """One answer on standard output, a line about it on standard error. ``sampling``: see ``converse``."""
    from toolkit.chat.repl import answer, how_it_ended, make_room
    from toolkit.chat.settings import describe
    from toolkit.chat.terminal import TerminalScreen

    screen = TerminalScreen()
    talk.say("user", question)
    make_room(model, talk, screen.note)
    whole, speed = answer(model, talk.messages(), talk.config, screen)
    ending = how_it_ended(whole, talk.config, "--max-new-tokens", model.longer() or "--session-len")
    screen.note(", ".join(filter(None, (speed, describe(talk.config, sampling), ending))))
    if whole.finish_reason == "abort":
        raise KeyboardInterrupt
    talk.say("assistant", whole.text)


def converse(
    model: Model,
    name: str,
    talk: Conversation,
    note: str = "",
    context: str = "",
    sampling: str = "greedy",
    session: Session | None = None,
) -> None:
    """Questions and answers until the user leaves. ``note``: begins the one line that is said first; ``context``: ends
    the status line; ``sampling``: what holds where nothing was said of it; ``session``: where all of it is kept."""
    from toolkit.artifacts.home import toolkit_home
    from toolkit.chat.repl import COMMANDS, Repl
    from toolkit.chat.settings import describe
    from toolkit.chat.terminal import TerminalScreen, reader

    screen = TerminalScreen()
    screen.note("; ".join(filter(None, (note, "/help shows the commands, Ctrl-D leaves"))))

    def status() -> str:
        return f"{name} · {describe(talk.config, sampling)} · {len(talk.turns)} messages{context}"

    with answered():  # Ctrl-C stops an answer
        after = (lambda: None) if session is None else partial(session.keep, talk, name)
        Repl(model, name, talk, screen, after).run(reader(toolkit_home() / "chat_history", COMMANDS, status))
