"""``tool serve api_client`` and where defaults of the sampling come from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.test_tools import Echo
from toolkit.commands.main import main
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig
from toolkit.serve.client import APIClient
from toolkit.serve.generation.sampling import choose_defaults
from toolkit.serve.remote import RemoteModel


@pytest.fixture
def client(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, str, str]]:
    """``tool serve api_client ARGS`` with ``text`` piped into it -> exit code, standard output, standard error."""

    def run(*args: str, text: str = "") -> tuple[Any, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        with pytest.raises(SystemExit) as left:
            main(["serve", "api_client", *args])
        return left.value.code, *capsys.readouterr()

    return run


def test_thoughts_are_shown_as_models_write_them(start: Any, client: Any) -> None:
    server = start(template=Echo(None, "qwen3"))
    answer = "<think>\nHm.\n</think>\n\nWell."
    assert client(server.url, "-p", answer)[1] == f"{answer}\n"


def test_one_answer(start: Any, client: Any, tmp_path: Path) -> None:
    server = start(api_keys=["k"])
    code, out, err = client(server.url, "--api-key", "k", "-p", "abc")
    assert (code, out) == (0, "[user]abc\n") and err.startswith("9 tokens, ")
    assert client(server.url, "--api-key", "k", "--system", "Be odd.", text="abc\n")[1] == "[system]Be odd.[user]abc\n"
    assert client(f"{server.url}/v1", "--api-key", "k", "-p", "abc", "--temperature", "0.2", "--max-new-tokens", "4")[1]
    drawn = server.engine.seen[-1][1]
    assert (drawn.temperature, drawn.top_k, drawn.max_new_tokens) == (0.2, 50, 4)
    assert "--top-p" in client(server.url, "-p", "abc", "--top-p", "7")[2]
    _, config = server.engine.seen[0]
    assert config.greedy and config.max_new_tokens == 512 and "the server's sampling" in err
    warm = tmp_path / "generation_config.json"
    warm.write_text('{"do_sample": true, "temperature": 0.25}')
    other = start(generation_config=str(warm))
    client(other.url, "-p", "abc")
    assert other.engine.seen[0][1].temperature == 0.25  # not ours: what that server does by itself


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["URL", "-p", "x", "--model-name", "other"], 1, "--model-name other: found echo there"),
        (["127.0.0.1:1", "-p", "x"], 2, "expected the address of a server"),
        (["http://[::1", "-p", "x"], 2, "expected the address of a server"),
        (["http://127.0.0.1:1", "-p", "x"], 1, "cannot be reached"),
        (["URL"], 2, "standard input"),
        (["URL", "-p", " "], 2, "--prompt"),
    ],
)
def test_errors_are_one_line(start: Any, client: Any, args: list[str], code: int, says: str) -> None:
    server = start()
    found = client(*(server.url if a == "URL" else a for a in args))
    assert found[:2] == (code, "") and says in found[2] and found[2].count("\n") == 1


def test_a_wrong_key_and_a_broken_engine(start: Any, client: Any) -> None:
    locked = client(start(api_keys=["k"]).url, "-p", "abc")
    assert locked[0] == 1 and "401" in locked[2] and locked[2].count("\n") == 1
    code, out, err = client(start(engine={"fail_after": 8}).url, "-p", "abc")
    assert (code, out) == (1, "[user]ab\n") and "the runner broke" in err


def test_settings_reach_the_server_and_leaving_early_ends_the_request(start: Any) -> None:
    server = start(engine={"delay": 0.02})
    model = RemoteModel(APIClient(server.url))
    config = GenerationConfig(
        do_sample=True, temperature=0.3, top_k=7, random_seed=5, stop_words=["q"], max_new_tokens=9
    )
    pieces = model.stream_infer([{"role": "user", "content": "abcdefghijk"}], gen_config=config)
    assert next(pieces).text == "["
    sent = server.engine.seen[0][1]
    assert (sent.temperature, sent.top_k, sent.random_seed, sent.max_new_tokens) == (0.3, 7, 5, 9)
    assert "q" in sent.stop_words
    pieces.close()
    server.wait(lambda: not server.engine.running)
    greedy = GenerationConfig(max_new_tokens=3)
    whole = list(model.stream_infer([{"role": "user", "content": "abc"}], gen_config=greedy))
    assert server.engine.seen[1][1].greedy and whole[-1].finish_reason == "length"
    assert whole[-1].generate_token_len == 3 and "".join(r.text for r in whole) == "[us"


def test_defaults_are_chosen(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for directory, temperature in ((own, 0.1), (other, 0.2)):
        directory.mkdir()
        found = {"do_sample": True, "temperature": temperature, "pad_token_id": 0}
        (directory / "generation_config.json").write_text(json.dumps(found))
    choose = choose_defaults
    assert choose("auto", own).temperature == 0.1
    assert choose("auto", tmp_path) == choose("toolkit", own) == choose("auto", None)
    assert choose("toolkit", own).greedy
    assert choose(str(other), own).temperature == choose(str(other / "generation_config.json"), None).temperature == 0.2
    with pytest.raises(UsageError, match="--generation-config nowhere: expected auto, toolkit, or"):
        choose("nowhere", own)
    with pytest.raises(UsageError, match=f"--generation-config {tmp_path}: expected"):
        choose(str(tmp_path), own)
    (other / "generation_config.json").write_text('{"do_sample": true, "top_p": 7}')
    with pytest.raises(ToolkitError, match=r"other/generation_config.json: top_p"):
        choose(str(other), own)
    (other / "generation_config.json").write_text("{")
    with pytest.raises(ToolkitError, match="not valid JSON"):
        choose(str(other), own)


def test_requests_get_the_chosen_defaults(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"do_sample": true, "temperature": 0.25, "top_k": 3}')
    server = start(generation_config=str(file))
    list(APIClient(server.url).completions_v1("echo", "abc"))
    assert (server.engine.seen[0][1].temperature, server.engine.seen[0][1].top_k) == (0.25, 3)


@pytest.mark.parametrize(
    ("fields", "greedy", "temperature"),
    [({}, True, 1.0), ({"temperature": 0.5}, False, 0.5), ({"temperature": 0}, True, 0.0), ({"n": 2}, False, 1.0)],
)
def test_a_model_that_names_no_sampling_is_greedy_until_asked(
    start: Any, fields: dict[str, Any], greedy: bool, temperature: float
) -> None:
    server = start()
    list(APIClient(server.url).completions_v1("echo", "abc", **fields))
    config = server.engine.seen[0][1]
    assert (config.greedy, config.temperature) == (greedy, temperature)
