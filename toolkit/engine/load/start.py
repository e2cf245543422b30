"""From a setup to an engine loop's body that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from toolkit.artifacts.text.suppressed import suppressed_tokens
from toolkit.base import extras
from toolkit.configs.moving import EngineRole
from toolkit.engine.core import EngineCore
from toolkit.engine.drafts.draft import Draft
from toolkit.engine.load import ranks
from toolkit.engine.load.drafts.layers import OpenLayers
from toolkit.engine.load.drafts.open import open_draft_of
from toolkit.engine.load.memory_plan import MemoryPlan
from toolkit.engine.load.runner import new_weights, open_for, to_split
from toolkit.engine.load.setup import Facts, Progress, Setup
from toolkit.engine.load.share_out import share_out
from toolkit.engine.load.verify import verify_tensors
from toolkit.engine.options import EngineOptions
from toolkit.errors import ToolkitError
from toolkit.models.positions import stretched_from
from toolkit.runners.base import Runner, RunnerError

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.engine.cache.kept.moving import Moving
    from toolkit.engine.cache.kept.shelf import Shelf
    from toolkit.engine.load.drafts.open import OpenedDraft

log = logging.getLogger(__name__)


@extras.named()
def start(
    setup: Setup, open_tokenizer: Callable[[], Tokenizer] | None, progress: Progress, drafts: Sequence[Draft] = ()
) -> tuple[EngineCore, Facts]:
    """Open the runner, plan memory, load weights, allocate the cache. ``drafts``: those that guess beside the one that
    ``setup`` names. Raises ToolkitError or UsageError, one line."""
    with ExitStack() as opened:
        started = _start(setup, open_tokenizer, progress, opened, list(drafts))
        opened.pop_all()
    return started


def _start(
    setup: Setup,
    open_tokenizer: Callable[[], Tokenizer] | None,
    progress: Progress,
    opened: ExitStack,
    drafts: list[Draft],
) -> tuple[EngineCore, Facts]:
    """``opened``: gets what is to be closed where this fails."""
    config, empty = setup.config, setup.config.empty_init and setup.updated is None
    runner, why = open_for(setup)
    opened.callback(runner.close)
    read = partial(new_weights, setup, runner.spec)
    try:
        draft = open_draft_of(setup, runner)
        if draft is not None:
            opened.callback(draft.close)
        draft, memory = _planned(setup, runner, draft, progress)
        if config.kv_window is not None:
            kept = f"the first {config.kv_sinks} tokens and the last {config.kv_window}"
            progress(f"a text sees keys and values of {kept} alone (docs/how-to/endless-texts.md)")
        if setup.updated is not None:
            runner.use_weights(read(setup.updated))
        if not empty:
            _load(runner, memory, progress)
        if draft is not None:
            progress(draft.told)
            drafts.append(draft.load(memory))
    except MemoryError as e:
        raise ToolkitError(f"{setup.path}: out of memory while loading ({e}); close other programs or quantize") from e
    except RunnerError as e:
        advice = "a smaller --cache-max-entry-count or --session-len may help"
        raise ToolkitError(f"{setup.path}: the {runner.name} runner cannot start: {e}; {advice}") from e
    shelf, moving, adapters = _open_elsewhere(setup, runner, progress, opened)
    core = EngineCore(
        runner,
        EngineOptions(
            session_len=memory.session_len,
            max_batch_size=memory.max_batch_size,
            max_prefill_token_num=memory.max_prefill_token_num,
            num_blocks=memory.num_blocks,
            target_step_ms=memory.target_step_ms,
            prefix_caching=config.enable_prefix_caching,
            lookahead=None if getattr(config, "async_", 1) else False,
            pictures_together=setup.pictures_together,
            unmasking=config.unmasking,
            speculation=config.speculation,
            never=suppressed_tokens(setup.tokenizer_dir, runner.spec.vocab_size),
            check=log.isEnabledFor(logging.DEBUG),
        ),
        open_tokenizer,
        read_weights=read,
        empty=empty,
        shelf=shelf,
        adapters=adapters,
        moving=moving,
        drafts=drafts,
    )
    _load_adapters(setup, core)
    _use_sources(setup, core)
    if not empty and setup.updated is None:
        verify_tensors(setup.path, core.tell_damage)
    named = runner.name, runner.backend, runner.device, runner.dtype
    moves = () if moving is None else (moving.id, moving.address, moving.tls is not None, moving.in_common)
    return core, Facts(memory, why, "; ".join(runner.notes), *named, runner.spec.vocab_size, config.blind, *moves)


def _planned(
    setup: Setup, runner: Runner, draft: OpenedDraft | None, progress: Progress
) -> tuple[OpenedDraft | None, MemoryPlan]:
    """How memory is shared out, and what drafts then: not a layer of the model's own for which there is no room."""
    try:
        memory = share_out(setup, runner, draft)
    except ToolkitError as e:
        if not isinstance(draft, OpenLayers) or draft.asked:
            raise
        progress(f"{e}; the model runs without it")
        draft, memory = None, share_out(setup, runner, None)
    trained = stretched_from(runner.spec)
    if trained is not None and memory.session_len > trained:
        turned = f"requests of more than {trained} tokens are turned by dynamic NTK (docs/how-to/long-prompts.md)"
        memory = replace(memory, notices=(*memory.notices, turned))
    for notice in memory.notices:
        progress(notice)
    return draft, memory


def _open_elsewhere(
    setup: Setup, runner: Runner, progress: Progress, opened: ExitStack
) -> tuple[Shelf | None, Moving | None, tuple[str, ...]]:
    """What keeps blocks beside the cache, what hands them over, and what tells each adapter's blocks from others'."""
    if setup.config.kv_cache_dir is None and setup.config.role == EngineRole.Hybrid:
        return None, None, ()  # and nothing of it is imported
    from toolkit.engine.load.kept import adapter_digests, open_shelf
    from toolkit.engine.load.moving import open_moving

    shelf, moving = open_shelf(setup, runner, progress), open_moving(setup, runner, progress)
    if moving is not None:
        opened.callback(moving.close)
    return shelf, moving, () if shelf is None and moving is None else adapter_digests(setup)


def lend(setup: Setup, progress: Progress) -> None:
    """Run this machine's ranks for the first of several machines, until that one has ended. Raises ToolkitError where
    it is not there, or turns them away."""
    from toolkit.parallel.nodes import serve

    layout = ranks.layout_of(setup.config)
    nodes = ranks.nodes_of(setup.config, layout)
    assert nodes is not None
    serve(to_split(setup), layout, nodes, progress)


def _load(runner: Runner, memory: MemoryPlan, progress: Progress) -> None:
    progress(f"loading weights with the {runner.name} runner on {runner.device}")
    runner.load_weights()
    runner.allocate_cache(memory.num_blocks)
    if runner.device != "cpu":
        progress(f"preparing steps of up to {memory.max_batch_size} requests")
    runner.warm_up(memory.max_batch_size, memory.session_len, memory.max_prefill_token_num)


def _load_adapters(setup: Setup, core: EngineCore) -> None:
    """Those that had come when an engine before this one ended."""
    for number in setup.unloaded:
        core.unload_adapter(number)
    for number, path in setup.loaded.items():
        if number not in setup.unloaded:
            try:
                core.load_adapter(number, path)
            except ToolkitError as e:
                log.error("adapter %s is gone: %s", path, e)


def _use_sources(setup: Setup, core: EngineCore) -> None:
    """Engines that lent when an engine before this one ended."""
    for engine, (address, secure) in setup.sources.items():
        with suppress(ToolkitError):  # it is gone
            core.use_source(engine, address, secure)
