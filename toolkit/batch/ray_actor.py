"""Engines in actors of Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from toolkit.base.ray_cluster import connect, why
from toolkit.base.record import plain
from toolkit.batch.actors import About, Engine, Gone, Spread
from toolkit.batch.blocks import Carrier
from toolkit.batch.options import BatchSettings
from toolkit.batch.run import Answerer
from toolkit.configs.engine import EngineConfig
from toolkit.configs.on_ray import OnRay
from toolkit.errors import ToolkitError
from toolkit.serve.http.limits import Limits
from toolkit.serve.ray.plan import Model, rooted

MOST_CALLS = 16  # that an actor has at once: one or two that bring lines, and what asks whether it is there


class RayActor:
    """Implements ``toolkit.batch.actors.Actor``; one that ends is started again by Ray, somewhere."""

    def __init__(self, kind: type, arguments: tuple[Any, ...], cpus: float, gpus: float) -> None:
        remote: Any = ray.remote(kind)
        made = remote.options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=0, max_concurrency=MOST_CALLS
        )
        self._actor = made.remote(*arguments)
        self._carrier = Carrier(lambda lines: self._called(self._actor.turn.remote(lines)))

    def first(self) -> About:
        """When it has loaded. Raises ToolkitError."""
        try:
            return About(**ray.get(self._actor.about.remote()))
        except RayError as error:
            raise ToolkitError(why(error)) from None

    async def about(self) -> About:
        try:
            return About(**await self._called(self._actor.about.remote()))
        except RayTaskError as error:
            raise ToolkitError(why(error)) from None

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        return await self._carrier.ask(path, body)

    def end(self) -> None:
        ray.kill(self._actor, no_restart=False)

    @staticmethod
    async def _called(reference: Any) -> Any:
        try:
            return await reference
        except RayTaskError:
            raise  # a mistake of ours
        except (RayActorError, RayError) as error:
            raise Gone(why(error)) from None


@contextmanager
def on_ray(
    model: str,
    settings: BatchSettings,
    limits: Limits,
    actors: OnRay,
    *,
    config: EngineConfig,
    chat_template: str | None,
    progress: Callable[[str], None],
) -> Iterator[Answerer]:
    """The engines, while the block lasts. Raises UsageError, ToolkitError."""
    assert actors.ray is not None
    told = Model.of(model, config, chat_template, settings.model_name)
    progress("starting Ray" if actors.ray_address is None else f"connecting to {actors.ray_address}")
    connect(actors.ray_address, actors.ray * actors.cpus, gpus=actors.ray * actors.gpus)
    try:
        progress(f"loading {model} in {actors.ray} engines")
        made = [
            RayActor(Engine, (plain(told), plain(rooted(settings)), plain(limits)), actors.cpus, actors.gpus)
            for _ in range(actors.ray)
        ]
        found = [one.first() for one in made]
        about = found[0]
        if others := [one for one in found if one.model_name != about.model_name]:
            raise ToolkitError(f"engines have different models: {about.model_name}, {others[0].model_name}")
        places = sum(one.places for one in found)
        least = min(one.session_len for one in found)
        yield Answerer(Spread(made), about.model_name, least, places, limits)
    finally:
        ray.shutdown()
