"""A server in a process of its own, started from Python: ``toolkit.serve(model)``, as LMDeploy has it.

The child is ``python -P -c "from toolkit.serve.background import main; main(FD)"``; not multiprocessing, which would
run the user's main script again. It ends with its parent: over the socket FD no word comes after the first but the end.
A process that the parent has forked may hold that open, so the child looks whether its parent is there, too.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.base import child_process, tls
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import plain, read
from toolkit.chat.custom import MODELS
from toolkit.configs.checks import nearest
from toolkit.configs.engine import EngineConfig
from toolkit.configs.option import check_ranges, option_of
from toolkit.engine.load.setup import CONFIGS
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import ChatTemplateConfig
from toolkit.serve.client import APIClient
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.certificate import ssl_files
from toolkit.serve.http.limits import Limits
from toolkit.serve.options import CLIENT_GRACE_S, ServerSettings, split_keys

if TYPE_CHECKING:
    from toolkit.chat.renderer import Renderer
    from toolkit.engine.process.process_loop import Child

STOP_S = 20.0  # that a server gets to end itself, beside the time that its requests get
WATCH_S = 1.0  # how often the server looks whether its parent is there


class Server(APIClient):
    """A running server, and a client of it. ``close()`` ends it, as does leaving a ``with`` block or the program."""

    direct = True  # it is on this machine: a proxy would not reach it, and would learn its key

    def __init__(
        self,
        url: str,
        api_key: str | None,
        process: subprocess.Popen[bytes],
        link: socket.socket,
        settings: ServerSettings,
    ) -> None:
        super().__init__(url, api_key)
        if (certificate := ssl_files(settings)[1]) is not None:
            self.tls = tls.alone(certificate)  # its own, whoever vouches for it
        self._process = process
        self._link = link
        self._grace_s = settings.grace_period
        self._owner = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """End the server and wait until it is gone. May be called twice. A process forked since only lets go of it."""
        atexit.unregister(self.close)
        if os.getpid() == self._owner:
            _end(self._process, self._link, self._grace_s + CLIENT_GRACE_S)
        else:
            self._link.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


S = TypeVar("S", bound=Server)


def serve(
    model_path: str,
    model_name: str | None = None,
    backend: str = "turbomind",
    backend_config: EngineConfig | None = None,
    chat_template_config: ChatTemplateConfig | str | None = None,
    server_name: str = ServerSettings.server_name,
    server_port: int = ServerSettings.server_port,
    log_level: str = "ERROR",
    api_keys: list[str] | str | None = None,
    ssl: bool = False,
    **kwargs: Any,
) -> Server:
    """Start a server of ``model_path`` in a process of its own; returns when it answers.

    model_name: what requests call it (default: the model's own name). backend: used without a backend_config.
    server_port: 0 = any free one, see ``Server.url``. ssl: by the files in SSL_KEYFILE and SSL_CERTFILE. kwargs: the
    options of a server of one model, as ``tool serve api_server`` has them, its limits too, by their names
    (``max_log_len=80``), and the fields of ``backend``'s engine config (``session_len=4096``), in place of a
    backend_config; ``inspect.signature(serve)`` has them all. Variables of the environment are not read. Raises
    UsageError or ToolkitError, as ``tool serve api_server`` would say it.
    """
    if backend not in CONFIGS:
        raise UsageError(f"backend: expected {' or '.join(CONFIGS)}, found {backend!r}")
    engine = {f.name: kwargs.pop(f.name) for f in fields(CONFIGS[backend]) if f.name in kwargs}
    if engine and backend_config is not None:
        raise UsageError(f"serve(): {min(engine)}: backend_config has a field of that name; write it there")
    config = backend_config if backend_config is not None else CONFIGS[backend](**engine)
    if not isinstance(config, tuple(CONFIGS.values())):
        raise UsageError(f"backend_config: expected an engine config, found {type(config).__name__}")
    template = chat_template_config
    name = template.model_name if isinstance(template, ChatTemplateConfig) else template
    if name is not None and name in MODELS:
        raise UsageError(f"chat_template_config: {name!r} is a Python class, which another process does not have")
    spelled = template.to_json() if isinstance(template, ChatTemplateConfig) else template
    named = {
        "model_name": model_name,
        "server_name": server_name,
        "server_port": server_port,
        "log_level": log_level,
        "api_keys": [api_keys] if isinstance(api_keys, str) else list(api_keys or ()),
        "ssl": ssl,
    }
    return launch(Order.of(str(model_path), config, spelled, _settings(named | kwargs)), Server)[0]


def _options() -> dict[str, Field[Any]]:
    """What ``serve`` takes besides its own arguments: options of a server, its limits."""
    own = [f for f in fields(ServerSettings) if option_of(f)]
    return {f.name: f for f in (*own, *fields(Limits))}


def _settings(given: dict[str, Any]) -> ServerSettings:
    """The options that Python names, limits beside the others. Raises UsageError for one that there is not, or whose
    value is of another type or out of range."""
    limits = {f.name for f in fields(Limits)}
    known = _options()
    if unknown := sorted(set(given) - set(known)):
        raise UsageError(f"serve(): unknown argument {unknown[0]!r}; {_instead(unknown[0], known)}")
    own = {name: value for name, value in given.items() if name not in limits}
    try:
        settings = read(ServerSettings, own | {"limits": {k: v for k, v in given.items() if k in limits}})
    except ValueError as e:
        raise UsageError(f"serve(): {str(e).removeprefix('limits.')}") from None
    check_ranges(settings)
    check_ranges(settings.limits)
    settings.check()
    return replace(settings, api_keys=split_keys("api_keys", settings.api_keys))


def _instead(unknown: str, known: Iterable[str]) -> str:
    """What to write for an argument that there is not."""
    for backend, kind in CONFIGS.items():
        if unknown in (f.name for f in fields(kind)):
            return f"{kind.__name__} has it: give backend={backend!r} too"
    engines = (f.name for kind in CONFIGS.values() for f in fields(kind))
    close = nearest(unknown, {*known, *engines})
    hint = f"did you mean {close!r}? " if close else ""
    return f"{hint}help(toolkit.serve) lists them"


def _signature() -> inspect.Signature:
    """That of ``serve`` with every option by its name; engine options of either backend."""
    own = inspect.signature(serve)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    engines = {f.name: f for kind in CONFIGS.values() for f in fields(kind)}
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(f), annotation=f.type)
        for name, f in (_options() | engines).items()
        if name not in own.parameters
    ]
    return own.replace(parameters=[*named, *more])


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


serve.__signature__ = _signature()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Order:
    """What a child is told to do. ``backend`` says which engine config ``config`` is; ``parent``: the process that the
    child ends with."""

    parent: int
    model: str
    backend: str
    config: dict[str, Any]
    chat_template: str | None
    settings: ServerSettings

    @staticmethod
    def of(model: str, config: EngineConfig, chat_template: str | None, settings: ServerSettings) -> Order:
        """One that this process gives."""
        backend = next(name for name, kind in CONFIGS.items() if isinstance(config, kind))
        return Order(os.getpid(), model, backend, asdict(config), chat_template, settings)


class Started:
    """A child that has imported what servers need, or is about to, and waits for its order. Raises ToolkitError where
    the system has no process for it."""

    def __init__(self) -> None:
        try:
            self.link, theirs = socket.socketpair()
            with theirs:
                self.process = child_process.start("toolkit.serve.background", theirs)
        except OSError as error:
            raise ToolkitError(f"the server's process cannot be started: {error}") from error

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """End it, whatever it does."""
        _end(self.process, self.link)


def launch(order: Order, kind: type[S], child: Started | None = None) -> tuple[S, dict[str, Any]]:
    """Start a child, or take this one, and wait until it answers: its client, and what it has told (url, memory, key).
    Raises ToolkitError."""
    child = child or Started()
    process, ours = child.process, child.link
    told: dict[str, Any] = {}
    try:
        with suppress(OSError):  # it is gone, and tells nothing
            ours.sendall(json.dumps(plain(order)).encode() + b"\n")
            with ours.makefile("rb") as lines:
                told = json.loads(lines.readline() or b"{}")
        if "url" not in told:
            kind_of_error = UsageError if told.get("usage") else ToolkitError
            raise kind_of_error(told.get("error", "the server ended before it was ready; its log says why"))
    except BaseException:
        child.close()
        raise
    return kind(told["url"], told["key"], process, ours, order.settings), told


def _end(process: subprocess.Popen[bytes], link: socket.socket, grace_s: float = 0.0) -> None:
    """Tell the child to end, whoever else holds a copy of ``link``, and wait until it is gone; ``grace_s``: how long
    its requests may go on."""
    with suppress(OSError):  # closed already
        link.shutdown(socket.SHUT_RDWR)
    link.close()
    try:
        process.wait(grace_s + STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# -- the child ----------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Serve what the parent orders until it closes its end, and tell it the URL or what went wrong."""
    child_process.ignore(signal.SIGINT)
    from toolkit.chat.renderer import Renderer
    from toolkit.engine.process.process_loop import Child
    from toolkit.serve import run  # noqa: F401  # takes longest: done before there is an order

    link = socket.socket(fileno=fd)
    engine, renderer = Child(), Renderer()
    renderer.start()
    if not (line := link.makefile("rb").readline()):  # it is not needed any more
        engine.kill()
        return
    order = read(Order, json.loads(line))

    def tell(what: dict[str, Any]) -> None:
        with suppress(OSError):
            link.sendall(json.dumps(what).encode() + b"\n")

    def follow() -> None:
        end = select.poll()
        end.register(link, select.POLLIN)
        while os.getppid() == order.parent and not end.poll(WATCH_S * 1000):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="toolkit-parent", daemon=True).start()
    try:
        _serve(order, tell, engine, renderer)
    except ToolkitError as e:
        tell({"error": str(e), "usage": isinstance(e, UsageError)})
    except Exception as e:
        tell({"error": f"{type(e).__name__}: {e}", "usage": False})
        raise


def _serve(order: Order, tell: Any, engine: Child, renderer: Renderer) -> None:
    from toolkit.serve import run

    keys = ApiKeys(order.settings.api_keys, order.settings.api_key_file)
    run.serve(
        order.model,
        order.settings,
        engine_config=read(CONFIGS[order.backend], order.config),
        chat_template=order.chat_template,
        engine_child=engine,
        renderer=renderer,
        keys=keys,
        progress=lambda line: None,
        ready=lambda url, engine: tell({"url": url, "memory": engine.plan.total, "key": keys.first}),
    )
