"""Tools for templates that have no place for them: told in the system text, called in <tool_call> tags.

The tags are those of Hermes and Qwen2.5, which many models have seen. InternLM2 and 2.5 were trained on a way of their
own, which their templates do not tell.
"""

from __future__ import annotations

import json
from typing import Any

from toolkit.chat.messages import TOOL_ROLES, Message, object_or_text

_HOW = """You can call these functions, each given as JSON between the tags:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments, and with nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
What it returns follows between <tool_response> tags. Where no function helps, answer in words."""


def spell_out(turns: list[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
    """The same conversation for a template that knows system, user and assistant alone: ``tools`` in the system text,
    calls as text of the assistant's, results as text of the user's."""
    told: list[Message] = []
    for turn in turns:
        if turn["role"] in TOOL_ROLES:
            _say(told, "user", f"<tool_response>\n{turn['content']}\n</tool_response>")
        elif turn.get("tool_calls"):
            calls = [_dumps(call["function"]) for call in turn["tool_calls"]]
            texts = [turn["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
            told.append({"role": "assistant", "content": "\n".join(filter(None, texts))})
        else:
            told.append(turn)
    if not tools:
        return told
    how = _HOW.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if told[0]["role"] in ("system", "developer"):
        first = told[0]
        return [{**first, "content": "\n\n".join(filter(None, (first["content"], how)))}, *told[1:]]
    return [{"role": "system", "content": how}, *told]


PLUGIN = "<|plugin|>"  # a special token of InternLM's
PLUGIN_ROLE = f"system name={PLUGIN}"  # of the turn that tells of the tools; such templates print any role


def spell_for_internlm(turns: list[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
    """As ``spell_out``, as InternLM2 and 2.5 know it: tools and results are turns of their own."""
    told: list[Message] = []
    for turn in turns:
        if turn["role"] in TOOL_ROLES:
            told.append({"role": f"environment name={PLUGIN}", "content": turn["content"]})
        elif turn.get("tool_calls"):
            given = [
                {"name": c["function"]["name"], "parameters": c["function"]["arguments"]} for c in turn["tool_calls"]
            ]
            calls = [f"<|action_start|>{PLUGIN}\n{json.dumps(c, ensure_ascii=False)}<|action_end|>" for c in given]
            told.append({"role": "assistant", "content": "".join((turn["content"], *calls))})
        else:
            told.append(turn)
    if tools:
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        place = int(told[0]["role"] in ("system", "developer"))
        told.insert(place, {"role": PLUGIN_ROLE, "content": functions})
    return told


def results_beside_calls(turns: list[Message]) -> list[Message]:
    """As Gemma 4's first templates want it: a turn with calls has their results too (``tool_responses``), and the
    answer that follows. What was said before the calls is a turn of its own, for they come first in theirs."""
    told: list[Message] = []
    names: dict[Any, str] = {}  # of the calls whose results are due, by their ids
    for turn in turns:
        last = told[-1] if told else {}
        if turn["role"] in TOOL_ROLES and "tool_responses" in last:
            name = names.get(turn.get("tool_call_id")) or turn.get("name") or "unknown"
            last["tool_responses"].append({"name": name, "response": object_or_text(turn["content"])})
        elif turn.get("tool_calls"):
            if turn["content"]:
                told.append({"role": turn["role"], "content": turn["content"]})
            told.append({**turn, "content": "", "tool_responses": []})
            names = {call.get("id"): call["function"]["name"] for call in turn["tool_calls"]}
        elif turn["role"] == "assistant" and last.get("tool_responses") and not last["content"]:
            told[-1] = {**last, "content": turn["content"]}
        else:
            told.append(turn)
    return told


def system_in_user(turns: list[Message]) -> list[Message]:
    """For templates that refuse system messages: that text before the first user's."""
    system, asked, *rest = turns
    return [{**asked, "content": f"{system['content']}\n\n{asked['content']}"}, *rest]


def _say(told: list[Message], role: str, text: str) -> None:
    """Append to the last turn if it is a result as well: users and assistants take turns."""
    if told and told[-1]["role"] == role and told[-1]["content"].startswith("<tool_response>"):
        told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{text}"}
    else:
        told.append({"role": role, "content": text})


def _dumps(function: dict[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
