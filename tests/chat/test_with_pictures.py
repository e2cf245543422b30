"""Contents as the templates of models that see want them: some read parts where a user shows a picture, and text alone
elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.template import ChatTemplate

# As Llama 3.2 Vision's does it: the system's text and, beside tools, that of the first user are trimmed as they are.
MIXED = """
{%- if messages[0].role == 'system' -%}
    {{- '[system]' + messages[0].content | trim }}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {{- '[tools]' + messages[0].content | trim }}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {{- '[' + message.role + ']' -}}
    {%- if message.role == 'tool' -%}{{ message.content | tojson }}
    {%- elif message.content is string -%}{{ message.content }}
    {%- else -%}
        {%- for part in message.content -%}{{ part.text if part.type == 'text' else '<|image|>' }}{%- endfor -%}
    {%- endif -%}
{%- endfor -%}
"""
# As Idefics 3's: it knows nothing but parts.
PARTED = """
{%- for message in messages -%}
    {{- '[' + message.role + ']' -}}
    {%- for part in message.content -%}
        {%- if part.type == 'text' -%}{{ part.text }}{%- elif part.type == 'image' -%}<|image|>{%- endif -%}
    {%- endfor -%}
{%- endfor -%}
"""
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}
SHOW = {"role": "user", "content": [IMAGE, {"type": "text", "text": "it"}]}
NOW = {"id": "1", "function": {"name": "now", "arguments": "{}"}}
CALL = {"role": "assistant", "content": None, "tool_calls": [NOW]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "noon"}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("source", "messages", "tools", "expected"),
    [
        (MIXED, [SYSTEM, ASK], None, "[system]Be brief.[user]Hi"),
        (MIXED, [ASK], TOOLS, "[tools]Hi"),
        (MIXED, [ASK, CALL, RESULT], None, '[user]Hi[assistant][tool]"noon"'),
        (MIXED, [ASK, {"role": "assistant", "content": "Yo"}, SHOW], None, "[user]Hi[assistant]Yo[user]<|image|>it"),
        (PARTED, [SYSTEM, ASK], None, "[system]Be brief.[user]Hi"),
        (PARTED, [SYSTEM, SHOW], None, "[system]Be brief.[user]<|image|>it"),
    ],
)
def test_contents_are_text_where_a_template_wants_text(
    source: str, messages: Any, tools: Any, expected: str, tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tokenizer_dirs["byte_level"], path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))
    template = ChatTemplate.open(Tokenizer.open(path), path, picture="<|image|>")
    assert str(template.render(messages, tools=tools)) == expected
