"""Parts an answer from the thoughts before it, and the formats in which models mark these."""

from __future__ import annotations

import re
from typing import Literal

from toolkit.parsers.formats import ReasoningFormat, spotted
from toolkit.parsers.pieces import Piece, Reader, unfinished

Begun = Literal["open", "closed"] | None  # the prompt ends within a thought, or behind one; None: it does neither
_THINK = (("<think>",), ("</think>",))
FORMATS = (
    ReasoningFormat(
        "gpt_oss", (), (), (("<|channel|>", "<|start|>"),), aliases=("openai_gptoss", "harmony", "openai"), harmony=True
    ),
    ReasoningFormat(
        "gemma4",
        ("<|channel>thought",),
        ("<channel|>",),
        (("<|channel>", "<channel|>"),),
        breaks=("<|tool_call>",),
        drop=("<|channel>thought\n<channel|>", "<channel|>"),  # the larger ones may end an answer with either
    ),
    ReasoningFormat(
        "mistral",
        ("[THINK]",),
        ("[/THINK]",),
        (("[THINK]",),),
        aliases=("magistral",),
        breaks=("[TOOL_CALLS]",),
    ),
    ReasoningFormat(
        "command_a",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        (("<|START_THINKING|>",),),
        aliases=("cohere", "cohere_command3", "command_r", "command_r7b"),
        drop=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        (("Here is my thought process",), ("Write your thoughts",)),
    ),
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), (("<seed:think>",),)),
    ReasoningFormat(
        "kimi_k2",
        *_THINK,
        signs=(("<|tool_calls_section_begin|>", "<think>"),),
        aliases=("kimi",),
        breaks=("<|tool_calls_section_begin|>",),
    ),
    ReasoningFormat("kimi_vl", ("◁think▷",), ("◁/think▷",), (("◁think▷",),)),
    ReasoningFormat(
        "minimax_m2",
        *_THINK,
        signs=(("minimax:tool_call", "<think>"),),
        aliases=("minimax", "minimax_m2_append_think"),
        open=True,
        breaks=("<minimax:tool_call>",),
    ),
    ReasoningFormat(
        "glm45",
        *_THINK,
        signs=(("<arg_key>", "<think>"), ("<arg_key>", "</think>")),
        aliases=("glm47", "glm46", "glm4_moe"),
        breaks=("<tool_call>",),
    ),
    ReasoningFormat(
        "hunyuan",
        *_THINK,
        signs=(("<|extra_0|>", "<think>"), ("<｜hy_Assistant｜>", "<think>"), ("<｜hy_Assistant｜>", "</think>")),
        aliases=("hunyuan_a13b",),
        drop=("<answer>\n", "\n</answer>"),
    ),
    ReasoningFormat(
        "ernie45",
        *_THINK,
        signs=(("<think>", "<response>"), ("</think>", "<response>")),
        drop=("<response>\n", "\n</response>"),
    ),
    ReasoningFormat(
        "qwen3",
        *_THINK,
        signs=(("<think>",), ("</think>",)),
        aliases=(
            "default", "qwen_qwq", "intern_s1", "interns2_preview", "qwen3_5", "deepseek_v3",
            "deepseek_v31", "deepseek_v32", "deepseek_v3.2", "deepseek_v4", "olmo3", "nemotron",
        ),
        breaks=("<tool_call>\n<function=",),  # Qwen3.5 may call without ending its thought
    ),
    ReasoningFormat("deepseek_r1", *_THINK, aliases=("step3", "deepseek"), open=True),
)  # fmt: skip


def spot_reasoning(template: str) -> ReasoningFormat | None:
    """How models with this chat template write thoughts, None where they write none or that is not known."""
    return spotted(template, FORMATS)


class Thinking:
    """Thoughts become pieces of "reasoning"; what follows goes to ``rest``, or is content where that is None.

    White space around a thought is no part of it, nor of the answer behind it. Only the start of an answer may be a
    thought: later marks are text. An answer that begins with the end of a thought had none.
    """

    def __init__(self, form: ReasoningFormat, rest: Reader | None, begun: Begun = None) -> None:
        self._form = form
        self._rest = rest
        self._default = "thought" if begun == "open" or (begun is None and form.open) else "answer"
        self._begins = () if begun == "closed" else form.begins
        self._state = "start"
        self._held = ""
        self._blank = True  # nothing but white space so far, of the thought or of the answer behind one
        ends = sorted((*form.ends, *form.breaks), key=len, reverse=True)
        self._ends = ends
        self._end = re.compile("|".join(map(re.escape, ends)) or "(?!)")
        self._strip = False  # before the answer

    @property
    def thinking(self) -> bool:
        """Whether the answer is within a thought."""
        return self._state == "thought"

    def add(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._state == "start" and not self._begin():
            return []
        if self._state == "thought":
            pieces += self._think()
        if self._state == "answer":
            held, self._held = self._held, ""
            pieces += self._answer(held)
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == "start":
            self._state = self._default
        held, self._held = self._held, ""
        if self._state == "thought":
            pieces += self._reason(held.rstrip())
        else:
            pieces += self._answer(held)
        return pieces + (self._rest.finish() if self._rest else [])

    def _begin(self) -> bool:
        """Whether it is clear what the answer begins with."""
        start = self._held.lstrip()
        for mark in (*self._begins, *self._form.ends):
            if start.startswith(mark):
                self._held = start[len(mark) :]
                self._state = "thought" if mark in self._begins else "answer"
                self._strip = self._state == "answer"
                return True
            if mark.startswith(start):
                return False
        self._state = self._default
        return True

    def _think(self) -> list[Piece]:
        match = self._end.search(self._held)
        if match is not None:
            thought, self._held = self._held[: match.start()], self._held[match.end() :]
            if match.group() in self._form.breaks:
                self._held = match.group() + self._held
            self._state, self._strip = "answer", True
            return self._reason(thought.rstrip())
        shown = self._held[: len(self._held) - unfinished(self._held, self._ends)].rstrip()
        self._held = self._held[len(shown) :]
        return self._reason(shown)

    def _reason(self, text: str) -> list[Piece]:
        if self._blank:
            text = text.lstrip()
        self._blank = self._blank and not text
        return [Piece("reasoning", text)] if text else []

    def _answer(self, text: str) -> list[Piece]:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        if self._rest is not None:
            return self._rest.add(text)
        return [Piece("content", text)] if text else []
