"""The loop of ``tool chat`` with a model that says what it is told to."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.chat import settings
from toolkit.chat.conversation import Conversation
from toolkit.chat.repl import Repl, Speed, answer
from toolkit.chat.terminal import TerminalScreen
from toolkit.commands.chat import answer_once
from toolkit.configs.generation import TYPED
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response


class Parrot:
    """Answers "echo: QUESTION" in two pieces; does as it is told by a few questions. Keeps what it was asked."""

    fits: int | None = None  # characters

    def context(self, messages: list[dict[str, Any]]) -> tuple[int, int] | None:
        return None if self.fits is None else (sum(len(m["content"]) for m in messages), self.fits)

    def longer(self) -> str:
        return "raise --session-len"

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.configs: list[GenerationConfig | None] = []
        self.closed = 0

    def stream_infer(
        self, prompts: list[dict[str, Any]], *, gen_config: GenerationConfig | None = None
    ) -> Iterator[Response]:
        self.asked.append([dict(m) for m in prompts])
        self.configs.append(gen_config)
        question = prompts[-1]["content"]
        try:
            if question == "fail":
                yield Response(finish_reason="error", error_message="no\nroom")
                return
            if question == "interrupt at once":
                raise KeyboardInterrupt
            yield Response(text="echo: ", generate_token_len=1)
            if question == "interrupt":
                raise KeyboardInterrupt
            reason: Any = "length" if question == "long" else "stop"
            yield Response(text=question, generate_token_len=2, finish_reason=reason)
        finally:
            self.closed += 1


class Desk:
    """A Repl with its parrot and what it wrote."""

    def __init__(self) -> None:
        self.model = Parrot()
        self.out, self.err = io.StringIO(), io.StringIO()
        self.talk = Conversation(GenerationConfig())
        self.repl = Repl(self.model, "parrot", self.talk, TerminalScreen(self.out, self.err))

    def type(self, *lines: str | type[BaseException]) -> Desk:
        left = iter(lines)

        def read() -> str:
            line = next(left, EOFError)
            if isinstance(line, str):
                return line
            raise line

        self.repl.run(read)
        return self

    @property
    def notes(self) -> str:
        return self.err.getvalue()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_answers_go_out_and_speed_goes_to_standard_error(desk: Desk) -> None:
    desk.type("hello", "again")
    assert desk.out.getvalue() == "echo: hello\necho: again\n"
    assert desk.notes.count("2 tokens") == 2
    assert desk.model.asked[1] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "echo: hello"},
        {"role": "user", "content": "again"},
    ]


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit", "EXIT ", EOFError])
def test_ways_to_leave(desk: Desk, word: Any) -> None:
    desk.type("hello", word, "never asked")
    assert len(desk.model.asked) == 1


def test_ctrl_c_stops_the_answer_and_keeps_the_program(desk: Desk) -> None:
    desk.type(KeyboardInterrupt, "interrupt", "hello", "interrupt at once")
    assert desk.out.getvalue().startswith("echo: \necho: hello\n")
    assert "stopped" in desk.notes
    assert [m["content"] for m in desk.talk.turns] == ["interrupt", "echo: ", "hello", "echo: hello"]
    assert desk.model.closed == 3


def test_a_failure_is_one_line_and_takes_the_question_back(desk: Desk) -> None:
    desk.type("fail", "hello")
    assert "no room\n" in desk.notes
    assert [m["content"] for m in desk.talk.turns] == ["hello", "echo: hello"]


def test_an_answer_that_was_cut_says_so(desk: Desk) -> None:
    desk.type("/set max_new_tokens 2", "long")
    assert "cut at 2 tokens" in desk.notes
    desk.type("/set max_new_tokens 9", "long")
    assert "context was full" in desk.notes


def test_blank_lines_do_nothing_and_several_lines_are_one_question(desk: Desk) -> None:
    desk.type("", "   ", "two\nlines", "/usr/bin\nis a path")
    assert [a[-1]["content"] for a in desk.model.asked] == ["two\nlines", "/usr/bin\nis a path"]


def test_system(desk: Desk) -> None:
    desk.type("/system", "/system Be kind.\nAnd brief.", "hello", "/system -", "hello")
    assert desk.model.asked[0][0] == {"role": "system", "content": "Be kind.\nAnd brief."}
    assert desk.model.asked[1][0]["role"] == "user"
    assert "no system text" in desk.notes


def test_set(desk: Desk) -> None:
    desk.type("/set temperature 0.5", "/set top-k=7", "/set seed 3", r"/set stop \n\né", "hello")
    config = desk.model.configs[0]
    assert config is not None and not config.greedy
    assert (config.temperature, config.top_k, config.random_seed, config.stop_words) == (0.5, 7, 3, ["\n\né"])
    for line in ("/set stop a=b", "/set stop=a=b", "/set stop = a=b"):
        desk.type(line)
        assert desk.talk.config.stop_words == ["a=b"]
    desk.type("/set temperature 0")
    assert desk.talk.config.greedy
    desk.type("/set")
    assert all(name in desk.notes for name in TYPED)


@pytest.mark.parametrize(
    "line",
    ["/set nonsense 1", "/set top_p 7", "/set top_k many", "/set do_sample maybe", "/set seed", "/nonsense",
     "/image", "/video", "/save", "/load", "/load /no/such/file", "/save /no/such/folder/file", "/retry",
     "/save ~nobody-of-this-name/file", "/load ~nobody-of-this-name/file", f"/save {'x' * 300}", f"/load {'x' * 300}"],
)  # fmt: skip
def test_mistakes_are_one_line_and_change_nothing(desk: Desk, line: str) -> None:
    desk.type(line)
    assert desk.notes.count("\n") == 1 and len(desk.notes) > 10
    assert desk.talk.config == GenerationConfig() and desk.talk.turns == []
    assert desk.model.asked == []


def test_end_ends_the_session_as_in_lmdeploy(desk: Desk) -> None:
    desk.type("hello", "end", "anew")
    assert desk.model.asked == [[{"role": "user", "content": q}] for q in ("hello", "anew")]


def test_clear_and_help(desk: Desk) -> None:
    desk.type("hello", "/clear", "/help", "anew")
    assert len(desk.model.asked[1]) == 1
    assert all(name in desk.notes for name in ("/system", "/set", "/clear", "/save", "/load", "/retry", "/exit"))


def test_retry_asks_again_with_the_next_seed(desk: Desk) -> None:
    desk.type("hello", "/retry", "/set temperature 1", "/set seed 4", "/retry")
    assert [a[-1]["content"] for a in desk.model.asked] == ["hello"] * 3
    assert len(desk.talk.turns) == 2
    assert "greedy" in desk.notes
    last = desk.model.configs[-1]
    assert last is not None and last.random_seed == 5


@pytest.mark.parametrize("how", [ToolkitError("no room"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["context", "stream_infer"])
def test_what_ends_before_it_began_leaves_the_conversation_as_it_was(desk: Desk, where: str, how: Any) -> None:
    desk.type("hello")
    before = list(desk.talk.turns)

    def ends(*given: Any, **more: Any) -> Any:
        raise how

    setattr(desk.model, where, ends)
    desk.type("/retry", "again")
    assert desk.talk.turns == before
    assert desk.notes.count("no room" if isinstance(how, ToolkitError) else "stopped") == 2


@pytest.mark.parametrize("how", [ToolkitError("no room"), KeyboardInterrupt()])
def test_what_was_shown_stays_until_it_is_asked_about_or_dropped(
    desk: Desk, how: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*given: Any, **more: Any) -> Any:
        raise how

    monkeypatch.setattr(desk.model, "checked_image", lambda source: source, raising=False)
    monkeypatch.setattr(desk.model, "stream_infer", ends)
    shown = {"type": "image_url", "image_url": {"url": "a.png"}}
    desk.type("/image a.png", "What is this?")
    assert desk.talk.shown == [shown] and desk.notes.count("the next question is about 1 image(s)") == 2
    monkeypatch.setattr(desk.model, "stream_infer", lambda *given, **more: iter([Response("It.", 1)]))
    desk.type("What is this?", "/image a.png", "/image -", "/image a.png", "/clear")
    assert not desk.talk.shown and desk.notes.count("about no image") == 1


def test_ctrl_c_ends_a_command_and_not_the_chat(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(source: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(desk.model, "checked_image", ends, raising=False)
    desk.type("hello", "/image http://slow", "again")
    assert len(desk.talk.turns) == 4 and not desk.talk.shown and "stopped" in desk.notes


def test_retry_without_a_question_takes_nothing_away(desk: Desk) -> None:
    desk.talk.say("assistant", "Hello, I am a parrot.")
    desk.type("/retry")
    assert len(desk.talk.turns) == 1 and "nothing was asked" in desk.notes


def test_save_and_load(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    desk.type("/system S", "/set temperature 0.5", "hello", f"/save {file}")
    data = json.loads(file.read_text())
    assert data["model"] == "parrot" and len(data["messages"]) == 2
    other = Desk()
    other.talk.show("a.png")  # to the conversation before
    other.type(f"/load {file}", "more")
    assert other.model.asked[0] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "echo: hello"},
        {"role": "user", "content": "more"},
    ]
    assert other.talk.config == desk.talk.config


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"model_type": "llama"}', '{"system": 3, "messages": []}', '{"messages": 3}',
     '{"messages": [{"role": "user"}]}', '{"messages": [], "settings": 3}',
     *('{"messages": [], "settings": {' + wrong + "}}" for wrong in
       ('"top_p": 9', '"top_p": "x"', '"nonsense": 1', '"do_sample": "yes"', '"stop": 3'))],
)  # fmt: skip
def test_loading_rubbish_changes_nothing(desk: Desk, tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    desk.type("hello", f"/load {tmp_path / 'x.json'}")
    assert len(desk.talk.turns) == 2 and desk.talk.config == GenerationConfig()
    assert "x.json" in desk.notes


def test_one_answer_raises_what_fails(desk: Desk) -> None:
    with pytest.raises(ToolkitError, match="room"):
        answer(desk.model, [{"role": "user", "content": "fail"}], GenerationConfig(), desk.repl.screen)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_cannot_drive_the_terminal() -> None:
    """Escape sequences are shown as marks on a terminal; a file gets exactly what the model said."""
    text = "a\x1b]0;owned\x07\x1b[2Jb\tc\nd\x9b1me"
    screen, file = Terminal(), io.StringIO()
    for out in (screen, file):
        shown = TerminalScreen(out, io.StringIO())
        shown.text(text)
        shown.end_of_text()
    assert not any(c in screen.getvalue() for c in "\x1b\x07\x9b")
    assert "b\tc\nd" in screen.getvalue()
    assert file.getvalue() == text + "\n"


def test_lines_that_end_as_in_windows_are_lines() -> None:
    screen = Terminal()
    shown = TerminalScreen(screen, io.StringIO())
    for piece in ("a\r\nb", "\r", "\nc\r\n"):
        shown.text(piece)
    shown.end_of_text()
    assert screen.getvalue() == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (None, {"do_sample": False, "repetition_penalty": 1.0}),
        ({"do_sample": True}, {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6}, {"do_sample": False}),
        ({"repetition_penalty": 1.1}, {"do_sample": False, "repetition_penalty": 1.1}),
    ],
)
def test_the_model_s_own_settings(tmp_path: Path, file: Any, expected: dict[str, Any]) -> None:
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    config = settings.of_model(tmp_path)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("file", ['{"do_sample": "yes"}', '{"do_sample": true, "top_p": 3}', "[]", "{"])
def test_the_model_s_broken_settings(tmp_path: Path, file: str) -> None:
    (tmp_path / "generation_config.json").write_text(file)
    with pytest.raises(ToolkitError, match=r"generation_config\.json"):
        settings.of_model(tmp_path)


def test_flags_over_the_model_s_settings() -> None:
    sampled = GenerationConfig(do_sample=True, temperature=0.6)
    assert settings.change(sampled).temperature == 0.6
    assert settings.change(sampled, temperature=0).greedy
    assert settings.change(sampled, do_sample=False).greedy
    assert settings.change(GenerationConfig(), top_p=0.9).do_sample
    assert not settings.change(GenerationConfig(), repetition_penalty=1.2).do_sample
    with pytest.raises(UsageError, match="top_p"):
        settings.change(sampled, top_p=2.0)


def test_speed_counts_what_came_after_the_first_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.5, 1.5, 2.5])
    monkeypatch.setattr("toolkit.chat.repl.time.perf_counter", lambda: next(now))
    speed = Speed(0.0)
    for tokens in (3, 5, 11):
        speed.count(Response(generate_token_len=tokens))
    assert speed.line() == "11 tokens, 4.0 tokens/s, first after 0.50 s"


@pytest.mark.parametrize(("pieces", "gap"), [((4,), 1.0), ((1, 2), 1e-5)])
def test_no_speed_where_nothing_was_measured(
    pieces: tuple[int, ...], gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.5 + i * gap for i in range(len(pieces))])
    monkeypatch.setattr("toolkit.chat.repl.time.perf_counter", lambda: next(now))
    speed = Speed(0.0)
    for tokens in pieces:
        speed.count(Response(generate_token_len=tokens))
    assert "tokens/s" not in speed.line()


def test_a_full_context_leaves_the_oldest_turns_out_but_not_what_is_kept(desk: Desk, tmp_path: Path) -> None:
    desk.model.fits = 100
    desk.talk.keep = 2
    desk.type(*(f"question {i}, a long one" for i in range(4)), f"/save {tmp_path / 'whole.json'}")
    sent = [m["content"] for m in desk.model.asked[-1]]
    assert sent[:2] == ["question 0, a long one", "echo: question 0, a long one"]
    assert sent[-1] == "question 3, a long one"
    assert "question 1, a long one" not in sent
    assert sum(map(len, sent)) <= 100 - 25
    assert "oldest messages are left out (the first 2 are kept; /clear forgets all)" in desk.notes
    assert len(json.loads((tmp_path / "whole.json").read_text())["messages"]) == 8  # nothing is lost
    desk.type("/clear", "again")
    assert [m["content"] for m in desk.model.asked[-1]] == ["again"]


def test_a_question_that_does_not_fit_is_refused_and_nothing_is_left_out_for_it(desk: Desk) -> None:
    desk.model.fits = 100
    desk.type("hello", "again", "much longer " * 10, "more")
    assert [len(asked) for asked in desk.model.asked] == [1, 3, 5], "the long one never went out"
    assert desk.model.asked[-1][0]["content"] == "hello" and desk.model.asked[-1][-1]["content"] == "more"
    assert "the question takes" in desk.notes and "shorten it, or raise --session-len" in desk.notes
    assert "left out" not in desk.notes


def test_one_answer_to_a_long_session_leaves_the_oldest_turns_out_too(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.model.fits, desk.talk.keep = 100, 1
    for i in range(4):
        desk.talk.say("user", f"question {i}, a long one")
        desk.talk.say("assistant", f"answer {i}, a long one")
    answer_once(desk.model, desk.talk, "the last one")
    sent = [m["content"] for m in desk.model.asked[-1]]
    assert (sent[0], sent[-1]) == ("question 0, a long one", "the last one") and len(desk.talk.turns) == 10
    assert "oldest messages are left out (the first 1 are kept" in capsys.readouterr().err


def test_saving_over_a_file_asks_first(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    desk.type("hello", f"/save {file}")
    before = file.read_text()
    desk.type("again", f"/save {file}", "n")
    assert file.read_text() == before
    assert "replace it?" in desk.notes and "not saved" in desk.notes
    desk.type(f"/save {file}")  # the end of input is no yes
    assert file.read_text() == before
    desk.type(f"/save {file}", "y")
    assert len(json.loads(file.read_text())["messages"]) > len(json.loads(before)["messages"])


def test_a_file_of_another_kind_is_never_saved_over(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("precious")
    desk.type("hello", f"/save {file}", "y")
    assert file.read_text() == "precious"


def test_words_that_other_tools_know(desk: Desk) -> None:
    desk.type("/?", '"""\ntwo\nlines\n"""', "/bye", "unheard")
    assert "/system [TEXT]" in desk.notes
    assert [m[-1]["content"] for m in desk.model.asked] == ["two\nlines"]
