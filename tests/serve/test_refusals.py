"""What a server, a proxy or replicas on Ray refuse before they start, each by its text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit import TurbomindEngineConfig, serve
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.client import APIClient
from toolkit.serve.http.certificate import ssl_files
from toolkit.serve.options import ProxySettings, ServerSettings
from toolkit.serve.ray.options import RaySettings
from toolkit.serve.ray.plan import Model, Plan
from toolkit.serve.remote import RemoteModel
from toolkit.serve.watch import log, traces

CONFIG = TurbomindEngineConfig()


def ray_model(**changed: Any) -> Model:
    return Model(**{"name": "m", "model": "m", "backend": "turbomind", "config": {}, "chat_template": None} | changed)


def remote(name: str | None, *served: str) -> RemoteModel:
    return RemoteModel(cast(APIClient, SimpleNamespace(url="http://h:1", available_models=list(served))), name)


REFUSED: dict[str, Callable[[], object]] = {
    r"^--proxy-url: only for a server of one model$": lambda: ServerSettings(proxy_url="http://p").check(several=True),
    r"^--weight-updates-path: only with --enable-weight-updates": lambda: ServerSettings(
        weight_updates_path=Path("w")
    ).check(),
    r"^--key-share: expected 0\.01 to 1, found 2$": lambda: ServerSettings(key_share=2.0).check(),
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
