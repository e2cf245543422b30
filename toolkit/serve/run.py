"""Runs a server in this process: port, engine, uvicorn, and a clean end on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from toolkit.artifacts.recipe import open_recipe
from toolkit.base.ending import exits_at_sigterm
from toolkit.base.lazy_dataclass import dataclass
from toolkit.chat.renderer import Renderer
from toolkit.chat.settings import describe
from toolkit.chat.template import ChatTemplate
from toolkit.configs.engine import EngineConfig
from toolkit.engine.load.ranks import leads
from toolkit.engine.load.setup import Packed
from toolkit.engine.pooling import check_pooling
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import ChatTemplateConfig
from toolkit.serve.adapter_routes import Watch
from toolkit.serve.app import create_app
from toolkit.serve.generation.parsing import Formats
from toolkit.serve.generation.sampling import choose_defaults
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.certificate import ssl_files
from toolkit.serve.http.connection import REST_S, connection_class
from toolkit.serve.http.limits import Limits
from toolkit.serve.openai.batches.store import FileStore
from toolkit.serve.options import CLIENT_GRACE_S, MAX_GRACE_S, ProxySettings, ServerSettings
from toolkit.serve.state import ServerState
from toolkit.serve.watch.log import begin as begin_log
from toolkit.serve.watch.traces import check as check_traces

if TYPE_CHECKING:
    from toolkit.engine.process.process_loop import Child
    from toolkit.serve.announce import Announcement

logger = logging.getLogger("toolkit.serve")
PRIVILEGED = 1024  # ports below it
OTHER_FILES = 128  # besides connections


@dataclass(frozen=True)
class Address:
    """Where to listen; ``grace_s``: how long requests in flight may go on after SIGTERM."""

    host: str
    port: int
    grace_s: float
    ssl_keyfile: str | None
    ssl_certfile: str | None
    log_level: str


def begin(settings: ServerSettings | ProxySettings) -> Address:
    """Have this process log as ``settings`` say, and where it is to listen. Raises UsageError."""
    level = settings.log_level.lower()
    begin_log(level, settings.log_format)
    if not settings.grace_period <= MAX_GRACE_S:
        raise UsageError(f"--grace-period: expected at most {MAX_GRACE_S} seconds, found {settings.grace_period:g}")
    keyfile, certfile = ssl_files(settings)
    return Address(settings.server_name, settings.server_port, settings.grace_period, keyfile, certfile, level)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening: a port in use is found before a model is loaded.

    Raises ToolkitError for a port in use or a host that is not this machine's.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"--server-port: expected 0 to 65535 (0 = any free port), found {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:  # the latter of a name with two dots in a row
        told = getattr(error, "strerror", None) or error
        raise ToolkitError(f"--server-name {host}: not an address of this machine ({told})") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _no_port(error, host, port) from error
    if 0 < port < PRIVILEGED:
        logger.warning(
            "--server-port %d: below %d are ports of the system's own services, and root's alone; a proxy before this "
            "server, or another port, spares it the rights of root", port, PRIVILEGED,
        )  # fmt: skip
    return sock


def listen(sock: socket.socket) -> None:
    """Take connections from now on. Raises ToolkitError where another program, bound at the same time, was faster."""
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(2048)
    except OSError as error:
        raise _no_port(error, host, port) from error


def _no_port(error: OSError, host: str, port: int) -> ToolkitError:
    if error.errno == errno.EADDRINUSE:
        return ToolkitError(f"--server-port {port}: in use on {host}; stop the other program or choose another port")
    return ToolkitError(f"{host}:{port}: cannot listen there ({error.strerror})")


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Where clients find what listens there."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class EndedBySignal(uvicorn.Server):
    """uvicorn, except that a signal ends it with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own would raise the signal again at the end, and the process would die of it.
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self, number: int) -> None:
        """At such a signal."""
        self.handle_exit(number, None)


class _Server(EndedBySignal):
    """Requests in flight are ended after a grace period."""

    def __init__(self, config: uvicorn.Config, state: ServerState, grace_s: float) -> None:
        super().__init__(config)
        self.state = state
        self.grace_s = grace_s

    def stop(self, number: int) -> None:
        if self.state.closing:  # asked twice: at once
            self.state.abort_all()
            self.force_exit = True
            return
        self.state.closing = True
        self.should_exit = True
        if self.state.active:
            logger.warning("stopping; %d requests have %g s to finish", len(self.state.active), self.grace_s)
        asyncio.get_running_loop().call_later(self.grace_s, self.state.abort_all)


def run_app(
    app: FastAPI,
    sock: socket.socket,
    address: Address,
    ready: Callable[[str], None],
    beside: Callable[[str], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Serve ``app`` on ``sock`` until SIGTERM or SIGINT. ``ready`` gets the URL just before connections are taken,
    ``beside`` too: what it returns runs meanwhile and is cancelled at the end."""
    config = uvicorn.Config(
        app,
        log_level=address.log_level,
        log_config=None,  # its lines go where ours go, to standard error
        access_log=address.log_level in ("info", "debug"),
        lifespan="off",
        timeout_keep_alive=REST_S,
        timeout_graceful_shutdown=int(address.grace_s + CLIENT_GRACE_S),
        ssl_keyfile=address.ssl_keyfile,
        ssl_certfile=address.ssl_certfile,
        http=connection_class(_as_files_allow(app.state.server.settings.limits)),
        ws="none",
        proxy_headers=False,  # whose word is taken for whom a request is from, users.py says
    )
    host, port = sock.getsockname()[:2]
    url = url_of(host, port, "https" if address.ssl_certfile else "http")
    server = _Server(config, app.state.server, address.grace_s)

    async def run() -> None:
        task = None if beside is None else asyncio.create_task(beside(url))
        await server.serve(sockets=[sock])
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    with exits_at_sigterm():  # until the loop sees to signals; from here on clients can connect
        listen(sock)
        ready(url)
        asyncio.run(run())


def _as_files_allow(limits: Limits) -> Limits:
    """``limits`` with as many connections as the process may open files, which is made as many as it may be."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return replace(limits, max_connections=max(1, min(limits.max_connections, most - OTHER_FILES)))


def serve(
    model: str,
    settings: ServerSettings,
    *,
    engine_config: EngineConfig | None = None,
    packed: Packed | None = None,
    chat_template: ChatTemplateConfig | str | None = None,
    engine_child: Child | None = None,
    renderer: Renderer | None = None,
    keys: ApiKeys | None = None,
    progress: Callable[[str], None],
    ready: Callable[[str, AsyncEngine], None],
) -> None:
    """Open ``model`` in a process of its own and serve it until SIGTERM or SIGINT.

    ``packed``, ``engine_child``: see ``AsyncEngine.open``; ``renderer``: one that was started before; ``keys``: those
    of ``settings``, where they have been read already. ``progress`` gets lines while the model loads, then ``ready``
    the URL and the engine. Raises ToolkitError or UsageError for whatever keeps it from starting; the port is tried
    first.
    """
    address = begin(settings)
    check(settings, chat_template)
    announcement = _announcement(settings)
    check_traces(settings.otlp_traces_endpoint)
    if keys is None:
        keys = ApiKeys(settings.api_keys, settings.api_key_file)
    if not leads(engine_config):  # the first machine serves: here nothing listens, and nobody is told of a server
        AsyncEngine.open(model, backend_config=engine_config, progress=progress, packed=packed)
    with (
        contextlib.closing(bind(address.host, address.port)) as sock,
        contextlib.closing(FileStore(settings.batch_dir, settings.limits)) as files,
        exits_at_sigterm(),
    ):
        renderer = renderer or Renderer()
        renderer.start()  # it comes up while the model loads
        engine = AsyncEngine.open(
            model,
            backend_config=engine_config,
            progress=progress,
            process=True,
            packed=packed,
            patience=settings.limits.engine_timeout,
            pictures_together=settings.vision_max_batch_size,
            child=engine_child,
        )
        try:
            silent = settings.disable_metrics or not (engine_config is None or engine_config.enable_metrics)
            own = replace(settings, disable_metrics=silent)
            app = app_of(engine, own, chat_template=chat_template, renderer=renderer, keys=keys, files=files)
            progress(f"sampling where a request says nothing of it: {describe(app.state.server.defaults)}")
            watch = None if own.adapter_dir is None else Watch(app.state.server, own.adapter_dir)
            if watch is not None:
                watch.look()  # so that the first request may name what is there already
            run_app(app, sock, address, lambda url: ready(url, engine), partial(_beside, app, announcement, watch))
        finally:
            engine.close()


async def _beside(app: FastAPI, announcement: Announcement | None, watch: Watch | None, url: str) -> None:
    """What a server does beside answering: it goes on with its batches, and tells the proxy of itself."""
    app.state.batches.begin()
    if watch is not None:
        app.state.adapter_watch = asyncio.create_task(watch.keep())
    if announcement is not None:
        await announcement.repeat(lambda: app.state.server.model_names, url)


def check(settings: ServerSettings, chat_template: ChatTemplateConfig | str | None) -> None:
    """Raise UsageError for what no application can be made of, before a model is loaded."""
    settings.check()
    ChatTemplate.check(chat_template)
    check_pooling(settings.pooling, "--pooling")
    Formats.check(settings.tool_call_parser, settings.reasoning_parser)
    choose_defaults(settings.generation_config, None)


def app_of(
    engine: AsyncEngine,
    settings: ServerSettings,
    *,
    chat_template: ChatTemplateConfig | str | None = None,
    renderer: Renderer | None = None,
    keys: ApiKeys | None = None,
    files: FileStore | None = None,
) -> FastAPI:
    """The application that serves ``engine`` under the model's own names, with the templates of the model and its
    adapters. Raises UsageError, ToolkitError."""
    directory = engine.tokenizer.path
    recipe = None if engine.blind else open_recipe(directory)
    picture = None if recipe is None else recipe.written
    template = ChatTemplate.open(engine.tokenizer, directory, chat_template, renderer, picture)
    name = settings.model_name or engine.model_name
    if name in engine.adapters.names:
        raise UsageError(f"--adapters: expected names other than the model's, found {name!r}")
    _check_aliases(settings.alias, name, engine.adapters.names)
    own = replace(settings, model_name=name, adapters=engine.adapters.names)
    others = ChatTemplate.of_adapters(engine.adapters.names, engine.tokenizer, directory, picture)
    for one in (template, *others.values()):
        one.parse_special |= settings.parse_special
    if (forgery := template.forgery) is not None:
        logger.warning("chat template (%s): %s", template.note, forgery)
    return create_app(engine, template, own, keys, others, files)


def _check_aliases(aliases: Sequence[str], name: str, adapters: Sequence[str]) -> None:
    """Raise UsageError for other names of the one model, called ``name``, that cannot be."""
    for entry in aliases:
        other, equals, meant = entry.partition("=")
        if not other or (equals and meant != name):
            raise UsageError(f"--alias {entry}: expected OTHER={name}")
        if other in (name, *adapters):
            raise UsageError(f"--alias {entry}: {other} is the name of a model or adapter already")


def _announcement(settings: ServerSettings) -> Announcement | None:
    """How the proxy that is to be joined is told of this server. Raises UsageError for an address that is none."""
    if settings.proxy_url is None:
        return None
    from toolkit.serve.announce import Announcement

    found = Announcement(settings.proxy_url, settings.proxy_key, settings.node_url)
    found.check()
    return found
