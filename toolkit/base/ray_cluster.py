"""A cluster of Ray to work on: one that there is, or one of this machine for as long as this process lasts."""

from __future__ import annotations

import logging
import math
import os
import socket
from typing import Any

from toolkit.base.threads import usable_cores
from toolkit.errors import ToolkitError

ANSWER_SECONDS = 10.0  # of the port of a cluster: Ray itself asks one that is not there for minutes
STORE_BYTES = 200 << 20  # of Ray's object store: a request and its answer are all that goes through it
OWN = {  # of one of this process: nothing takes processor time that nobody looks at, or that waits for work
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise: whatever else runs goes before an engine
}


def connect(
    address: str | None, cores: float, option: str = "--ray-address", *, gpus: float = 0, log: bool = False
) -> None:
    """``cores``, ``gpus``: what is to be placed, for a cluster of its own; ``log``: show what its processes say. Raises
    ToolkitError."""
    import ray

    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": log}
    if address is not None:
        told = "no cluster of Ray answers there"
        try:
            if _asked(address):
                told = "Ray does not get in; each machine needs the cluster's token, ~/.ray/auth_token"
            ray.init(address=address, **common)
        except Exception as error:  # of many kinds, some of gRPC
            raise ToolkitError(f"{option} {address}: {told} ({_line(error)})") from None
        return
    for name, value in OWN.items():
        os.environ.setdefault(name, value)
    for again in (True, False):
        try:
            ray.init(
                address="local",  # without it Ray joins one that runs on this machine already
                num_cpus=max(usable_cores(), math.ceil(cores)) + 1,  # it counts, it does not measure: they may share
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                **common,
            )
            break
        except Exception as error:  # a plain one where it takes too long, as the first time on a busy machine
            if not again:
                raise ToolkitError(f"Ray does not start on this machine: {_line(error)}") from None
            ray.shutdown()
    if gpus and gpus > (found := ray.cluster_resources().get("GPU", 0)):  # they would be waited for, for ever
        ray.shutdown()
        raise ToolkitError(f"--gpus: expected {gpus:g} GPUs for all that is to run, found {found:g} on this machine")


def _asked(address: str) -> bool:
    """Whether something listens there; False where that is for Ray to say. Raises OSError and ValueError where nothing
    does."""
    if address == "auto":
        try:
            from ray._private.services import get_ray_address_from_environment  # nothing public tells it
        except ImportError:
            return False
        address = get_ray_address_from_environment(address, None)
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or "/" in host:
        return False
    socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    return True


def why(error: BaseException) -> str:
    """What was said over there by what has failed, or by Ray of a process that is gone; one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ToolkitError):
        return str(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        name, colon, rest = line.partition(": ")
        if colon and name.startswith("toolkit.errors."):
            return rest
    return lines[0][:300] if lines else type(error).__name__


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
