"""Deploys a plan to a cluster of Ray, its own or another, and takes it back on SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

from toolkit.base.ray import check_ray
from toolkit.base.ray_cluster import connect
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.ray.plan import CONTROLLER, NAME, Plan
from toolkit.serve.run import bind, url_of

LOOK_S = 1.0
PATIENCE_S = 30.0  # after which is said what replicas wait for
SLACK_S = 10.0  # beyond the grace period, in which Ray itself ends what is left
_OURS = re.compile(r"toolkit\.errors\.(UsageError|ToolkitError): (.+)")


def write_config(plan: Plan) -> None:
    """The file that ``settings`` name. Raises UsageError where it cannot be written."""
    file = plan.settings.write_config
    assert file is not None
    try:
        file.write_text(plan.config_file(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"write_config: {file}: cannot be written ({error.strerror})") from error


def serve(plan: Plan, ready: Callable[[str], None], told: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT; ``ready`` gets the URL. Requests in flight then have ``grace_period``. Raises
    ToolkitError, UsageError."""
    check_ray("tool serve ray")
    settings = plan.settings
    own = settings.ray_address is None
    port = settings.server_port
    if own:
        ApiKeys((), settings.api_key_file)
        with contextlib.closing(bind(settings.server_name, port)) as sock:
            port = sock.getsockname()[1]
    import ray
    from ray import serve as ray_serve

    told("starting Ray" if own else f"connecting to the cluster at {settings.ray_address}")
    least, most = (count * len(plan.models) for count in settings.bounds)
    connect(
        settings.ray_address,
        most * settings.cpus,
        gpus=least * settings.gpus,
        log=settings.log_level.lower() in ("debug", "info"),
    )
    served = False
    with _stopping() as stop:  # Ray has handlers of its own
        try:
            ray_serve.start(
                http_options={"host": settings.server_name, "port": port},
                controller_options=CONTROLLER,
            )
            told(f"starting {settings.replicas} replicas of {', '.join(model.name for model in plan.models)}")
            _deploy(plan, stop, told)
            if not stop.is_set():
                url = url_of(settings.server_name, port)
                if not own:
                    _check_address(url)
                served = True
                ready(url)
                stop.wait()
                told("stopping; requests in flight may end")
        finally:
            if served or not own:
                with contextlib.suppress(Exception):
                    _take_back(settings.grace_period if served else 0)
            ray.shutdown()


def _take_back(seconds: float) -> None:
    """Return when the application has ended, or after ``seconds`` and some; Ray itself waits for a minute."""
    from ray import serve as ray_serve

    end = time.monotonic() + seconds + SLACK_S
    with contextlib.suppress(TimeoutError):
        ray_serve.delete(NAME)
    while NAME in ray_serve.status().applications and time.monotonic() < end:
        time.sleep(LOOK_S)


def _deploy(plan: Plan, stop: threading.Event, told: Callable[[str], None]) -> None:
    """Return when every model has a replica, or ``stop`` is set. Raises ToolkitError."""
    from ray import serve as ray_serve

    from toolkit.serve.ray.application import application

    target = ray_serve.RunTarget(target=application(plan), name=NAME, route_prefix="/")
    ray_serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    began, waits = time.monotonic(), False
    while not stop.is_set():
        found = ray_serve.status().applications.get(NAME)
        status = "DEPLOYING" if found is None else str(found.status.value)
        if status == "RUNNING":
            return
        if status in ("DEPLOY_FAILED", "UNHEALTHY"):
            assert found is not None
            texts = [found.message, *(one.message for one in found.deployments.values())]
            raise _why("\n".join(texts))
        if found is not None and not waits and time.monotonic() - began > PATIENCE_S:
            for one in found.deployments.values():
                if one.message:
                    waits = True
                    told(" ".join(one.message.split()))
        time.sleep(LOOK_S)


def _check_address(url: str) -> None:
    """Raise ToolkitError where it is not the application that answers there: the addresses of a Serve that runs
    already stand since it was started."""
    reached = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    why, direct = "", urllib.request.build_opener(urllib.request.ProxyHandler({}))  # by no proxy of the environment
    for _ in range(10):
        try:
            with direct.open(f"{reached}/-/routes", timeout=5) as reply:
                if NAME in json.load(reply).values():
                    return
                why = "another program answers there"
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
            why = " ".join(str(error).split())
        time.sleep(LOOK_S)
    raise ToolkitError(
        f"{url}: Ray Serve does not answer there ({why}); if it runs on this cluster already, give its own "
        "--server-name and --server-port, or end it: serve shutdown"
    )


def _why(text: str) -> ToolkitError:
    """What has kept replicas from starting, as they say it."""
    if found := _OURS.search(text):
        return (UsageError if found[1] == "UsageError" else ToolkitError)(found[2].strip())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ToolkitError(f"the replicas do not start: {lines[-1] if lines else 'Ray does not say why'}")


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Set by the first signal; the second ends this at once. What else waits for a Ctrl-C, as ``tool`` does to end any
    command within a second, is not told meanwhile: replicas have to be ended, and what they answer may take its time.
    """
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise SystemExit(1)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    told = signal.set_wakeup_fd(-1)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(told)
        for number, one in before.items():
            signal.signal(number, one)
