"""How models write calls and thoughts, as data; one file of ``tools/`` each has the calls of one kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from toolkit.base.lazy_dataclass import dataclass

Functions = Mapping[str, Mapping[str, Any]] | None  # name -> JSON schema of its parameters; None: any name will do
Style = Literal["json", "qwen_xml", "minimax_xml", "deepseek_xml", "glm_xml"]  # of arguments, as xgrammar calls them


class Call(NamedTuple):
    """``arguments``: JSON text of an object. ``id``: where the model gives one."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Written:
    """What a model is made to write: ``first``, calls with ``between`` them, ``last``. A call: ``begin`` (%s its name),
    its arguments by their schema in ``style``, ``end``. ``trigger``: that part of ``begin`` at which it is clear that a
    call follows, with what stands before it in ``first``. ``others``: what may stand behind the special token that it
    begins with, where that alone does not make it clear."""

    begin: str
    end: str
    style: Style = "json"
    first: str = ""
    last: str = ""
    between: str = "\n"
    trigger: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolFormat:
    """``marks``: (begin, end) around calls; an end of "" is the answer's, or the next begin. ``read``: the calls
    between them, none where it is anything else; ``parts``: the calls in such a body after all, in the order of what
    else it has (an answer cut short, words between calls). ``bare``: whether an answer with this beginning may be calls
    without marks (None: not yet clear). ``drop``: marks around several calls; ``inner``: those between the parts of a
    call. ``quoted``: in JSON strings an end mark is none, nor is it between ``value``, marks around an argument, or in
    a text that ``text`` marks at both ends, nothing escaped. ``unclosed``: calls can be told to be whole without their
    end mark. ``signs``: what the chat templates of such models have, all of one row. ``thought_ends``: marks that such
    models may begin an answer with, thoughts or not. ``stops``: special tokens that end an answer behind its calls.
    """

    name: str
    marks: tuple[tuple[str, str], ...]
    read: Callable[[str, Functions], list[Call]]
    written: Written
    signs: tuple[tuple[str, ...], ...]
    aliases: tuple[str, ...] = ()
    parts: Callable[[str, Functions], list[Call | str]] | None = None
    bare: Callable[[str], bool | None] | None = None
    drop: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    quoted: bool = True
    value: tuple[str, str] | None = None
    text: str = ""
    unclosed: bool = True
    short_ids: bool = False
    thought_ends: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    harmony: bool = False

    @property
    def visible(self) -> tuple[str, ...]:
        """Marks that have to be shown where they are special tokens."""
        return tuple(
            mark for mark in (*(m for pair in self.marks for m in pair), *self.drop, *self.inner, self.text) if mark
        )


@dataclass(frozen=True)
class ReasoningFormat:
    """``begins``, ``ends``: around a thought, any of them. ``open``: an answer begins within one though it does not
    say so. ``breaks``: marks of calls, at which a thought is over too. ``drop``: marks around the answer that follows.
    """

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    signs: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()
    open: bool = False
    breaks: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    harmony: bool = False

    @property
    def visible(self) -> tuple[str, ...]:
        """Marks that have to be shown where they are special tokens."""
        return (*self.begins, *self.ends, *self.drop)


F = TypeVar("F", bound=ToolFormat | ReasoningFormat)


def spotted(template: str, formats: Sequence[F]) -> F | None:
    """The first of ``formats`` whose signs stand in a chat template, None where none's do."""
    return next((form for form in formats if any(all(sign in template for sign in row) for row in form.signs)), None)
