"""Turns of coding agents: the bodies that Claude Code, Codex and clients of the chat API send, in the shapes that their
public sources and bug reports show. Of an ``Agent``: ``first()`` is a conversation, ``goes_on(talk, turn)`` one with a
call and its result added, ``usage(answer)`` its (prompt, cached) tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Talk = list[dict[str, Any]]
RULES = " ".join(f"Rule {i}: read a file before you change it, and say in one line what you did." for i in range(70))
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"file_path": {"type": "string", "description": "Absolute path"}, "limit": {"type": "number"}},
    "required": ["file_path"],
    "additionalProperties": False,
}
NAMES = ("Read", "Write", "Bash", "Grep", "Task")


@dataclass(frozen=True)
class Agent:
    path: str
    first: Callable[[], Talk]
    body: Callable[[Talk, int], dict[str, Any]]
    goes_on: Callable[[Talk, int], Talk]
    usage: Callable[[dict[str, Any]], tuple[int, int]]


def _billing(turn: int) -> str:
    """The header that is new in every request."""
    return f"x-anthropic-billing-header: cc_version=2.1.175.{turn:03x}; cc_entrypoint=cli; cch={turn * 7919:05x};"


# -- Claude Code: /v1/messages -------------------------------------------------------------------


def _claude_first() -> Talk:
    reminder = "<system-reminder>\nYou can use this context:\n# claudeMd\nUse tabs.\n</system-reminder>"
    text = [{"type": "text", "text": reminder}, {"type": "text", "text": "Mend the failing test."}]
    return [{"role": "user", "content": text}]


def _claude_body(talk: Talk, turn: int) -> dict[str, Any]:
    kept = {"type": "ephemeral"}
    last = talk[-1]
    marked = {**last, "content": [*last["content"][:-1], {**last["content"][-1], "cache_control": kept}]}
    return {
        "model": "tiny",
        "max_tokens": 4,
        "temperature": 1,
        "system": [
            {"type": "text", "text": _billing(turn)},
            {
                "type": "text",
                "text": "You are Claude Code, Anthropic's official CLI for Claude.",
                "cache_control": kept,
            },
            {"type": "text", "text": f"{RULES}\n<env>\nWorking directory: /src\nToday's date: 2026-11-22\n</env>"},
        ],
        "messages": [*talk[:-1], marked],
        "tools": [{"name": name, "description": f"{name} things.", "input_schema": SCHEMA} for name in NAMES],
        "metadata": {"user_id": "user_0_account__session_1"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }


def _claude_goes_on(talk: Talk, turn: int) -> Talk:
    use = {"type": "tool_use", "id": f"toolu_{turn:024}", "name": "Read", "input": {"file_path": f"/src/{turn}.py"}}
    result = {
        "type": "tool_result",
        "tool_use_id": use["id"],
        "content": [{"type": "text", "text": f"{turn}→x = {turn}"}],
    }
    said = {"type": "text", "text": "Let me look."}
    return [*talk, {"role": "assistant", "content": [said, use]}, {"role": "user", "content": [result]}]


def _claude_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


# -- Codex: /v1/responses ------------------------------------------------------------------------


def _codex_first() -> Talk:
    def said(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    context = "<environment_context>\n  <cwd>/src</cwd>\n  <shell>bash</shell>\n</environment_context>"
    return [
        said("developer", "<permissions instructions>\nsandbox_mode is workspace-write.\n</permissions instructions>"),
        said("user", context),
        said("user", "Mend the failing test."),
    ]


def _codex_body(talk: Talk, turn: int) -> dict[str, Any]:
    shell = {"type": "function", "name": "exec_command", "description": "Run.", "strict": False, "parameters": SCHEMA}
    patch = {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edit.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    }
    return {
        "model": "tiny",
        "max_output_tokens": 4,
        "instructions": f"You are Codex, based on GPT-5.\n{RULES}",
        "input": talk,
        "tools": [shell, patch, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81a0-7800-8aa0-000000000000",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }


def _codex_goes_on(talk: Talk, turn: int) -> Talk:
    arguments = json.dumps({"file_path": f"/src/{turn}.py"})
    return [
        *talk,
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo", "content": None},
        {"type": "function_call", "name": "exec_command", "arguments": arguments, "call_id": f"call_{turn:024}"},
        {"type": "function_call_output", "call_id": f"call_{turn:024}", "output": f"Exit code: 0\nOutput:\nx = {turn}"},
    ]


def _codex_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


# -- OpenCode, Cline, claude-code-router: /v1/chat/completions -------------------------------------


def _chat_first() -> Talk:
    return [{"role": "user", "content": [{"type": "text", "text": "Mend the failing test."}]}]


def _chat_body(talk: Talk, turn: int) -> dict[str, Any]:
    functions = [{"name": name, "description": f"{name} things.", "parameters": SCHEMA} for name in NAMES]
    rules = f"You are a coding agent.\n{RULES}"
    texts = {"type": "text", "text": _billing(turn)}, {"type": "text", "text": rules}
    forms = (f"{_billing(turn)}\n\n{rules}", list(texts))  # as routers pass Claude Code's on
    return {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [{"role": "system", "content": forms[turn % 2]}, *talk],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": "auto",
        "reasoning_effort": "medium",
        "user": "someone",
    }


def _chat_goes_on(talk: Talk, turn: int) -> Talk:
    function = {"name": "Read", "arguments": json.dumps({"file_path": f"/src/{turn}.py"})}
    call = {"id": f"call_{turn:024}", "type": "function", "function": function}
    return [
        *talk,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": f"x = {turn}"},
    ]


def _chat_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


AGENTS = {
    "claude_code": Agent("/v1/messages?beta=true", _claude_first, _claude_body, _claude_goes_on, _claude_usage),
    "codex": Agent("/v1/responses", _codex_first, _codex_body, _codex_goes_on, _codex_usage),
    "chat": Agent("/v1/chat/completions", _chat_first, _chat_body, _chat_goes_on, _chat_usage),
}
