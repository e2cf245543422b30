"""A plan as an application of Ray Serve: a deployment for each model, and one in front of them."""

from __future__ import annotations

import os
import re
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from toolkit.base.record import plain
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.options import KEYS, split_keys
from toolkit.serve.ray import front
from toolkit.serve.ray.handle import Handle
from toolkit.serve.ray.options import RaySettings
from toolkit.serve.ray.plan import Model, Plan
from toolkit.serve.ray.replica import Replica
from toolkit.serve.watch.log import begin as begin_log

ROUTER = "toolkit.serve.ray.router.AffinityRouter"
MOST_CLIENTS = 1 << 16  # requests that the front has at once: it waits for replicas, and refuses by their queue
LOOK_BACK_S = 11.0  # over which queues are averaged, at least: Ray wants more than the 10 s between two of its reports
LOOK_S = 0.5  # how often a replica that is to end looks whether it has nothing left to do
TRIES = 2  # of a replica that does not come up


class Front:
    """``names``: of the models, in the order of ``handles``."""

    def __init__(self, settings: dict[str, Any], names: list[str], *handles: DeploymentHandle[Any]) -> None:
        from toolkit.base.record import read

        self._settings = read(RaySettings, settings)
        begin_log(self._settings.log_level.lower(), self._settings.log_format)
        self._models = {name: Handle(handle) for name, handle in zip(names, handles, strict=True)}

    def __serve_build_asgi_app__(self) -> FastAPI:
        given = self._settings
        keys = given.api_keys or (split_keys(KEYS, [os.environ[KEYS]]) if os.environ.get(KEYS) else ())
        return front.create_app(given, ApiKeys(keys, given.api_key_file), self._models)


def application(plan: Plan) -> serve.Application:
    """Raises UsageError."""
    settings = plain(plan.settings)
    handles = [_replicas(plan.settings, model).bind(plain(model), settings) for model in plan.models]
    deployment = serve.deployment(
        name="front",
        max_ongoing_requests=MOST_CLIENTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=LOOK_S,
        graceful_shutdown_timeout_s=plan.settings.grace_period,
    )(serve.ingress()(Front))
    return deployment.bind(settings, [model.name for model in plan.models], *handles)


def _replicas(settings: RaySettings, model: Model) -> serve.Deployment:
    least, most = settings.bounds
    count: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": settings.target_ongoing_requests,
            "upscale_delay_s": settings.upscale_delay_s,
            "downscale_delay_s": settings.downscale_delay_s,
            "look_back_period_s": max(LOOK_BACK_S, min(30.0, settings.upscale_delay_s)),
        }
        count = {"autoscaling_config": scaling}
    affine = {"affine": settings.strategy == "prefix_cache_aware"}
    router: dict[str, Any] = {"request_router_class": ROUTER, "request_router_kwargs": affine}
    return serve.deployment(
        name=re.sub(r"[^\w.-]", "_", model.name),
        **count,
        request_router_config=RequestRouterConfig(**router),
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.limits.max_queue,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        health_check_period_s=settings.health_check_period_s,
        health_check_timeout_s=settings.health_check_timeout_s,
        graceful_shutdown_wait_loop_s=LOOK_S,
        graceful_shutdown_timeout_s=settings.grace_period,
        max_constructor_retry_count=TRIES,
    )(Replica)
