"""Token ids of conversations are those of transformers' ``apply_chat_template``, template by template.

``scripts/interoperating/templates FOLDER`` does the same with templates of models that are not here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEMPLATES = Path(__file__).parents[2] / "templates"
OWN = ("chatglm", "deepseek-r1", "deepseek-v32", "qwen3")
# What templates of models do, in short: how they are trimmed, refuse, loop, count, write JSON, ask for the date.
SHORT = {
    "trims": (
        "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'system' %}{{ '<<S>>' + m['content'] | trim }}\n"
        "  {% else %}\n    {{- m.role + ': ' + m.content.strip() }}\n{% endif %}\n{%- endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    ),
    "refuses": (
        "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}{% set s = messages[0].content %}"
        "{% else %}{% set loop_messages = messages %}{% set s = none %}{% endif %}"
        "{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if loop.last and s is not none %}{{ s }}\n\n{% endif %}[INST] {{ m.content }} [/INST]{% endfor %}"
    ),
    "counts": (
        "{%- set ns = namespace(last=-1, thinks=enable_thinking is not defined or enable_thinking) -%}"
        "{%- for m in messages[::-1] %}{% if m.role == 'user' and ns.last < 0 %}"
        "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor -%}"
        "{% for m in messages %}{% if loop.index0 > 8 %}{% break %}{% endif %}"
        "{% set text = m.content if m.content is string else '' %}"
        "{% if '</think>' in text and loop.index0 < ns.last %}{% set text = text.split('</think>')[-1].lstrip('\\n') %}"
        "{% endif %}<|{{ m.role }}|>{{ text }}{% endfor %}{{ ns.last }}{% if not ns.thinks %}<think></think>{% endif %}"
    ),
    "tools": (
        "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '</tools>' }}"
        "{% for tool in tools %}{{ tool.function | tojson(indent=4) }}{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}({% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %})"
        "{{ call.function.arguments | tojson }}{{ call.id }}{% endfor %}{{ m.tool_call_id or '' }}\n{% endfor %}"
    ),
    "dates": (
        "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", [*OWN, *SHORT])
def test_ids_are_those_of_transformers(
    name: str, tokenizer_dirs: dict[str, Path], support: Any, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    source = SHORT[name] if name in SHORT else (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    taken, wrong = support("chat_ids").differences(source, tokenizer_dirs["byte_level"], tmp_path / "model")
    assert taken >= 5 and not wrong, "\n".join(wrong)
