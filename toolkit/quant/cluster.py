"""Layers that depend on no other's result, made by tasks of Ray: who asks for them saves what they give, as if it had
made it itself. A task whose process dies is done again."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.alike import fingerprint
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.ray_cluster import connect, why
from toolkit.configs.on_ray import OnRay
from toolkit.errors import ToolkitError
from toolkit.models.sites import layer_sites
from toolkit.quant.layers.layerwise import Flow, Setting, State, saved_state
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.spill import Tensors
from toolkit.quant.layers.statistics_file import raw_state

RETRIES = 3  # of a part whose process has died
PLACE_SECONDS = 60.0  # in which a cluster that is not full has places for all
LEAST_CPU = 0.001  # a place has to take something


@dataclass(frozen=True)
class Place:
    """What each machine has: the model, beside it other files, by path with what they are here. ``threads``: that
    compute, for sums of another number of threads differ in their last bits."""

    model: str
    files: dict[str, str]
    threads: int

    @staticmethod
    def of(source: LayerSource, *others: Path) -> Place:
        model = source.path.absolute()
        files = {str(path.absolute()): fingerprint(path) for path in (model, *others)}
        return Place(str(model), files, torch.get_num_threads())

    def open(self) -> LayerSource:
        """On the machine of a task. Raises ToolkitError where files are missing or others."""
        host = socket.gethostname()
        for path, expected in self.files.items():
            if not Path(path).exists():
                raise ToolkitError(f"{path}: not on {host}; with --ray each machine needs it at the same path")
            if (found := fingerprint(Path(path))) != expected:
                raise ToolkitError(
                    f"{path}: on {host} not what it is here (fingerprint {found[:12]}, expected {expected[:12]}); "
                    "copy it anew"
                )
        torch.set_num_threads(self.threads)
        return LayerSource(Path(self.model))


def quantized(on: OnRay, place: Place, setting: Setting, indices: Sequence[int]) -> Generator[State, None, None]:
    """Implements ``Spread``. Raises ToolkitError."""
    if indices:
        with _Workers(on) as workers:
            task, told = workers.task(_quantize), workers.put(setting)
            yield from map(_unpacked, workers.results(task(place, told, index) for index in indices))


def statistics(
    on: OnRay, place: Place, hidden: Tensors, device: torch.device, missing: Sequence[int]
) -> Generator[State, None, None]:
    """What ``raw_state`` has of each layer of ``missing`` (the one after the last is the head's input). ``hidden``:
    batches of the text before the first layer; as many parts of them as there are workers go through the layers by
    themselves. Raises ToolkitError."""
    if missing:
        with _Workers(on) as workers:
            look, advance = workers.task(_look), workers.task(_advance)
            cut = -(-len(hidden) // workers.count)

            def asked() -> Iterator[Any]:
                parts = [
                    workers.put([hidden[i] for i in range(at, min(at + cut, len(hidden)))])
                    for at in range(0, len(hidden), cut)
                ]
                for index in range(missing[-1] + 1):
                    if index in missing:
                        yield look(place, device, index, *parts)
                    if index < missing[-1]:
                        parts = [advance(place, device, index, part) for part in parts]

            yield from map(_unpacked, workers.results(asked()))


@torch.inference_mode()
def _quantize(place: Place, setting: Setting, index: int) -> _Packed:
    """Raises ToolkitError where that cannot be done there, as without the native library."""
    try:
        return _pack(saved_state(place.open(), setting, index))
    except OSError as error:
        raise ToolkitError(f"--ray: on {socket.gethostname()}: {error}") from error


@torch.inference_mode()
def _advance(place: Place, device: torch.device, index: int, part: list[Tensor]) -> list[Tensor]:
    source = place.open()
    flow = Flow.between(source, part, device)
    flow.advance(index, source.spec.layers[index], source.layer(index, device))
    return list(flow.hidden)


@torch.inference_mode()
def _look(place: Place, device: torch.device, index: int, *parts: list[Tensor]) -> _Packed:
    source = place.open()
    flow = Flow.between(source, (x for part in parts for x in part), device)
    if index == len(source.spec.layers):
        return _pack(raw_state(flow.head_statistics(source.outer_weights(device)).items()))
    layer = source.spec.layers[index]
    sites = layer_sites(layer)
    grams, _ = flow.statistics(index, layer, source.layer(index, device), sites, advance=False)
    return _pack(raw_state((site.name, grams.raw(site.name)) for site in reversed(sites)))


_Packed = tuple[list[tuple[str, torch.dtype, torch.Size, Any]], Mapping[str, Any]]


def _pack(state: State) -> _Packed:
    """Tensors as bytes: torch has no pickle of float8."""
    tensors, told = state
    packed = [(name, x.dtype, x.shape, x.contiguous().flatten().view(torch.uint8).numpy()) for name, x in tensors]
    return packed, told  # whole now


def _unpacked(packed: _Packed) -> State:
    tensors, told = packed
    return ((name, torch.from_numpy(x.copy()).view(t).reshape(shape)) for name, t, shape, x in tensors), told


class _Workers:
    """Places of a cluster, while the block lasts; ``count`` tasks run at a time."""

    def __init__(self, on: OnRay) -> None:
        assert on.ray is not None
        self.count, self._on = on.ray, on

    def __enter__(self) -> _Workers:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        on = self._on
        connect(on.ray_address, self.count * on.cpus, gpus=self.count * on.gpus)
        try:
            each = {"CPU": max(on.cpus, LEAST_CPU)} | ({"GPU": on.gpus} if on.gpus else {})
            group = placement_group([each] * self.count, strategy="SPREAD")
            if not group.wait(PLACE_SECONDS):
                free = ray.available_resources()
                raise ToolkitError(
                    f"--ray {self.count}: expected as many places of {on.cpus:g} cores and {on.gpus:g} GPUs, found "
                    f"{free.get('CPU', 0):g} cores and {free.get('GPU', 0):g} GPUs free on the cluster"
                )
        except BaseException:
            ray.shutdown()
            raise
        self._options: dict[str, Any] = {
            "num_cpus": each["CPU"],
            "num_gpus": on.gpus,
            "max_retries": RETRIES,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        }
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        ray.shutdown()

    def task(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Asks for ``work`` to be done; gives a reference to what it will give."""
        import ray

        remote: Any = ray.remote(work)
        called: Callable[..., Any] = remote.options(**self._options).remote
        return called

    def put(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def results(self, references: Iterator[Any]) -> Iterator[Any]:
        """What they give, in their order; asked for as long as there is a free place, and not much sooner."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        waiting = deque(islice(references, self.count + 1))
        while waiting:
            try:
                found = ray.get(waiting.popleft())
            except RayTaskError as error:
                if isinstance(error.cause, ToolkitError):
                    raise ToolkitError(str(error.cause)) from None
                raise  # a mistake of ours
            except RayError as error:
                told = f"--ray: a part has been lost {RETRIES + 1} times ({why(error)}); the same command goes on there"
                raise ToolkitError(told) from None
            waiting.extend(islice(references, 1))
            yield found
