"""Pictures through every front: pipeline, server, terminal."""

from __future__ import annotations

import base64
import functools
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from toolkit import GenerationConfig, PytorchEngineConfig, VisionConfig, pipeline
from toolkit.base import extras
from toolkit.chat.conversation import Conversation
from toolkit.errors import UsageError
from toolkit.models.config.fields import Fields
from toolkit.models.registry import get
from toolkit.pipeline.pipeline import Pipeline
from toolkit.serve.app import create_app
from toolkit.serve.options import ServerSettings
from toolkit.serve.state import image_rules
from toolkit.vision import images
from toolkit.vision.decoder import Decoder
from toolkit.vision.eyes import Eyes
from toolkit.vision.parts import user_content
from toolkit.vl import load_image
from toolkit.vl.constants import IMAGE_TOKEN
from toolkit.vl.utils import encode_image_base64

CONFIG = PytorchEngineConfig(session_len=400, max_batch_size=4, dtype="float32", device_type="cpu", block_size=16)
SHORT = GenerationConfig(max_new_tokens=4)
TOKENS = 16  # of a picture of the tiny model


def picture(seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8))


@pytest.fixture(scope="module")
def pipe(tiny_models: Any) -> Any:
    with pipeline(str(tiny_models("llava")), CONFIG, vision_config=VisionConfig(max_batch_size=2)) as opened:
        yield opened


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    found = [folder / f"{seed}.png" for seed in range(2)]
    for seed, file in enumerate(found):
        picture(seed).save(file)
    return found


def test_pairs_lists_and_messages(pipe: Pipeline, files: list[Path]) -> None:
    one, two = (load_image(str(file)) for file in files)
    data = f"data:image/png;base64,{encode_image_base64(one, 'PNG')}"
    parts = [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": "What is it?"}]
    forms: list[Any] = [
        (one, "What is it?"),
        (str(files[0]), "What is it?"),
        ([str(files[0])], "What is it?"),
        (data, "What is it?"),
        [{"role": "user", "content": parts}],
        (f"{IMAGE_TOKEN}\nWhat is it?", one),
    ]
    answers = pipe(forms, gen_config=SHORT)
    assert {a.finish_reason for a in answers} <= {"length", "stop"}
    assert len({tuple(a.token_ids) for a in answers}) == 1
    assert len({a.input_token_len for a in answers}) == 1 and answers[0].input_token_len > TOKENS
    both = pipe(([one, two], "What is it?"), gen_config=SHORT)
    assert both.input_token_len == answers[0].input_token_len + TOKENS + 1
    assert pipe((two, "What is it?"), gen_config=SHORT).token_ids != answers[0].token_ids


@pytest.mark.parametrize(
    ("pair", "pictures"),
    [
        (("What is it?", picture(0)), (None, "it")),
        ((picture(0), "What is it?"), ("it", None)),
        (("What is it?", "https://a.org/a.png"), (None, "https://a.org/a.png")),
        (("https://a.org/a", "What is it?"), ("https://a.org/a", None)),
        (("data:image/png;base64,AA==", "What is it?"), ("data:image/png;base64,AA==", None)),
        (("file:///a.png", "What is it?"), ("file:///a.png", None)),
        (("my photo.jpg", "What is it?"), ("my photo.jpg", None)),
        (("A.FILE", "What is it?"), ("A.FILE", None)),
        (("What is https://a.org/a.png?", "b.png"), (None, "b.png")),
        (("https://a.org/text", "b.png"), (None, "b.png")),  # both may be: the first is the text
        (("What is it?", "nowhere"), (None, "nowhere")),
        (("a" * 10_000, "b"), (None, "b")),
        ((["a.png", "b.png"], "What are they?"), ("a.png", "b.png", None)),
        (("What are they?", ["a.png", "b.png"]), (None, "a.png", "b.png")),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_pair_keeps_its_order(pair: Any, pictures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of two strings names a picture: it stands where the pair has it."""
    monkeypatch.chdir(tmp_path)
    Path("A.FILE").write_bytes(b"")
    found = user_content(pair)
    assert isinstance(found, list)
    shown = [part["image_data"]["data"] if part["type"] == "image_data" else None for part in found]
    assert tuple("it" if isinstance(one, Image.Image) else one for one in shown) == pictures


def test_the_order_of_a_pair_reaches_the_model(pipe: Pipeline, files: list[Path]) -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": str(files[0])}}]
    behind, written = pipe([("What is it?", str(files[0])), [{"role": "user", "content": parts}]], gen_config=SHORT)
    before = pipe((str(files[0]), "What is it?"), gen_config=SHORT)
    assert behind.token_ids == written.token_ids != before.token_ids
    said = pipe.chat((str(files[0]), "What is it?"), gen_config=SHORT)
    assert said.response.token_ids == before.token_ids


def test_logits_and_hidden_states_come_with_pictures(pipe: Pipeline, files: list[Path]) -> None:
    config = GenerationConfig(max_new_tokens=2, output_logits="generation", output_last_hidden_state="generation")
    answer = pipe(("What is it?", str(files[0])), gen_config=config)
    assert answer.logits.shape == (2, 320) and answer.last_hidden_state.shape == (2, 64)


def test_conversations_go_on_about_a_picture(pipe: Pipeline, files: list[Path]) -> None:
    session = pipe.chat(("What is it?", str(files[0])), gen_config=SHORT)
    assert not hasattr(session, "__next__")
    first = session.response.input_token_len
    again = pipe.chat("And why?", session)
    assert again.response.input_token_len > first
    assert len(again.history) == 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (("a", "/nowhere.png"), "no such file"),
        ((f"{IMAGE_TOKEN} {IMAGE_TOKEN} b", picture(0)), "found 2 for 1 images"),
        (f"{IMAGE_TOKEN} b", "found 1 for 0 images"),
        (("a", [None]), "expected a URL, a path"),
        (("a", [np.zeros((8, 8, 3), np.uint8)]), "expected a URL, a path, bytes or a Pillow image, found ndarray"),
        (("a", ""), "expected a URL or a path, found an empty one"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_is_wrong_is_one_line(pipe: Pipeline, prompt: Any, message: str) -> None:
    answer = pipe(prompt, gen_config=SHORT)
    assert answer.finish_reason == "error" and message in answer.error_message and "\n" not in answer.error_message


def test_pairs_that_are_none(pipe: Pipeline) -> None:
    for wrong in ((1, 2), ("a",), ("a", "b", "c")):
        with pytest.raises(UsageError, match="prompts: expected"):
            pipe(wrong)


def test_a_model_of_texts_says_so(tiny_models: Any, files: list[Path]) -> None:
    with pipeline(str(tiny_models("llama")), CONFIG) as texts:
        answer = texts(("What?", str(files[0])), gen_config=SHORT)
        assert "this model reads text alone" in answer.error_message
        with pytest.raises(UsageError, match="reads text alone"):
            texts.checked_image(str(files[0]))


def test_the_terminal_shows_pictures(pipe: Pipeline, files: list[Path], tmp_path: Path) -> None:
    talk = Conversation(SHORT)
    talk.show(pipe.checked_image(str(files[0])))
    talk.say("user", "What is it?")
    expected = pipe((str(files[0]), "What is it?"), gen_config=SHORT)
    assert pipe(talk.messages(), gen_config=SHORT).token_ids == expected.token_ids
    assert pipe.context(talk.messages()) == (expected.input_token_len, pipe.engine.session_len)
    talk.save(tmp_path / "talk.json", "m")
    other = Conversation(SHORT)
    other.load(tmp_path / "talk.json")
    assert other.messages() == talk.messages()


@pytest.fixture(scope="module")
def client(pipe: Pipeline) -> Any:
    settings = ServerSettings(model_name="tiny", allowed_local_media_path=Path("/nowhere"))
    with TestClient(create_app(pipe.engine, pipe.chat_template, settings)) as opened:
        yield opened


@pytest.mark.parametrize("hosts", [None, (), ("a.example",)])
def test_an_empty_list_of_hosts_is_no_host(hosts: tuple[str, ...] | None) -> None:
    assert image_rules(ServerSettings(allowed_media_domains=hosts)).fetching.hosts == hosts


def asked(*urls: Any, text: str = "What is it?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": url} for url in urls] + [{"type": "text", "text": text}]
    return {"model": "tiny", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": parts}]}


def data_url(seed: int) -> str:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_the_server_takes_images(client: Any, pipe: Pipeline) -> None:
    found = client.post("/v1/chat/completions", json=asked({"url": data_url(0), "detail": "low"})).json()
    expected = pipe((picture(0), "What is it?"), gen_config=SHORT)
    assert found["choices"][0]["message"]["content"] == expected.text
    assert found["usage"]["prompt_tokens"] == expected.input_token_len
    two = client.post("/v1/chat/completions", json=asked(data_url(0), {"url": data_url(1)})).json()
    assert two["usage"]["prompt_tokens"] == expected.input_token_len + TOKENS + 1


def test_pictures_beyond_a_conversation_are_not_prepared(client: Any) -> None:
    answer = client.post("/v1/chat/completions", json=asked(*[data_url(0)] * 30))
    assert answer.status_code == 400
    where, told = f"messages.0.content.{400 // TOKENS}: ", f"take {400 // TOKENS * TOKENS + TOKENS} tokens"
    assert where in answer.text and told in answer.text


@pytest.mark.parametrize(
    ("family", "option", "most"),
    [
        ("qwen2_vl", "max_pixels", 14 * 14 * 40),
        ("qwen2_vl", "min_pixels", 14 * 14 * 40),
        ("internvl", "max_dynamic_patch", 24),
        ("minicpmv", "max_slice_nums", 6),
    ],
)
def test_options_of_a_picture_have_limits(family: str, option: str, most: int) -> None:
    """Those of the model's config, as what a client asks for costs the server."""
    tiny, make = get(family).tiny[0], get(family).recipe
    assert make is not None
    eyes = Eyes(make(Fields(tiny.fields), Fields(tiny.preprocessor)))

    def asking(value: int) -> list[dict[str, Any]]:
        url = {"url": data_url(0), option: value}
        return [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]

    assert len(eyes.look(asking(most))) == 1
    with pytest.raises(UsageError, match=f"{option}: expected a whole number from 1 to {most}"):
        eyes.look(asking(most + 1))


def test_a_picture_is_prepared_once(pipe: Pipeline, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again at each turn of a conversation; a file that has changed is another one."""
    prepared: list[int] = []

    decode = Decoder.picture

    def counted(decoder: Decoder, data: bytes, *rest: Any) -> Any:
        prepared.append(Image.open(io.BytesIO(data)).width)
        return decode(decoder, data, *rest)

    monkeypatch.setattr(Decoder, "picture", counted)
    file = files[0].with_name("changing.png")
    Image.new("RGB", (33, 20), "red").save(file)
    session = pipe.chat(("What is it?", str(file)), gen_config=SHORT)
    session = pipe.chat("And why?", session, gen_config=SHORT)
    assert prepared == [33] and not session.response.error_message
    Image.new("RGB", (34, 20), "red").save(file)
    pipe.chat("And now?", session, gen_config=SHORT)
    assert prepared == [33, 34]


@pytest.mark.parametrize(
    "given", ["{", "4", "[]", "[" * 100_000, '{"image": -1}', '{"image": 1.5}', '{"sound": 1}', '{"image": true}']
)
def test_limits_of_a_kind_that_are_none(given: str) -> None:
    with pytest.raises(UsageError, match=r'^--limit-mm-per-prompt: expected \{"image": …, "video": …\}'):
        ServerSettings(limit_mm_per_prompt=given).check()


def test_limits_of_a_kind(pipe: Pipeline) -> None:
    """As vLLM has them, under that of both together."""
    with pytest.raises(
        UsageError, match=r"--limit-mm-per-prompt: expected image of at most 32 \(--max-images\), found 33"
    ):
        ServerSettings(limit_mm_per_prompt='{"image": 33}').check()
    settings = ServerSettings(model_name="tiny", limit_mm_per_prompt='{"image": 1, "video": 0}')
    settings.check()
    with TestClient(create_app(pipe.engine, pipe.chat_template, settings)) as client:
        assert client.post("/v1/chat/completions", json=asked(data_url(0))).status_code == 200
        found = client.post("/v1/chat/completions", json=asked(data_url(0), data_url(1)))
        told = found.json()["error"]["message"]
        assert found.status_code == 400 and "at most 1 image (--limit-mm-per-prompt), found 2" in told
        body = asked()
        body["messages"][0]["content"].append({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}})
        found = client.post("/v1/chat/completions", json=body)
        told = found.json()["error"]["message"]
        assert found.status_code == 400 and "at most 0 videos (--limit-mm-per-prompt), found 1" in told


def test_without_torch_the_extra_is_named(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setattr(extras, "sys", SimpleNamespace(modules={}))
    answer = pipe((picture(0), "What is it?"), gen_config=SHORT)
    assert "images: torch is not installed" in answer.error_message and "pip install" in answer.error_message


def test_anthropic_blocks(client: Any, pipe: Pipeline) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": data_url(0).partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": blocks}]}
    usage = client.post("/v1/messages", json=body).json()["usage"]
    whole = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert whole == pipe((picture(0), "What is it?"), gen_config=SHORT).input_token_len


def test_responses_take_images(client: Any, pipe: Pipeline) -> None:
    """Text and picture in their order; the next response still knows the picture."""
    parts = [{"type": "input_image", "image_url": data_url(0)}, {"type": "input_text", "text": "What is it?"}]
    body = {"model": "tiny", "max_output_tokens": 4, "temperature": 0, "input": [{"role": "user", "content": parts}]}
    first = client.post("/v1/responses", json=body).json()
    expected = pipe((picture(0), "What is it?"), gen_config=SHORT)
    assert first["output"][0]["content"][0]["text"] == expected.text
    assert first["usage"]["input_tokens"] == expected.input_token_len
    more = {"model": "tiny", "max_output_tokens": 4, "input": "And why?", "previous_response_id": first["id"]}
    assert client.post("/v1/responses", json=more).json()["usage"]["input_tokens"] > expected.input_token_len


def test_a_place_that_a_message_spells_is_text(pipe: Pipeline) -> None:
    """It makes no room for a picture: contents hold no tokens of the template's."""
    for prompt in (("a <image> b", picture(0)), "a <image> b"):
        assert pipe(prompt, gen_config=SHORT).finish_reason != "error"


@pytest.mark.parametrize(
    ("content", "role", "message"),
    [
        ("PICTURE <IMAGE_TOKEN> <IMAGE_TOKEN>", "user", "found 2 for 1 images"),
        ("<IMAGE_TOKEN>", "user", "found 1 for 0 images"),
        ("PICTURE", "system", "only a user's message takes images, found one of role system"),
        ("PICTURE", "assistant", "only a user's message takes images, found one of role assistant"),
    ],
)
def test_odd_places_are_one_line_in_every_front(
    client: Any, pipe: Pipeline, content: str, role: str, message: str
) -> None:
    shown, text = "PICTURE" in content, content.replace("PICTURE", "")
    source = {"type": "base64", "media_type": "image/png", "data": data_url(0).partition(",")[2]}
    pictures: dict[str, dict[str, Any]] = {
        "chat/completions": {"type": "image_url", "image_url": {"url": data_url(0)}},
        "messages": {"type": "image", "source": source},
        "responses": {"type": "input_image", "image_url": data_url(0)},
    }
    for path, part in pictures.items():
        written = {"type": "input_text" if path == "responses" else "text", "text": text}
        talk = [{"role": role, "content": [part, written] if shown else [written]}]
        if path == "messages" and role == "system":
            continue  # there a system prompt is a field of its own, of texts
        body = {"model": "tiny", "max_tokens": 4, "messages": talk}
        if path == "responses":
            body = {"model": "tiny", "input": talk}
        answer = client.post(f"/v1/{path}", json=body)
        told = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message in told and "\n" not in told, (path, told)
    parts = [pictures["chat/completions"]] * shown + [{"type": "text", "text": text}]
    answer = pipe([{"role": role, "content": parts}], gen_config=SHORT)
    assert message in answer.error_message and "\n" not in answer.error_message


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ({"url": "http://127.0.0.1:9/a.png"}, "not public"),
        ({"url": "file:///etc/passwd"}, "files are not read here"),
        ({"url": "/etc/passwd"}, "files are not read here (it is not below --allowed-local-media-path)"),
        ({"url": "data:image/png;base64,aGVsbG8="}, "expected a picture"),
        ({"link": 1}, "image_url"),
        (7, "image_url"),
    ],
    ids=str,
)
def test_the_server_refuses_in_one_line(client: Any, url: Any, message: str) -> None:
    found = client.post("/v1/chat/completions", json=asked(url))
    assert found.status_code == 400, found.text
    assert message in found.json()["error"]["message"] and "\n" not in found.json()["error"]["message"]


def test_a_pipeline_asks_private_addresses_where_it_may(tiny_models: Any, files: list[Path]) -> None:
    """As ``toolkit.pipeline`` is told; so may a conversation in the terminal, whose pictures it looks at."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=files[0].parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{site.server_port}/{files[0].name}"
        model = str(tiny_models("llava"))
        with pipeline(model, CONFIG, allowed_media_domains=["127.0.0.1"]) as pipe:
            refused = pipe((url, "What is it?"), gen_config=SHORT)
            assert "not public" in refused.error_message and "--allow-private-media" in refused.error_message
        with pipeline(model, CONFIG, allow_private_media=True) as pipe:
            fetched, read = pipe([(url, "What is it?"), (str(files[0]), "What is it?")], gen_config=SHORT)
            assert fetched.token_ids == read.token_ids and not fetched.error_message
            assert pipe.checked_image(url) == url
        with pipeline(model, CONFIG, allow_private_media=True, allowed_media_domains=["a.example"]) as pipe:
            assert "from a.example alone" in pipe((url, "What is it?"), gen_config=SHORT).error_message
        site.shutdown()


def test_slow_hosts_hold_up_no_other_prompt(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    release, began = threading.Event(), threading.Semaphore(0)

    def slow(*_: Any) -> bytes:
        began.release()
        release.wait(200)
        raise UsageError("too late")

    monkeypatch.setattr(images, "fetch", slow)
    with ThreadPoolExecutor(5) as pool:
        post = lambda: client.post("/v1/chat/completions", json=asked("http://slow.example/a.png")).status_code  # noqa: E731
        waiting = [pool.submit(post) for _ in range(5)]
        try:
            assert all(began.acquire(timeout=60) for _ in waiting)
            assert client.post("/v1/chat/completions", json=asked()).status_code == 200
            assert not any(one.done() for one in waiting)
        finally:
            release.set()
        assert {one.result() for one in waiting} == {400}


def test_the_pictures_of_a_request_have_one_deadline(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left, file = [], io.BytesIO()
    picture(0).save(file, "PNG")

    def fetched(url: str, most: int, rules: Any, *_: Any) -> bytes:
        left.append(rules.seconds)
        return file.getvalue()

    monkeypatch.setattr(images, "fetch", fetched)
    urls = [f"http://some.example/{i}.png" for i in range(3)]
    assert client.post("/v1/chat/completions", json=asked(*urls)).status_code == 200
    assert 10 >= left[0] > left[1] > left[2] > 0


def test_pictures_are_counted_or_refused_but_never_dropped(client: Any, pipe: Pipeline) -> None:
    messages = asked(data_url(0))["messages"]
    expected = pipe((picture(0), "What is it?"), gen_config=SHORT).input_token_len
    assert client.post("/tokenize", json={"messages": messages}).json()["count"] == expected
    refused = client.post("/v1/chat/interactive", json={"prompt": messages})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt.0.content"
