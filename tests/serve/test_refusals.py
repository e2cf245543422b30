"""What a server, a proxy or replicas on Ray refuse before they start, each by its text."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.refused import refusing
from toolkit import TurbomindEngineConfig, serve
from toolkit.chat.custom import MODELS, BaseChatTemplate
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.adapter_routes import below, load
from toolkit.serve.client import APIClient
from toolkit.serve.http.access.keys import FILE_BYTES, ApiKeys
from toolkit.serve.http.certificate import ssl_files
from toolkit.serve.http.errors import ApiError
from toolkit.serve.options import ProxySettings, ServerSettings
from toolkit.serve.proxy.nodes import MOST_MODELS
from toolkit.serve.proxy.state import ProxyState
from toolkit.serve.ray.options import RaySettings
from toolkit.serve.ray.plan import Model, Plan
from toolkit.serve.remote import RemoteModel
from toolkit.serve.watch import log, traces
from toolkit.serve.weight_routes import _allowed_path

CONFIG = TurbomindEngineConfig()

refused = refusing(UsageError)


def ray_model(**changed: Any) -> Model:
    return Model(**{"name": "m", "model": "m", "backend": "turbomind", "config": {}, "chat_template": None} | changed)


def remote(name: str | None, *served: str) -> RemoteModel:
    return RemoteModel(cast(APIClient, SimpleNamespace(url="http://h:1", available_models=list(served))), name)


REFUSED: dict[str, Callable[[], object]] = {
    r"^--proxy-url: only for a server of one model$": lambda: ServerSettings(proxy_url="http://p").check(several=True),
    r"^--weight-updates-path: only with --enable-weight-updates": lambda: ServerSettings(
        weight_updates_path=Path("w")
    ).check(),
    r"^--adapter-dir none: no such directory; make it, or name another$": lambda: ServerSettings(
        adapter_dir=Path("none")
    ).check(),
    r"^--key-share: expected 0\.01 to 1, found 2$": lambda: ServerSettings(key_share=2.0).check(),
    r"^--prefix-cache-shared: expected all or user, found 'key'$": lambda: ServerSettings(
        prefix_cache_shared="key"
    ).check(),
    r"^--lowest-priority: expected -100 to 100, found -101$": lambda: ServerSettings(lowest_priority=-101).check(),
    r"^--node-url: only with --proxy-url": lambda: ServerSettings(node_url="http://n").check(),
    r"^--allow-private-media: name the hosts by --allowed-media-domains": lambda: ServerSettings(
        allow_private_media=True
    ).check(),
    r"^--serving-strategy: expected Hybrid or DistServe, found 'Other'$": lambda: ProxySettings(
        serving_strategy="Other"
    ).check(),
    r"^--ssl-keyfile: only with --ssl-certfile": lambda: ssl_files(ServerSettings(ssl_keyfile=Path("k"))),
    r"^--ssl-certfile: .* found none\.pem, which is none$": lambda: ssl_files(
        ServerSettings(ssl_certfile=Path("none.pem"))
    ),
    r"^--ssl: .* SSL_KEYFILE to name a file, found nothing$": lambda: ssl_files(ServerSettings(ssl=True)),
    r"^--log-level: expected one of critical, .*, found 'loud'$": lambda: log.begin("loud", "text"),
    r"^--log-format: expected one of text, json, found 'xml'$": lambda: log.begin("info", "xml"),
    r"^--otlp-traces-endpoint: .* found 'there:4318'$": lambda: traces.check("there:4318"),
    r"^backend: expected .*, found 'none'$": lambda: serve("m", backend=cast(Any, "none")),
    r"^serve\(\): session_len: backend_config has a field": lambda: serve("m", backend_config=CONFIG, session_len=9),
    r"^backend_config: expected an engine config, found dict$": lambda: serve("m", backend_config=cast(Any, {})),
    r"^backend: expected .* found 'odd'$": lambda: ray_model(backend="odd").engine,
    r"^models\.config\.session_len": lambda: ray_model(config={"session_len": "long"}).engine,
    r"^MODEL: expected at least one model$": lambda: Plan.of([], CONFIG, None, RaySettings()),
    r"^model_name: expected one model, found 2; leave it out$": lambda: Plan.of(
        ["a", "b"], CONFIG, None, RaySettings(model_name="x")
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_misuse_is_told_before_anything_starts(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_KEYFILE", "SSL_CERTFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=said):
        REFUSED[said]()


@pytest.mark.parametrize("name, served, said", [("b", ["a"], "b: found a there"), (None, [], "found no models there")])
def test_a_server_without_the_model_is_told(name: str | None, served: list[str], said: str) -> None:
    with pytest.raises(ToolkitError, match=f"^http://h:1: .*{said}$"):
        remote(name, *served)


def test_other_files_on_another_machine_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ToolkitError, match=r"not what it is where the deployment was made .* copy it anew$"):
        ray_model(model=str(tmp_path), fingerprint="0" * 64).check_files()


def test_a_proxy_that_shuts_down() -> None:
    state = ProxyState(ProxySettings())
    state.closing = True
    with pytest.raises(ApiError) as error:
        state.candidates(None)
    assert (error.value.status, error.value.code) == (503, "shutting_down")
    assert str(error.value) == "the proxy is shutting down; ask again later"


def test_a_node_with_too_many_models() -> None:
    told = f"status.models: expected at most {MOST_MODELS:,} names, found {MOST_MODELS + 1:,}"
    nodes = ProxyState(ProxySettings()).nodes
    assert refused(lambda: nodes.add("http://127.0.0.1:1", ["m"] * (MOST_MODELS + 1))) == told


def test_a_file_of_too_many_keys(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_bytes(b"k" * (FILE_BYTES + 1))
    told = f"--api-key-file {file}: expected one key a line, found more than {FILE_BYTES:,} bytes"
    assert refused(lambda: ApiKeys(file=file)) == told


def test_names_and_folders_of_adapters(tmp_path: Path) -> None:
    state: Any = SimpleNamespace(model_names={"m"}, adapter_turn=threading.Lock())
    told = "lora_name: 'm' is taken; unload that one first, or choose another name"
    assert refused(lambda: load(state, "m", tmp_path)) == told
    for name in ("no", "n" * 300):
        told = f"lora_path: {tmp_path / name}: no such directory"
        assert refused(lambda: load(state, "n", below(tmp_path, name))) == told  # noqa: B023
    for path in ("..", "/", "a\0b"):
        with pytest.raises(ApiError) as error:
            below(tmp_path, path)
        assert str(error.value) == f"lora_path: expected one below {tmp_path} (the server's --adapter-dir)"


@pytest.mark.parametrize("name", ["..", "a\0b", "n" * 300])
def test_paths_of_new_weights(tmp_path: Path, name: str) -> None:
    state: Any = SimpleNamespace(settings=SimpleNamespace(weight_updates_path=tmp_path))
    with pytest.raises(ApiError) as error:
        _allowed_path(state, f"{tmp_path}/{name}")
    assert str(error.value) == f"path: expected one below {tmp_path} (the server's --weight-updates-path)"


def test_a_class_of_template_in_another_process() -> None:
    @MODELS.register_module(name="of_this_process", force=True)
    class Own(BaseChatTemplate):
        pass

    told = "chat_template_config: 'of_this_process' is a Python class, which another process does not have"
    assert refused(lambda: serve("m", chat_template_config="of_this_process")) == told


@pytest.mark.parametrize(("linger", "why"), [((0, 0), "IncompleteRead"), ((1, 0), "reset")], ids=["closed", "reset"])
def test_an_answer_that_breaks_off(linger: tuple[int, int], why: str) -> None:
    read = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as caller:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
                request = b""
                while b'"prompt"' not in request:  # a connection with something unread is reset, too
                    request += caller.recv(1 << 16)
                head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                caller.sendall(head + b"a\r\ndata: {}\n\n\r\n" + b"20\r\ndata: {")
                read.wait(60)

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        pieces = APIClient(url).completions_v1(model="m", prompt="a", stream=True)
        assert next(pieces) == {}
        read.set()
        told = refused(lambda: list(pieces), ToolkitError)
    assert told.startswith(f"{url}: the answer broke off (") and why in told
