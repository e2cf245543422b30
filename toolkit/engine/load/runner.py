"""The runner of a setup's model, or its ranks: how its options follow from the engine's, and how weights are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.cache_cost import BROKEN, read_cost
from toolkit.configs.engine import AUTO, EngineConfig, PytorchEngineConfig
from toolkit.configs.option import read_size
from toolkit.engine.load import ranks
from toolkit.engine.load.setup import Setup
from toolkit.errors import UsageError
from toolkit.models.registry import from_files
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import Runner, RunnerOptions

if TYPE_CHECKING:
    from toolkit.parallel.model import Model

log = logging.getLogger(__name__)


def open_for(setup: Setup) -> tuple[Runner, str]:
    """The runner, without weights, and why it is another than was asked for or is fastest."""
    from toolkit.runners.choose import open_runner

    config, layout = setup.config, ranks.layout_of(setup.config)
    if layout.world > 1 and config.distributed_executor_backend == "ray":
        from toolkit.parallel.on_ray import open_on_ray

        return open_on_ray(to_split(setup), layout), ""
    if layout.world > 1:
        from toolkit.parallel.choose import open_ranks

        return open_ranks(to_split(setup), layout, setup.backend, ranks.nodes_of(config, layout))
    options, how = _read_by(setup)
    families = from_files(getattr(config, "family_files", ()))
    try:
        return open_runner(setup.path, backend=setup.backend, options=options, **how, families=families)
    except UsageError as error:
        if isinstance(config, PytorchEngineConfig) and str(error).startswith("device:"):
            raise UsageError(f"device_type:{str(error).removeprefix('device:')}") from error
        raise


def to_split(setup: Setup) -> Model:
    from toolkit.parallel.model import Model

    options, how = _read_by(setup)
    files = tuple(getattr(setup.config, "family_files", ()))
    return Model(str(setup.path), options, how, files, tuple(setup.config.devices or ()))


def _read_by(setup: Setup) -> tuple[RunnerOptions, dict[str, Any]]:
    """A runner's options, and the arguments by which a model is opened for it."""
    config = setup.config
    cache, told = cache_policy(setup.path, config)
    options = RunnerOptions(
        device=config.device,
        dtype=config.dtype,
        block_size=config.block_size,
        threads=config.threads or 0,
        adapters=setup.adapters,
        adapter_memory=0 if config.adapter_memory is None else read_size("adapter_memory", config.adapter_memory),
        eager=config.eager_mode,
        batch_invariant=config.batch_invariant,
        **cache,
    )
    if told:
        log.info("%s", told)
    how: dict[str, Any] = {
        "use_logn_attn": getattr(config, "use_logn_attn", False),
        "session_len": config.session_len,
        "dynamic_rope": config.dynamic_rope,
        "kv_window": config.kv_window,
        "kv_sinks": config.kv_sinks,
        "model_format": config.model_format,
        "empty": config.empty_init,
        **_reading(config),
    }
    return options, how


def cache_policy(path: Path, config: EngineConfig) -> tuple[dict[str, Any], str]:
    """Those of ``RunnerOptions`` that say how the KV cache is rounded, by what was measured of the model, and a line on
    what it costs, "" where nothing is rounded. Raises UsageError for "auto" without a measure."""
    asked, known = config.quant_policy, read_cost(path) if config.quant_policy in (AUTO, 4, 44) else None
    if asked == AUTO:
        if known is None or not known.layers:
            raise UsageError(
                f"quant_policy auto: what {path} bears has not been measured; `tool convert MODEL --quant-policy auto "
                "--dst-path DIR` does that, or give 0, 8 or 4"
            )
        found = known.least(config.kv_loss)
        if found is None:
            return {}, f"KV cache: no rounding of this model stays within {config.kv_loss:g} %: none"
        return {"kv_layers": found.policies, "key_means": known.key_means}, f"KV cache by layer: {found.told()}"
    fields: dict[str, Any] = {"quant_policy": int(asked)}
    if known is not None:
        fields["key_means"] = known.key_means
        if (cost := known.of(int(asked))) is not None:
            if 100 * cost.loss >= BROKEN:
                instead = known.instead()
                log.warning(
                    "quant_policy %s costs this model %s; use quant_policy='auto' or %s", asked, cost.cost(), instead
                )
            return fields, f"KV cache at quant_policy {asked}: {cost.told()}"
    if asked in (4, 44):
        log.warning(
            "quant_policy %s: what it costs this model was not measured; quant_policy='auto' takes what it "
            "bears, once `tool convert MODEL --quant-policy auto --dst-path DIR` has measured it",
            asked,
        )
    return fields, ""


def _reading(config: EngineConfig) -> dict[str, Any]:
    """How a checkpoint is read, be it the model's own or new weights for it."""
    return {
        "hf_overrides": _overrides(config),
        "rope_scaling_factor": getattr(config, "rope_scaling_factor", 0.0),
        "load_format": config.load_format,
        "blind": config.blind,
    }


def new_weights(setup: Setup, spec: DecoderSpec, files: Path) -> Callable[[], Mapping[str, Any]]:
    """What a runner of ``spec`` is to load in place of the model's weights. Raises ToolkitError where it cannot be."""
    from toolkit.runners.weights.new import open_new_weights

    families = from_files(getattr(setup.config, "family_files", ()))
    return open_new_weights(setup.source or setup.path, files, spec, **_reading(setup.config), families=families)


def _overrides(config: EngineConfig) -> dict[str, Any] | None:
    """Changes of the model's config.json, the length of the blocks that it guesses among them."""
    length = config.dllm_block_length
    return config.hf_overrides if length is None else {**(config.hf_overrides or {}), "block_size": length}
