"""Reading a request: its fields checked, its prompt as token ids, in an order that refuses early."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.models.eyes.pictures import Picture
from toolkit.serve.fields.message import Message
from toolkit.serve.fields.protocol import ChatCompletionRequest
from toolkit.serve.fields.strict import Strict
from toolkit.serve.http.errors import ApiError, TooLong, bad_field, from_validation
from toolkit.serve.http.json_values import count_values
from toolkit.serve.state import ServerState
from toolkit.vision.asked import Asked
from toolkit.vision.decoder import Ticket
from toolkit.vision.eyes import Eyes
from toolkit.vision.parts import is_picture, parts_of

logger = logging.getLogger("toolkit.serve")
M = TypeVar("M", bound=Strict)
T = TypeVar("T")
SMALL = 1 << 14  # bytes of a body that are not worth a thread
PIECE = 8  # characters for each token of the session that are tokenized at once; few texts have as many
SEAM = 16  # tokens by which the end of such a piece may differ from the same text in one go


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError where its client goes away before."""
    parts = []
    try:
        async for part in request.stream():
            parts.append(part)
    except ClientDisconnect as error:
        raise left_early() from error
    return b"".join(parts)


def left_early() -> ApiError:
    """Of a client that has left; the log alone tells of it."""
    return ApiError(499, "request: the client went away before it was read")


def parse_body(model: type[M], body: bytes, check: Callable[[Any], None] = lambda data: None) -> M:
    """``body`` as ``model``; ``check`` sees it before. Raises ApiError that names the first bad field."""
    try:
        data = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"The request body is not valid JSON ({error})") from error
    check(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, model) from error


async def parse(request: Request, model: type[M]) -> tuple[ServerState, M, int]:
    """The server's state, the body as ``model``, and its bytes; where it names none it means the model that is served.
    Raises ApiError that names the first bad field or the limit."""
    state: ServerState = request.app.state.server
    body = await read_body(request)

    def work() -> M:
        if len(body) > SMALL:
            state.settings.limits.check_values(count_values(body), state.engine.session_len)
        made = parse_body(model, body, state.settings.limits.check_body)
        if getattr(made, "model", None) == "":
            made.model = state.model_name  # type: ignore[attr-defined]
        return made

    return state, await run_sized(state, work, len(body)), len(body)


async def run_sized(state: ServerState, work: Callable[[], T], size: int) -> T:
    """``work()``, whose time grows with the ``size`` of a request: in a thread where that is worth one."""
    return work() if size <= SMALL else await state.lanes.run(work, size)


async def translated(state: ServerState, translate: Callable[[], M], size: int) -> M:
    """``translate()``, which makes our request of another API's of ``size`` bytes. Raises ApiError (400) for what that
    cannot be, and where it has become too much."""

    def work() -> M:
        try:
            request = translate()
        except ValidationError as error:
            raise from_validation(error) from error
        if isinstance(request, ChatCompletionRequest):
            state.settings.limits.check_counts(len(request.messages), len(request.tools or ()))
        return request

    return await run_sized(state, work, size)


async def encode_chat(
    state: ServerState, request: ChatCompletionRequest, size: int, name: str, *, limited: bool = True
) -> tuple[list[int], str, list[Picture]]:
    """The messages of a body of ``size`` bytes, tokenized and rendered, and their pictures. Raises ApiError 400 if they
    cannot be, or, where the prompt is ``limited``, do not fit the session.

    The log shows the rendered prompt at level INFO, as the request ``name``'s.
    """
    variables = request.template_variables
    if request.told_tools and state.formats_of(request.model).tools is None:
        what = "this model's chat template has no place for them, or a way of calling that is not known"
        raise bad_field("tools", f"{what}; name one by the server's --tool-call-parser")

    def render(messages: list[dict[str, Any]]) -> str:
        template = state.template_of(request.model)
        text = template.render(messages, add_generation_prompt=request.opens_answer, **variables)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s: prompt %r", name, state.shorten(text))
        return text

    kept = request.kept_tokens(state.engine.session_len)

    def encode(text: str) -> list[int]:
        if limited:
            return _encode(state, text, "messages", special=False, kept=kept)
        return state.engine.tokenizer.encode(text, add_special_tokens=False)[-(kept or 0) :]

    found = await encode_messages(state, request.messages, render, encode, size, request.media_io_kwargs)
    if found[2] and kept is not None:
        raise bad_field("truncate_prompt_tokens", "not with pictures, which would be cut; leave it out")
    return found


async def encode_messages(
    state: ServerState,
    messages: Sequence[Message],
    render: Callable[[list[dict[str, Any]]], str],
    encode: Callable[[str], list[int]],
    size: int,
    media: dict[str, Any] | None = None,
) -> tuple[list[int], str, list[Picture]]:
    """As ``encode_chat``: ``encode`` gets what ``render`` has written, with its pictures spelled. ``media``: as
    ``media_sampling`` has it."""
    eyes = state.eyes if state.eyes is None or media is None else state.eyes.taking(media)

    def read() -> tuple[list[dict[str, Any]], list[tuple[Asked, int]]]:
        found = [message.for_template() for message in messages]
        if eyes is None:
            refuse_pictures(found, "messages", "this model reads text alone; leave the images out")
            return found, []
        return found, [(one, one.pixels(eyes.rules)) for one in eyes.asked(found)]

    def finish(found: list[dict[str, Any]], pictures: list[Picture]) -> tuple[list[int], str, list[Picture]]:
        text = render(found)
        return encode(text if eyes is None else eyes.spell(text, pictures)), text, pictures

    if eyes is None:
        return await state.lanes.run(lambda: finish(read()[0], []), size)
    found, asked = await state.lanes.run(read, size)
    pictures = await _looked(state, eyes, asked)
    return await state.lanes.run(lambda: finish(found, pictures), size)


async def _looked(state: ServerState, eyes: Eyes, asked: Sequence[tuple[Asked, int]]) -> list[Picture]:
    """The pictures of a request, each with its pixels, one after the other: fetched where fetching is done, decoded
    where decoding is, so that others' come between."""
    lanes, limits = state.lanes, state.settings.limits
    until, left = time.monotonic() + limits.prompt_timeout, limits.image_timeout
    pictures: list[Picture] = []

    def seconds() -> float:
        return max(until - time.monotonic(), 0.0)

    for one, pixels in asked:
        with ExitStack() as held:
            if eyes.fetches(one):
                fetched = await lanes.fetch(partial(eyes.fetch, one, left), seconds())
                held.enter_context(fetched)
                left -= fetched.seconds
                one, pixels = fetched.asked, fetched.asked.pixels(eyes.rules)
            tokens = sum(picture.tokens for picture in pictures)
            ticket = Ticket()
            try:
                work = partial(_seen, eyes, one, tokens, until, ticket)
                made = await lanes.decode(work, pixels, seconds(), video=one.video)
            except BaseException:  # the client left, or has waited long enough
                ticket.cancel()
                raise
            lanes.used(sum(part.nbytes for picture in made for part in picture.parts))
            pictures += made
    return pictures


def _seen(eyes: Eyes, one: Asked, tokens: int, until: float, ticket: Ticket) -> list[Picture]:
    return eyes.see(one, tokens, until - time.monotonic(), ticket)


def refuse_pictures(messages: Sequence[dict[str, Any]], param: str, why: str) -> None:
    """Raise ApiError (400), which says ``why``, where one of the messages has a picture."""
    for i, message in enumerate(messages):
        if any(is_picture(part) for part in parts_of(message)):
            raise bad_field(f"{param}.{i}.content", why)


async def encode_text(state: ServerState, render: Callable[[], str], param: str, size: int) -> list[int]:
    """A prompt that ``render`` writes out of a text of about ``size`` characters, as token ids."""
    return await state.lanes.run(lambda: _encode(state, render(), param, special=False), size)


async def encode_prompt(
    state: ServerState, prompt: str | Sequence[int], param: str, special: bool = True, kept: int | None = None
) -> list[int]:
    """A completion's prompt as token ids. ``special``: a text begins with what the tokenizer has texts begin with.
    ``kept``: so many of the last are read alone."""
    if isinstance(prompt, str):
        return await state.lanes.run(lambda: _encode(state, prompt, param, special, kept), len(prompt))
    ids = list(prompt[-(kept or 0) :])
    check_prompt(state, len(ids), param)
    limit = state.engine.tokenizer.vocab_size
    if not 0 <= min(ids) <= max(ids) < limit:
        wrong = next(token for token in ids if not 0 <= token < limit)
        raise bad_field(param, f"expected token ids from 0 to {limit - 1}, found {wrong}")
    return ids


def _encode(state: ServerState, text: str, param: str, special: bool, kept: int | None = None) -> list[int]:
    """``text`` tokenized; one that is far too long for the session only as far as it takes to see that. ``kept``: so
    many of its last tokens alone, with those that every text begins with."""
    tokenizer, limit = state.engine.tokenizer, state.engine.session_len
    if kept is not None:
        first = tokenizer.encode("", add_special_tokens=True) if special else []
        token_ids = first + _end(tokenizer, text, max(kept - len(first), 1))
        check_prompt(state, len(token_ids), param)
        return token_ids
    size = PIECE * limit
    if len(text) > size:
        found = 0
        for start in range(0, len(text), size):
            found += max(len(tokenizer.encode(text[start : start + size], add_special_tokens=False)) - SEAM, 0)
            if found >= limit:
                raise _too_long(state, param, found, f"more than {found} tokens in {len(text):,} characters")
    token_ids = tokenizer.encode(text, add_special_tokens=special)
    check_prompt(state, len(token_ids), param)
    return token_ids


async def encode_embedded(state: ServerState, prompt: str | Sequence[int], param: str, most: int | None) -> list[int]:
    """What becomes a vector: so much of it as ``most`` tokens, 0 or less: as much as fits; None: all, or refused."""
    read = state.embedded
    if most is None and isinstance(prompt, str):
        work = lambda: _encode(state, read.written(prompt), param, special=read.alone)  # noqa: E731
        return await state.lanes.run(work, len(prompt))
    if most is None:
        return await encode_prompt(state, prompt, param)
    limit = most_tokens(state, most)
    if not isinstance(prompt, str):
        return await encode_prompt(state, prompt[:limit], param)
    text = prompt
    ids = await state.lanes.run(lambda: _beginning(text, limit, lambda part: read.encode(part, limit), len), len(text))
    check_prompt(state, len(ids), param)
    return ids


def _end(tokenizer: Tokenizer, text: str, kept: int) -> list[int]:
    """The last ``kept`` tokens of a text, of which no more is read than it takes."""
    size = PIECE * kept
    while len(found := tokenizer.encode(text[-size:], add_special_tokens=False)) < kept + SEAM and size < len(text):
        size *= 2
    return found[-kept:]


def _beginning(text: str, limit: int, encode: Callable[[str], T], tokens: Callable[[T], int]) -> T:
    """What ``encode`` makes of so much of ``text`` as gives ``limit`` ``tokens``: few texts need more characters than
    are read at first, but those of blanks or long words do."""
    size = PIECE * limit
    while tokens(found := encode(text[:size])) < limit and size < len(text):
        size *= 2
    return found


def most_tokens(state: ServerState, most: int) -> int:
    """Tokens that a prompt may have where a request wants it cut to ``most``."""
    limit = state.engine.session_len - 1
    return min(most, limit) if most > 0 else limit


async def encode_pair(
    state: ServerState, first: str, second: str, param: str, most: int | None
) -> tuple[list[int], int]:
    """Two texts that are read together: token ids, and where the second begins. ``most``: as of ``encode_embedded``,
    the second is cut."""
    limit, join = None if most is None else most_tokens(state, most), state.engine.tokenizer.encode_pair

    def encode() -> tuple[list[int], int]:
        for text in (first, second) if limit is None else (first,):
            _encode(state, text, param, special=False)  # one that is far too long is not read to its end
        if limit is None:
            ids, begin = join(first, second)
        else:
            ids, begin = _beginning(second, limit, lambda part: join(first, part, limit), lambda pair: len(pair[0]))
        check_prompt(state, len(ids), param)
        return ids, begin

    return await state.lanes.run(encode, len(first) + len(second))


def check_prompt(state: ServerState, length: int, param: str) -> None:
    """Raise ApiError 400 for a prompt of ``length`` tokens if that is none, or leaves no room to generate one."""
    if not length:
        raise bad_field(param, "expected at least one token, found an empty prompt")
    if length >= state.engine.session_len:
        raise _too_long(state, param, length, f"{length} tokens")


def _too_long(state: ServerState, param: str, found: int, text: str) -> TooLong:
    longer = state.engine.plan.longer("--session-len", "--rope-scaling-factor")
    return TooLong(param, found, state.engine.session_len - 1, text, longer)
