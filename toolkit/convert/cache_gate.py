"""The gate before a rounded KV cache: what it costs this model is measured once, told, and too much refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.artifacts.cache_cost import BROKEN, CacheCost, keep_cost, read_cost, to_json
from toolkit.artifacts.engine.artifact import EngineArtifact
from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.manifest import read_manifest
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.configs.engine import AUTO, EngineConfig
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.native.packing.artifact import CPU_TARGET, open_packed

Progress = Callable[[int, int], None]


def measure_cache(artifact: EngineArtifact, tokenizer: Tokenizer, progress: Progress | None = None) -> dict[str, Any]:
    """Of each layer, as a manifest has it. ``progress``: see ``cache_cost``. Raises ToolkitError where the model cannot
    be measured."""
    return to_json(_measured(artifact, tokenizer, by_layer=True, progress=progress))


def check_cache(path: Path, config: EngineConfig, tell: Callable[[str], None], *, force: bool) -> None:
    """Before a model is started with ``quant_policy`` 4, 44 or "auto": see to it that there is a measure, kept at home
    where its manifest has none, and ``tell`` what the policy costs. An artifact for another processor, and a model that
    is not packed, are started without: that is told too.

    Raises UsageError for a policy that costs ``BROKEN`` or more, unless ``force``.
    """
    policy = config.quant_policy
    try:
        known = _known(path, tell, by_layer=policy == AUTO)
    except ToolkitError as error:
        tell(f"--quant-policy {policy}: what it costs is not known: {error}")
        return
    cost = None if policy == AUTO else known.of(int(policy))
    if cost is None:
        return
    if 100 * cost.loss < BROKEN:
        tell(f"--quant-policy {policy}: {cost.told()}")
    elif not force:  # else the engine warns
        raise UsageError(
            f"quant_policy: {policy} costs this model {cost.cost()}; use --quant-policy auto or "
            f"--quant-policy {known.instead()}, or add --force to have it nevertheless"
        )


def _known(path: Path, tell: Callable[[str], None], *, by_layer: bool) -> CacheCost:
    """What was measured, or is now. Raises ToolkitError where that cannot be."""
    found = read_cost(path)
    if found is not None and (found.layers or not by_layer):
        return found
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is None or manifest.kind != "engine":
        raise ToolkitError("the model is not packed for this CPU; `tool convert` packs it")
    artifact = open_engine(path)
    if artifact.ranks > 1:
        raise ToolkitError("it is packed for ranks; `tool convert --quant-policy auto` measures before it cuts")
    if artifact.target != CPU_TARGET:
        raise ToolkitError(f"measured on CPUs alone, and this artifact is for {artifact.target}")
    tell(f"measuring what bits of the KV cache cost{' in each layer' if by_layer else ''}, once for this model")
    found = _measured(artifact, Tokenizer.open(path), by_layer=by_layer)
    try:
        keep_cost(path, found)
    except ToolkitError as error:  # what was measured holds all the same
        tell(str(error))
    return found


def _measured(
    artifact: EngineArtifact, tokenizer: Tokenizer, *, by_layer: bool, progress: Progress | None = None
) -> CacheCost:
    from toolkit.convert.cache_cost import cache_cost

    return cache_cost(
        artifact.spec,
        open_packed(artifact),
        tokenizer,
        by_layer=by_layer,
        progress=progress or (lambda done, total: None),
    )
