"""Talking to a model: the loop of ``tool chat``, free of terminals, so that a test can drive it with lines."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.user_path import user_path
from toolkit.chat import settings
from toolkit.chat.conversation import Conversation
from toolkit.chat.messages import Message
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response

HELP = """\
/help                show this (also: /?)
/system [TEXT]       show or set the system text; /system - drops it
/image FILE          show a picture (file or URL); the next question is about it
/video FILE          show a video (file or URL), likewise; /image - drops what was shown
/set [NAME VALUE]    show or change sampling settings, e.g. /set temperature 0.7
/clear               forget the conversation (also: end)
/save FILE           write the conversation to a JSON file
/load FILE           go on with a saved conversation
/retry               answer the last question again
/exit                leave (also: exit, quit, /bye, Ctrl-D)

Enter sends; Alt-Enter, or a backslash at the end of a line, starts a new line. A question may have many lines between
\"\"\" and \"\"\".
Ctrl-C stops the answer, and clears a question that is not sent yet."""
LEAVE = ("exit", "quit", "/exit", "/quit", "/bye")
LEAST_TIME = 0.001  # seconds; a speed measured over less is noise
WORDS = {"end": "/clear", "/?": "/help"}  # "end": LMDeploy's word for the end of a session
QUOTES = '"""'  # around a question of several lines
ROOM = 4  # an answer is to have this part of the context, or max_new_tokens where that is less
COMMANDS = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))


class Model(Protocol):
    """What the loop needs of a Pipeline."""

    def stream_infer(
        self, prompts: list[Message], *, gen_config: GenerationConfig | None = None
    ) -> Iterator[Response]: ...

    def context(self, messages: list[Message]) -> tuple[int, int] | None:
        """(tokens that ``messages`` take, tokens that fit); None where nobody knows."""

    def longer(self) -> str:
        """What helps a user where ``context`` says that a question does not fit."""

    def checked_image(self, source: str) -> str:
        """The URL by which messages may name the picture in a file or at a URL. Raises ToolkitError where it cannot be
        read, or the model does not see."""

    def checked_video(self, source: str) -> str:
        """Likewise of a video, which is not decoded yet."""


class Screen(Protocol):
    """Where things are shown: the answer itself, and notes about it."""

    def text(self, piece: str) -> None: ...

    def end_of_text(self) -> None: ...

    def answering(self) -> AbstractContextManager[None]: ...

    def note(self, line: str) -> None: ...

    def error(self, line: str) -> None: ...


@dataclass
class Speed:
    """Times of one answer, in seconds since the question."""

    asked: float
    first: float | None = None
    at_first: int = 0  # tokens that came with the first piece
    last: float = 0.0
    tokens: int = 0
    accepted: int = 0  # guessed ones that came true
    guessed: int = 0

    def count(self, response: Response) -> None:
        self.last = time.perf_counter() - self.asked
        if self.first is None and response.generate_token_len:
            self.first, self.at_first = self.last, response.generate_token_len
        self.tokens = max(self.tokens, response.generate_token_len)
        self.accepted, self.guessed = response.accepted_tokens, response.accepted_tokens + response.rejected_tokens

    def line(self) -> str:
        """Tokens, tokens/s after the first piece, time to it."""
        if self.first is None:
            return "0 tokens"
        later, took = self.tokens - self.at_first, self.last - self.first
        rate = f", {later / took:.1f} tokens/s" if later and took > LEAST_TIME else ""
        guessed = f", {self.accepted} of {self.guessed} draft tokens accepted" if self.guessed else ""
        return f"{self.tokens} token{'s' * (self.tokens != 1)}{rate}{guessed}, first after {self.first:.2f} s"


def answer(model: Model, messages: Sequence[Message], config: GenerationConfig, screen: Screen) -> tuple[Response, str]:
    """Stream one answer to the screen. Returns it whole, with a line about its speed.

    An interrupt (Ctrl-C) ends the answer, finish_reason "abort"; a failed request raises ToolkitError.
    """
    whole, speed = Response(), Speed(time.perf_counter())
    pieces = model.stream_infer(list(messages), gen_config=config)
    try:
        with screen.answering():
            for piece in pieces:
                speed.count(piece)
                whole.extend(piece)
                screen.text(piece.text)
    except KeyboardInterrupt:
        whole.finish_reason = "abort"
    finally:
        close: Callable[[], Any] = getattr(pieces, "close", lambda: None)
        close()
        screen.end_of_text()
    if whole.finish_reason == "error" or (whole.finish_reason == "length" and not whole.generate_token_len):
        raise ToolkitError(whole.error_message or "the request failed")
    return whole, speed.line()


def check_room(model: Model, messages: list[Message]) -> tuple[int, int] | None:
    """What ``model.context`` says of ``messages``; raises ToolkitError where no answer fits behind them."""
    found = model.context(messages)
    if found is not None and found[0] >= found[1]:
        taken, fits = found
        says = f"the question takes {taken} tokens, the context has {fits}"
        raise ToolkitError(f"{says}; shorten it, or {model.longer()}")
    return found


def make_room(model: Model, talk: Conversation, note: Callable[[str], None]) -> None:
    """Leave out the oldest turns where an answer would hardly fit behind the conversation; say so by ``note``. Raises
    ToolkitError, nothing being left out, where the question alone is too long."""
    before, found = talk.left_out, model.context(talk.messages())
    if found is None:
        return
    taken, fits = found
    wanted = min(talk.config.max_new_tokens or fits, fits // ROOM)
    if taken + wanted <= fits:
        return
    while taken + 2 * wanted > fits and talk.leave_out():  # room for the next answer too: the cache begins anew
        taken, _ = model.context(talk.messages()) or (0, fits)
    try:
        check_room(model, talk.messages())
    except ToolkitError:
        talk.left_out = before
        raise
    if count := talk.left_out - before:
        kept = f"the first {talk.keep} are kept" if talk.keep else "--keep N keeps the first N"
        note(f"the context is full: the {count} oldest messages are left out ({kept}; /clear forgets all)")


def how_it_ended(whole: Response, config: GenerationConfig, more: str, shorter: str) -> str:
    """What to say about an answer that did not come to its own end; ``more``, ``shorter``: what the user can do."""
    if whole.finish_reason == "abort":
        return "stopped"
    if whole.finish_reason != "length":
        return ""
    limit = config.max_new_tokens
    if limit is not None and whole.generate_token_len >= limit:
        return f"cut at {limit} tokens ({more})"
    return f"cut, the context was full ({shorter})"


def unquoted(text: str) -> str:
    """A question without the three quotes around it."""
    if not text.startswith(QUOTES):
        return text
    return text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n") or text


def _named(command: str, text: str) -> Path:
    """The file of which ``command`` was told. Raises UsageError for a name that none can have, or that is out of
    reach."""
    if not text:
        raise UsageError(f"{command}: expected a file name")
    file = user_path(text)
    try:
        file.exists()
    except OSError as e:  # too long, or not permitted
        raise UsageError(f"{command} {text:.100}: cannot be reached: {e.strerror}") from e
    return file


class Repl:
    """The state of a chat and what each line of input does to it."""

    def __init__(
        self,
        model: Model,
        name: str,
        conversation: Conversation,
        screen: Screen,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """``after``: called behind each input that was handled."""
        self.after = after
        self.model = model
        self.name = name
        self.conversation = conversation
        self.screen = screen
        self._read: Callable[[], str] = lambda: ""

    def run(self, read: Callable[[], str]) -> None:
        """Read and answer until the user leaves; ``read`` raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        self._read = read
        while True:
            try:
                line = read()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if line.strip().lower() in LEAVE:
                return
            if line.strip():
                self.handle(WORDS.get(line.strip().lower(), line))

    def handle(self, line: str) -> None:
        """Do what one input asks for; errors become one line on the screen."""
        try:
            if line.startswith("/") and ("\n" not in line or line.split()[0] in COMMANDS):
                self._command(line)
            else:
                self._ask(unquoted(line))
            self.after()
        except ToolkitError as e:
            self.screen.error(" ".join(str(e).split()))
        except KeyboardInterrupt:  # while a picture was fetched, say
            self.screen.note("stopped\n")

    def _ask(self, text: str) -> None:
        """Ask a question. What was shown for one that gets no answer stays for the next."""
        talk = self.conversation
        before, shown = list(talk.turns), talk.shown
        talk.say("user", text)
        try:
            self._answer(before)
        finally:
            if talk.turns is before and shown:
                talk.shown = shown
                self._note_shown()

    def _answer(self, before: list[Message]) -> None:
        """Answer the open question. A failure leaves the turns as they were ``before`` it; what an interrupt left
        counts."""
        talk = self.conversation
        try:
            make_room(self.model, talk, self.screen.note)
            whole, speed = answer(self.model, talk.messages(), talk.config, self.screen)
        except ToolkitError:
            talk.turns = before
            raise
        except KeyboardInterrupt:  # while the question was read
            talk.turns = before
            self.screen.note("stopped\n")
            return
        if whole.finish_reason == "abort" and not whole.text:
            talk.turns = before
        else:
            talk.say("assistant", whole.text)
        ending = how_it_ended(whole, talk.config, "/set max_new_tokens", "/clear")
        self.screen.note(", ".join(filter(None, (speed, ending))) + "\n")

    def _command(self, line: str) -> None:
        name = line.split()[0]
        rest = line.removeprefix(name).strip()
        handlers: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._system,
            "/image": lambda rest: self._show("image", rest),
            "/video": lambda rest: self._show("video", rest),
            "/set": self._set,
            "/clear": self._clear,
            "/save": self._save,
            "/load": self._load,
            "/retry": self._retry,
        }
        if name not in handlers:
            raise UsageError(f"{name}: no such command; /help lists them (put a blank first to send it as text)")
        handlers[name](rest)

    def _help(self, rest: str) -> None:
        self.screen.note(HELP)

    def _system(self, rest: str) -> None:
        if rest:
            self.conversation.system = None if rest == "-" else rest
        text = self.conversation.system
        self.screen.note("no system text but the chat template's" if text is None else f"system: {text}")

    def _show(self, kind: str, rest: str) -> None:
        if not rest:
            raise UsageError(f"/{kind}: expected a file name or a URL")
        if rest == "-":
            self.conversation.shown = []
        else:
            url = self.model.checked_image(rest) if kind == "image" else self.model.checked_video(rest)
            self.conversation.show(url, f"{kind}_url")
        self._note_shown()

    def _note_shown(self) -> None:
        kinds = [part["type"].removesuffix("_url") for part in self.conversation.shown]
        counts = [f"{kinds.count(name)} {name}(s)" for name in ("image", "video") if name in kinds]
        self.screen.note(f"the next question is about {' and '.join(counts) or 'no image'}")

    def _set(self, rest: str) -> None:
        if not rest:
            for name, value in settings.show(self.conversation.config).items():
                self.screen.note(f"{name:<20} {'' if value is None else value}")
            return
        name = re.split(r"[\s=]", rest, maxsplit=1)[0]
        value = settings.parse(name, rest[len(name) :].lstrip().removeprefix("=").strip())
        name = name.replace("-", "_")
        self.conversation.config = settings.change(self.conversation.config, **{name: value})
        shown = settings.show(self.conversation.config)
        mode = "sampling" if not self.conversation.config.greedy else "greedy"
        self.screen.note(f"{name} = {shown[name]} ({mode})")

    def _clear(self, rest: str) -> None:
        self.conversation.clear()
        self.screen.note("the conversation is forgotten")

    def _save(self, rest: str) -> None:
        file = _named("/save", rest)
        if file.exists() and not self._confirmed(f"{rest}: exists; replace it? y or n"):
            self.screen.note("not saved")
            return
        self.conversation.save(file, self.name)
        self.screen.note(f"saved to {rest}")

    def _confirmed(self, question: str) -> bool:
        self.screen.note(question)
        try:
            return self._read().strip().lower() in ("y", "yes")
        except (KeyboardInterrupt, EOFError):
            return False

    def _load(self, rest: str) -> None:
        self.conversation.load(_named("/load", rest))
        self.screen.note(f"{len(self.conversation.turns)} messages from {rest}")

    def _retry(self, rest: str) -> None:
        config, before = self.conversation.config, list(self.conversation.turns)
        self.conversation.take_back_answer()
        if config.greedy:
            self.screen.note("greedy: expect the same answer; /set temperature 0.8 varies it")
        elif config.random_seed is not None:
            seed = (config.random_seed + 1) % (1 << 64)
            self.conversation.config = dataclasses.replace(config, random_seed=seed)
            self.screen.note(f"seed = {seed}")
        self._answer(before)
