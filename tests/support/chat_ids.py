"""A chat template's prompts as transformers' ``apply_chat_template`` makes them, and as ours does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.template import ChatTemplate
from toolkit.errors import ToolkitError

ADD = {"type": "object", "properties": {"a": {"type": "integer", "description": "One"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sum <&>.", "parameters": ADD}}]
CALL = {"type": "function", "id": "call12345", "function": {"name": "add", "arguments": {"a": 1}}}
SYSTEM = {"role": "system", "content": "Be brief. "}
ASK = {"role": "user", "content": " Hi, größe 世界 \n"}
ANSWER = {"role": "assistant", "content": "Hello!"}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello!"}
# name -> (conversation, tools, variables)
TALKS: dict[str, tuple[list[dict[str, Any]], list[Any] | None, dict[str, Any]]] = {
    "one turn": ([ASK], None, {}),
    "system": ([SYSTEM, ASK], None, {}),
    "several turns": ([ASK, ANSWER, ASK, ANSWER, ASK], None, {}),
    "system and turns": ([SYSTEM, ASK, ANSWER, ASK], None, {}),
    "a thought before": ([ASK, THOUGHT, ASK], None, {}),
    "without thoughts": ([ASK], None, {"enable_thinking": False}),
    "tools": ([SYSTEM, ASK], TOOLS, {}),
    "a call": ([ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}], TOOLS, {}),
    "a result": (
        [
            ASK,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "add", "tool_call_id": "call12345", "content": "2"},
        ],
        TOOLS,
        {},
    ),
    "two of one role": ([ASK, ASK], None, {}),
}


def differences(source: str, tokenizer: Path, work: Path) -> tuple[int, list[str]]:
    """How many of TALKS the template ``source`` takes, and those whose ids differ, or that one side alone refuses.

    A template without a place for tools is not asked about them: here the model is told of them all the same.
    """
    import transformers

    shutil.copytree(tokenizer, work)
    file = work / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"chat_template": source}), encoding="utf-8")
    (work / "chat_template.jinja").unlink(missing_ok=True)
    ours = Tokenizer.open(work)
    template = ChatTemplate.open(ours, work)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(work))
    taken, wrong = 0, []
    for name, (talk, tools, variables) in TALKS.items():
        if tools is not None and "tools" not in source:
            continue
        asked = {"tools": tools, "add_generation_prompt": talk[-1]["role"] != "assistant", **variables}
        try:
            text = theirs.apply_chat_template(talk, tokenize=False, **asked)
            expected = theirs.apply_chat_template(talk, tokenize=True, return_dict=False, **asked)
        except Exception as error:  # whatever a template raises
            expected, text = None, repr(error)
        try:
            rendered = template.render(talk, **asked)
            found = ours.encode(rendered, add_special_tokens=False)
        except ToolkitError as error:
            found, rendered = None, str(error)
        taken += expected is not None
        if found != expected:
            wrong.append(f"{name}: transformers {text!r:.600}, here {rendered!r:.600}")
    return taken, wrong
