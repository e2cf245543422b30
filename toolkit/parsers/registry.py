"""Every format by its names, the one that a chat template asks for, and the parser of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from toolkit.errors import UsageError
from toolkit.parsers import thinking
from toolkit.parsers.formats import Functions, ReasoningFormat, ToolFormat, Written, spotted
from toolkit.parsers.guided import Guided
from toolkit.parsers.harmony import Harmony
from toolkit.parsers.marked import Marked
from toolkit.parsers.pieces import Ids, Parser, Reader
from toolkit.parsers.thinking import Begun, Thinking
from toolkit.parsers.tools import (
    command_r,
    deepseek_v3,
    deepseek_v31,
    deepseek_v32,
    gemma4,
    glm45,
    gpt_oss,
    granite,
    hermes,
    internlm,
    kimi_k2,
    llama3,
    minimax_m2,
    mistral,
    phi4,
    pythonic,
    qwen3_coder,
)

F = TypeVar("F", bound=ToolFormat | ReasoningFormat)

# In the order in which their signs are looked for in a template: what only one kind of model has comes first.
TOOLS = tuple(
    module.FORMAT
    for module in (
        gpt_oss,
        kimi_k2,
        gemma4,
        deepseek_v32,
        deepseek_v3,
        deepseek_v31,
        minimax_m2,
        internlm,
        mistral,
        command_r,
        phi4,
        granite,
        glm45,
        qwen3_coder,
        pythonic,
        hermes,
        llama3,
    )
)
REASONING = thinking.FORMATS


def tool_format(name: str, option: str = "--tool-call-parser") -> ToolFormat:
    """The format called ``name`` by us, LMDeploy or vLLM. Raises UsageError, which names ``option``, for an unknown
    one."""
    return _named(option, name, TOOLS)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format called ``name`` by us, LMDeploy or vLLM. Raises UsageError for an unknown one."""
    return _named("--reasoning-parser", name, REASONING)


def spot_tools(template: str) -> ToolFormat | None:
    """How models with this chat template write calls, None where that is not known."""
    return spotted(template, TOOLS)


def open_parser(
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    functions: Functions,
    *,
    seed: str,
    begun: Begun = None,
    single: bool = False,
    guided: bool = False,
) -> Parser:
    """A parser for one answer. ``tools`` None: calls are text; ``reasoning`` None: thoughts are.

    ``seed``: what the ids of calls follow from. ``begun``: how the prompt ended. ``single``: calls after the first are
    dropped. ``guided``: a grammar leaves no other answer than calls written as ``tools.written`` says.
    """
    ids = Ids(seed, short=tools is not None and tools.short_ids)
    if (tools is not None and tools.harmony) or (reasoning is not None and reasoning.harmony):
        return Harmony(functions if tools is not None else {}, ids, single)
    calls: Reader | None = None
    if tools is not None and guided and tools.written.style == "json" and functions is not None:
        calls = Guided(tools.written, functions, ids)
    elif tools is not None or (reasoning is not None and reasoning.drop):
        form = tools or _NO_CALLS
        drop = {*form.drop, *(reasoning.drop if reasoning else ())}
        calls = Marked(replace(form, drop=tuple(sorted(drop))), functions, ids, single)
    if reasoning is None:
        return Thinking(ReasoningFormat("none", (), tools.thought_ends if tools else ()), calls, "closed")
    return Thinking(reasoning, calls, begun)


_NO_CALLS = ToolFormat("none", (), lambda text, functions: [], Written("", ""), ())


def _named(option: str, name: str, formats: Sequence[F]) -> F:
    wanted = _spelled(name)
    found = next((form for form in formats if wanted in map(_spelled, (form.name, *form.aliases))), None)
    if found is not None:
        return found
    names = ", ".join(sorted(each.name for each in formats))
    raise UsageError(f"{option}: expected one of {names}, found {name!r:.60}")


def _spelled(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
