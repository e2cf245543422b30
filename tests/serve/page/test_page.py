"""The page in a real browser (conftest.py), against the server around a model that says what it is told to."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from toolkit.parsers import registry

TEXT = "document.querySelector('#log').innerText"
DONE = "document.querySelector('#stop').hidden"


class Parrot:
    """A chat template with which the echoing engine says what the last message says."""

    tool_format = registry.tool_format("hermes")
    reasoning_format = registry.reasoning_format("qwen3")

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []

    def with_stops(self, config: Any) -> Any:
        return config

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        self.seen.append(messages)
        return str(messages[-1]["content"])


class Talk:
    """A browser at a server of its own, with an empty store."""

    def __init__(self, page: Any, server: Any, template: Parrot) -> None:
        self.page, self.server, self.template = page, server, template
        page.errors.clear()
        page.look(1200, 800)
        page.open(server.url)
        page.wait("document.querySelector('#model').value || !document.querySelector('#notice').hidden")

    def say(self, text: str) -> None:
        self.page.run("document.querySelector('#input').focus()")
        self.page.type(text)
        self.page.key("Enter")

    def ask(self, text: str) -> str:
        """The conversation as it is shown once the answer is whole."""
        count = self.page.run("document.querySelectorAll('.message').length")
        self.say(text)
        self.page.wait(f"document.querySelectorAll('.message').length > {count} && {DONE}")
        return str(self.page.run(TEXT))

    def press(self, label: str, nth: int = -1) -> None:
        """The button of this name in the conversation, the last one unless told otherwise."""
        self.page.run(
            f"[...document.querySelectorAll('#log button')].filter(b => b.textContent == {label!r}).at({nth}).click()"
        )

    def set(self, name: str, value: str) -> None:
        """A field of the settings."""
        field = f"document.querySelector('#settings [name={name}]')"
        self.page.run(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('change'))")


@pytest.fixture
def talk(chromium: Any, start: Callable[..., Any]) -> Callable[..., Talk]:
    def begin(engine: dict[str, Any] | None = None, **settings: Any) -> Talk:
        template = Parrot()
        return Talk(chromium, start(engine=engine, template=template, **settings), template)

    return begin


def test_a_conversation_is_shown_measured_and_kept(talk: Callable[..., Talk]) -> None:
    one = talk()
    shown = one.ask("Say **this**")
    assert "Say this" in shown and "tokens/s" in shown and "12 tokens" in shown
    assert one.page.run("document.querySelector('.assistant strong').textContent") == "this"
    one.ask("and that")
    said = [m["content"] for m in one.template.seen[-1]]
    assert said == ["Say **this**", "Say **this**", "and that"]
    one.page.open(one.server.url)  # again, as after a restart of the browser
    one.page.click("#list .item button")
    assert "and that" in one.page.wait(TEXT)
    one.page.key("o", 2 | 8)
    assert one.page.run(TEXT) == "Ask something."
    one.page.key("k", 2)
    one.page.type("nowhere")
    assert one.page.run("document.querySelectorAll('#list .item').length") == 0
    assert one.page.errors == []


def test_stop_ends_the_request_and_keeps_what_came(talk: Callable[..., Talk]) -> None:
    one = talk(engine={"delay": 0.02})
    one.say("x" * 400)
    one.page.wait("document.querySelector('.assistant > .text').textContent.length > 3")
    one.page.key("Escape")
    one.page.wait(DONE)
    one.server.wait(lambda: not one.server.engine.running)
    assert "stopped" in one.page.run(TEXT)
    kept = one.page.run("document.querySelector('.assistant > .text').textContent")
    assert 3 < len(kept) < 400
    one.press("Go on")
    one.page.wait(f"{DONE} && document.querySelector('.assistant > .text').textContent.length > {len(kept)}")
    assert one.template.seen[-1][-1] == {"role": "assistant", "content": kept}


def test_what_is_stopped_before_its_first_token_leaves_all_as_it_was(talk: Callable[..., Talk]) -> None:
    one = talk()
    for text in ("first", "second"):
        one.ask(text)
    one.server.engine.delay = 600.0
    kept = one.page.run("JSON.stringify(localStorage)")

    def stop() -> None:
        one.page.wait("!document.querySelector('#stop').hidden")
        one.server.wait(lambda: one.server.engine.running)
        assert one.page.run("JSON.stringify(localStorage)") == kept
        one.page.key("Escape")
        one.page.wait(DONE)
        assert one.page.run("JSON.stringify(localStorage)") == kept
        assert one.page.run("document.querySelectorAll('.message').length") == 4

    one.press("Retry", 0)
    stop()
    one.press("Edit", 0)
    one.page.run("document.querySelector('.edit textarea').value = 'other'")
    one.page.key("Enter")
    stop()
    assert one.page.run("document.querySelector('.edit textarea').value") == "other"
    one.page.key("Escape")
    one.say("third")
    stop()
    assert one.page.run("document.querySelector('#input').value") == "third"


def test_another_tab_s_conversations_leave_an_open_edit(talk: Callable[..., Talk]) -> None:
    one = talk()
    one.ask("mine")
    one.press("Edit", 0)
    one.page.run("document.querySelector('.edit textarea').value = 'half'")
    stored = json.dumps({"id": "1-1", "changed": 1, "messages": [{"role": "user", "content": "of another tab"}]})
    one.page.run(
        f"localStorage.setItem('toolkit.talk.1-1', {json.dumps(stored)}); "
        "dispatchEvent(new StorageEvent('storage', {key: 'toolkit.talk.1-1'}))"
    )
    assert "of another tab" in one.page.run("document.querySelector('#list').innerText")
    assert one.page.run("document.querySelector('.edit textarea').value") == "half"


def test_edit_and_retry_begin_again_from_there(talk: Callable[..., Talk]) -> None:
    one = talk()
    for text in ("first", "second"):
        one.ask(text)
    one.press("Retry", 0)
    one.page.wait(f"document.querySelectorAll('.message').length == 2 && {DONE}")
    assert [m["content"] for m in one.template.seen[-1]] == ["first"]
    one.press("Edit", 0)
    one.page.run("document.querySelector('.edit textarea').value = 'other'")
    one.page.key("Enter")
    one.page.wait(f"{TEXT}.includes('other') && {DONE}")
    assert [m["content"] for m in one.template.seen[-1]] == ["other"]
    one.page.key("ArrowUp")
    assert one.page.run("document.activeElement.value") == "other"
    one.page.key("Escape")
    assert one.page.run("document.querySelector('.edit')") is None


def test_thoughts_and_calls_are_shown_and_results_go_back(talk: Callable[..., Talk]) -> None:
    one = talk()
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    one.set("tools", json.dumps(tools))
    one.ask('<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    folded = one.page.run("[...document.querySelectorAll('.assistant .aside')].map(e => e.textContent)")
    assert folded == ["Thoughtshm", 'Calls add{\n  "a": 1\n}']
    one.page.run("document.querySelector('.assistant textarea').value = 'two'")
    one.press("Send results")
    one.page.wait(f"document.querySelectorAll('.message').length == 4 && {DONE}")
    called, result = one.template.seen[-1][-2:]
    assert called["tool_calls"][0]["function"]["name"] == "add" and called["reasoning_content"].strip() == "hm"
    assert result["content"] == "two" and result["tool_call_id"] == called["tool_calls"][0]["id"]
    one.set("tools", "")


def test_what_is_refused_leaves_all_as_it_was(talk: Callable[..., Talk]) -> None:
    one = talk(api_keys=["secret"])
    assert "API key" in one.page.run("document.querySelector('#notice').textContent")
    one.say("mine")
    one.page.wait("document.querySelector('#input').value == 'mine'")
    assert one.page.run(TEXT) == "Ask something." and one.server.engine.seen == []
    one.set("key", "secret")
    one.page.wait("document.querySelector('#model').value == 'echo'")
    one.set("tools", "no list")
    one.page.key("Enter")
    assert "JSON" in one.page.wait("document.querySelector('#notice').textContent")
    one.set("tools", "")
    one.page.run("document.querySelector('#input').focus()")
    one.page.key("Enter")
    one.page.wait(f"document.querySelectorAll('.message').length == 2 && {DONE}")
    assert "secret" not in one.page.run("JSON.stringify(localStorage)")
    one.set("key", "")


def test_settings_reach_the_model_and_what_is_empty_is_left_out(talk: Callable[..., Talk]) -> None:
    one = talk()
    values = {
        "temperature": "0.3",
        "top_k": "7",
        "seed": "5",
        "max_completion_tokens": "9",
        "stop": "END",
        "system": "Be.",
    }
    for name, value in values.items():
        one.set(name, value)
    one.ask("a long enough question")
    config = one.server.engine.seen[-1][1]
    assert (config.temperature, config.top_k, config.random_seed, config.max_new_tokens) == (0.3, 7, 5, 9)
    assert config.stop_words == ["END"] and one.template.seen[-1][0] == {"role": "system", "content": "Be."}
    assert "cut at its length" in one.page.run(TEXT)
    one.set("temperature", "3")  # out of range: not taken
    for name in values.keys() - {"temperature"}:
        one.set(name, "")
    one.ask("another")
    assert one.server.engine.seen[-1][1].temperature == 0.3 and one.server.engine.seen[-1][1].stop_words is None


def test_conversations_go_out_and_come_back(talk: Callable[..., Talk], tmp_path: Path) -> None:
    one = talk()
    one.ask("remember")
    text = one.page.run("import('/page/store.js').then((store) => store.exported())")
    one.page.run("localStorage.clear()")
    one.page.open(one.server.url)
    assert one.page.run("document.querySelectorAll('#list .item').length") == 0
    for name, content, says in (("bad.json", '{"a": 1}', "expected a file"), ("good.json", text, "1 conversations")):
        file = tmp_path / name
        file.write_text(content)
        one.page.choose("#file", [str(file)])
        one.page.wait(f"document.querySelector('#notice').textContent.includes({says!r})")
    one.page.click("#list .item button")
    assert "remember" in one.page.run(TEXT)


def test_what_a_model_writes_stays_text(talk: Callable[..., Talk]) -> None:
    one = talk()
    hostile = (
        "<img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3)) ![b](http://e.vil/p.png) `<b>`"
    )
    one.ask(hostile)
    made = one.page.run("[...document.querySelectorAll('.assistant > .text *')].map(e => e.tagName)")
    assert set(made) <= {"P", "A", "CODE"}
    links = one.page.run("[...document.querySelectorAll('.assistant a')].map(e => e.href + e.rel)")
    assert links == ["http://e.vil/p.pngnoopener noreferrer"]
    assert "<img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3))" in one.page.run(TEXT)
    assert one.page.errors == []


MARKDOWN = [
    (
        "a *b* **c _d_** ~~e~~ `f*g*`",
        "<p>a <em>b</em> <strong>c <em>d</em></strong> <del>e</del> <code>f*g*</code></p>",
    ),
    ("2 * 3 * 4, snake_case_name", "<p>2 * 3 * 4, snake_case_name</p>"),
    ("# One\ntext\n\n---", "<h1>One</h1><p>text</p><hr>"),
    (
        "- a\n- b\n  1. c\n  2. d\n\n- e",
        '<ul><li>a</li><li>b<ol start="1"><li>c</li><li>d</li></ol></li><li>e</li></ul>',
    ),
    ("# C#\n#\n## b  ##  ", "<h1>C#</h1><h1></h1><h2>b</h2>"),
    ("a|b\n---", "<p>a|b</p><hr>"),
    ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
    (
        "1. a\n- b\n  - c\n\n2. d\n  * e",
        '<ol start="1"><li>a</li></ol><ul><li>b<ul><li>c</li></ul></li></ul>'
        '<ol start="2"><li>d</li></ol><ul><li>e</li></ul>',
    ),
    ("***a*** b", "<p><em><strong>a</strong></em> b</p>"),
    ("> q\n> *r*", "<blockquote><p>q\n<em>r</em></p></blockquote>"),
    ("| a | b |\n|:-:|--:|\n| 1 | 2 |", None),
    ("a & b < c", "<p>a &amp; b &lt; c</p>"),
]


def test_markdown(talk: Callable[..., Talk]) -> None:
    page = talk().page
    show = (
        "import('/page/markdown.js').then(({show}) => {const e = document.createElement('div'); %s return e.innerHTML})"
    )
    for source, expected in MARKDOWN:
        found = page.run(show % f"show(e, {json.dumps(source)});")
        if expected is not None:
            assert found == expected
        pieces = json.dumps([source[:end] for end in range(len(source) + 1)])
        assert page.run(show % f"for (const part of {pieces}) show(e, part);") == found, (
            "as it is written, piece by piece"
        )
    cells = page.run(show % f"show(e, {json.dumps(MARKDOWN[-2][0])});")
    assert '<th class="center">a</th>' in cells and '<td class="right">2</td>' in cells
    code = page.run(show % "show(e, '```py\\nx = \"<b>\"\\n```\\nafter');")
    assert "<span>py</span>" in code and '<code>x = "&lt;b&gt;"</code>' in code and code.endswith("<p>after</p>")


def test_markdown_takes_time_by_its_length(talk: Callable[..., Talk]) -> None:
    page = talk().page
    for piece in ("**a ", "`a ", "[a](", "> ", "- ", "~~", "| ", "1. ", "_a *b "):
        page.run(
            "import('/page/markdown.js').then(({show}) => show(document.createElement('div'), "
            f"{json.dumps(piece)}.repeat({20000 // len(piece)})))"
        )
    many = 300_000  # the square of which takes minutes
    lines = [
        ("# a", " ", "b\r"),
        ("```", " ", "`"),
        ("", "~", "`\r"),
        ("", "`", ""),
        ("a|b\n", " ", "x"),
        ("", " ", "x"),
    ]
    for before, piece, after in lines:
        text = f"{json.dumps(before)} + {json.dumps(piece)}.repeat({many}) + {json.dumps(after)}"
        page.run(f"import('/page/markdown.js').then(({{show}}) => show(document.createElement('div'), {text}))")


def test_a_phone_sees_the_conversation_first(talk: Callable[..., Talk]) -> None:
    one = talk()
    one.page.look(390, 844, phone=True, dark=True)
    one.ask("wide `" + "x" * 300 + "`")
    assert one.page.run("document.documentElement.scrollWidth <= innerWidth")
    one.page.wait("getComputedStyle(document.querySelector('#side')).visibility == 'hidden'")
    one.page.click("#side-open")
    one.page.wait("getComputedStyle(document.querySelector('#side')).visibility == 'visible'")
    dark = one.page.run("getComputedStyle(document.body).backgroundColor")
    for _ in range(2):  # dark, then light
        one.page.click("#theme")
    assert one.page.run("getComputedStyle(document.body).backgroundColor") != dark


def test_pictures_are_shown_sent_and_kept(talk: Callable[..., Talk], tmp_path: Path) -> None:
    """Chosen in a file dialog, made smaller; one that is refused is not lost, and goes with the next question."""
    file, other = tmp_path / "a.png", tmp_path / "b.png"
    Image.new("RGBA", (3000, 30), (0, 0, 0, 0)).save(file)
    other.write_text("no picture")
    one = talk()
    one.page.run("window.sent = []; window.real = window.fetch; window.fetch = (path, options) => "
                 "{ if (options?.body) sent.push(JSON.parse(options.body)); return real(path, options); }")  # fmt: skip
    one.page.choose("#pictures", [str(other)])
    assert "b.png: this browser cannot read it as an image" in one.page.wait(
        "!document.querySelector('#notice').hidden && document.querySelector('#notice').textContent"
    )
    one.page.choose("#pictures", [str(file), str(file)])
    one.page.wait("document.querySelectorAll('#shown img').length == 2")
    one.page.run("document.querySelector('#shown button').click()")
    one.say("What is it?")
    told = one.page.wait("!document.querySelector('#notice').hidden && document.querySelector('#notice').textContent")
    assert "reads text alone" in told  # the stand-in does
    assert one.page.wait("document.querySelectorAll('#shown img').length") == 1
    assert one.page.run("document.querySelector('#input').value") == "What is it?"
    image, text = one.page.run("sent.at(-1).messages.at(-1).content")
    url = image["image_url"]["url"]
    made = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert text == {"type": "text", "text": "What is it?"} and url.startswith("data:image/jpeg;base64,")
    assert made.size == (1280, 13) and made.convert("RGB").getpixel((5, 5)) == (255, 255, 255)
    answer = 'data: {"choices": [{"delta": {"content": "A line."}, "finish_reason": "stop"}]}\\n\\ndata: [DONE]\\n\\n'
    one.page.run(f"window.real = async () => new Response('{answer}')")
    one.page.key("Enter")
    one.page.wait(f"document.querySelectorAll('.message').length == 2 && {DONE}")
    assert one.page.run("document.querySelectorAll('#shown img').length") == 0
    one.page.key("ArrowUp")  # an image may do without words
    one.page.run("document.querySelector('.edit textarea').value = ''")
    one.page.key("Enter")
    one.page.wait(f"!document.querySelector('.edit') && {DONE}")
    assert one.page.run("document.querySelector('.message.user .text').textContent") == ""
    one.page.open(one.server.url)  # kept with the conversation
    one.page.click("#list .item button")
    assert one.page.wait("document.querySelector('.message.user img')?.naturalWidth") == 1280
    assert not [error for error in one.page.errors if "400" not in error]


def test_pictures_that_come_at_once_are_all_there(talk: Callable[..., Talk], tmp_path: Path) -> None:
    """Pasted one after the other, before the first was read; text that comes with a picture of itself stays text."""
    file = tmp_path / "a.png"
    Image.new("RGB", (30, 30)).save(file)
    one = talk()
    data = base64.b64encode(file.read_bytes()).decode()
    one.page.run(
        f"window.bytes = Uint8Array.from(atob('{data}'), (c) => c.charCodeAt());"
        "window.file = new File([bytes], 'a.png', { type: 'image/png' });"
        "window.bring = (kind, Kind, name, text) => {"
        "  const data = new DataTransfer(); data.items.add(file); if (text) data.setData('text/plain', text);"
        "  return document.dispatchEvent(new Kind(kind, { [name]: data, bubbles: true, cancelable: true })); };"
    )
    taken = one.page.run(
        "[bring('paste', ClipboardEvent, 'clipboardData', '1\\t2'), bring('paste', ClipboardEvent, 'clipboardData'),"
        " bring('paste', ClipboardEvent, 'clipboardData'), bring('drop', DragEvent, 'dataTransfer', 'http://a/a.png')]"
    )
    assert taken == [True, False, False, False]
    assert one.page.wait("document.querySelectorAll('#shown img').length") >= 1
    one.page.wait("document.querySelectorAll('#shown img').length == 3")
