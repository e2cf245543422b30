"""What Ray Serve is told of an artifact: a file for ``serve deploy``, as ``tool serve ray --write-config`` has it."""

from __future__ import annotations

from typing import Any

from toolkit.artifacts.alike import fingerprint
from toolkit.base.ray_cluster import STORE_BYTES
from toolkit.deploy.facts import GRACE, Artifact, Memory
from toolkit.deploy.options import Deployment

VERSION = "2.60.0"  # of Ray, in the image of deploy/docker/ray.Dockerfile
OWN_MIB = 2048  # of a node beside its replica: Ray's own processes, the object store, a proxy


def facts(artifact: Artifact, asked: Deployment, device: str, memory: Memory, name: str, inside: str) -> dict[str, Any]:
    """``outside``: the file for machines that have the artifact where this one has it; ``inside``: for containers."""
    return {
        "outside": _config(artifact, asked, device, memory, name, str(artifact.file)),
        "inside": _config(artifact, asked, device, memory, name, inside),
        "version": VERSION,
        "store": STORE_BYTES,
        "own": OWN_MIB,
    }


def _config(
    artifact: Artifact, asked: Deployment, device: str, memory: Memory, name: str, model: str
) -> dict[str, Any]:
    cuda = device == "cuda"
    plan = memory.plan
    config: dict[str, Any] = {"session_len": plan.session_len, "max_batch_size": plan.max_batch_size}
    # Without threads of its own a replica takes all cores, and there may be another one beside it.
    config |= {} if cuda else {"threads": asked.cpus, "cache_max_entry_count": memory.blocks}
    config |= {"quant_policy": asked.quant_policy} if asked.quant_policy else {}
    settings = {
        "replicas": str(asked.replicas),
        "cpus": float(asked.cpus),
        "gpus": 1.0 if cuda else 0.0,
        "server_name": "0.0.0.0",
        "server_port": asked.server_port,
        "grace_period": float(GRACE),
        "log_format": "json",
    }
    told = {"name": name, "model": model, "backend": "turbomind", "config": config}
    told |= {"fingerprint": fingerprint(artifact.file)}
    application = {
        "name": "toolkit",
        "route_prefix": "/",
        "import_path": "toolkit.serve.ray:build",
        "args": {"models": [told], "settings": settings},
    }
    # A replica that hangs is ended: else it keeps its place, and those who wait for it, for the whole grace period.
    forced = {"runtime_env": {"env_vars": {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}}}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": asked.server_port},
        "controller_options": forced,
        "applications": [application],
    }
