"""Machines to plan with: measured ones, or such whose times follow from what they can do and what the model asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from toolkit.artifacts.json_file import read_json
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError
from toolkit.planner.engine import Limits
from toolkit.planner.fit import fit, read_profile
from toolkit.planner.options import Demand
from toolkit.planner.step_time import StepTime

# Shares of a GPU's peak that are reached: the middle of the ranges in docs/figures/kernel-predictions.md, "The engine".
OF_BANDWIDTH, OF_CACHE, OF_COMPUTE = 0.91, 0.785, 0.76
LAUNCH = 1.45e-6  # seconds of one kernel inside a graph, likewise
LAUNCHES, LAUNCHES_A_STEP = 10, 4  # kernels of a layer, and beside the layers
FREE = 0.9  # of a GPU's memory that weights and cache may take


@dataclass(frozen=True)
class Model:
    """What a model asks of a machine. ``weights_gb``: read by each step; ``operations_g``: a token, in 10^9;
    ``kv_kb``: a token in the cache; ``layers``; ``hidden``: numbers of queries of a layer, for attention in prompts."""

    weights_gb: float
    operations_g: float
    kv_kb: float
    layers: int
    hidden: int = 4096


@dataclass(frozen=True)
class Machine:
    """``price``: of an hour, in whatever money. ``time``: of an engine's steps on it. ``how``: measured, or predicted.
    ``worst``: largest relative error with which a measured one repeats its own measurements."""

    name: str
    price: float | None
    time: StepTime
    limits: Limits
    how: str
    worst: float | None = None


def measured(
    files: Sequence[str], price: float | None, demand: Demand, name: str = "this machine", named_by: str = "--profile"
) -> Machine:
    """From files of ``tool profile … --json`` that one engine on it gave. ``named_by``: see ``read_profile``."""
    rows = [row for file in files for row in read_profile(Path(file), named_by)]
    limits = _limits(demand, gpu=False)
    found = fit(rows, limits)
    return Machine(name, price, found.time, limits, f"measured, {len(rows)} runs", found.worst)


def read_machines(path: Path, demand: Demand) -> list[Machine]:
    """A JSON file: {"model": {…as Model}, "machines": [{name, price, profile: [files]} or {name, price, memory_gb,
    bandwidth_gb_s, tflops}]}. Raises UsageError that names the machine and the field."""
    try:
        data = read_json(path)
    except ToolkitError as error:
        raise UsageError(f"--machines: {error}") from None
    listed = data.get("machines") if isinstance(data, dict) else None
    if not isinstance(listed, list) or not listed:
        raise UsageError(f'--machines: {path}: expected {{"model": {{…}}, "machines": [{{"name": …}}, …]}}')
    return [_machine(path, entry, data.get("model"), demand) for entry in listed]


def _machine(path: Path, entry: Any, model: Any, demand: Demand) -> Machine:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise UsageError(f"--machines: {path}: expected an object with a name, found {entry!r:.60}")
    where = f"--machines: {path}: {name}"
    known = {"name", "price", "profile", "memory_gb", "bandwidth_gb_s", "tflops"}
    if unknown := sorted(set(entry) - known):
        raise UsageError(f"{where}: expected {', '.join(sorted(known))}, found {', '.join(unknown)}")
    price = None if entry.get("price") is None else _positive(where, entry, "price")
    files = entry.get("profile")
    if files is not None:
        files = [files] if isinstance(files, str) else files
        if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
            raise UsageError(f"{where}: profile: expected names of files, found {files!r:.60}")
        return measured([str(path.parent / file) for file in files], price, demand, name, f"{where}: profile")
    if not isinstance(model, dict):
        raise UsageError(f"{where}: expected a profile, or a model in the file from which its times can be predicted")
    wanted = {f.name: _positive(f"--machines: {path}: model", {**_defaults(), **model}, f.name) for f in fields(Model)}
    asked = Model(
        wanted["weights_gb"], wanted["operations_g"], wanted["kv_kb"], int(wanted["layers"]), int(wanted["hidden"])
    )
    memory, bandwidth, tflops = (_positive(where, entry, key) for key in ("memory_gb", "bandwidth_gb_s", "tflops"))
    return predicted(name, price, asked, memory, bandwidth, tflops, demand)


def predicted(
    name: str, price: float | None, model: Model, memory: float, bandwidth: float, tflops: float, demand: Demand
) -> Machine:
    """A GPU by the formula of docs/figures/kernel-predictions.md: a step takes as long as reading the weights or
    computing its tokens, whichever is longer, and reading the cache, and starting its kernels. Raises ToolkitError
    where the weights do not fit."""
    room = memory * FREE - model.weights_gb
    if room <= 0:
        raise ToolkitError(
            f"--machines: {name}: memory: the weights take {model.weights_gb:g} GB of {memory:g} GB, of which "
            f"{FREE:.0%} are for weights and cache; use a machine with more, or fewer bits"
        )
    read = model.weights_gb / (bandwidth * OF_BANDWIDTH)
    each = model.operations_g / (tflops * 1000 * OF_COMPUTE)
    launches = (LAUNCHES * model.layers + LAUNCHES_A_STEP) * LAUNCH
    context = model.kv_kb / (bandwidth * OF_CACHE) / 1e6
    pairs = 4 * model.hidden * model.layers / (tflops * 1e12 * OF_COMPUTE)
    time = StepTime(read + launches, (read / each,), (0.0, each), context, pairs)
    limits = _limits(demand, gpu=True)
    holds = int(room * 1e6 / model.kv_kb)
    limits = replace(limits, kv_tokens=min(holds, limits.kv_tokens or holds))
    return Machine(name, price, time, limits, "predicted")


def _limits(demand: Demand, gpu: bool) -> Limits:
    paced = demand.paced == "yes" or (demand.paced == "auto" and not gpu)
    return Limits(demand.max_batch_size, demand.max_prefill_token_num, demand.kv_tokens, paced)


def _defaults() -> dict[str, float]:
    return {"hidden": 4096}


def _positive(where: str, entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        told = "nothing" if value is None else repr(value)
        raise UsageError(f"{where}: {key}: expected a number above 0, found {told:.40}")
    return float(value)
