"""How the machine's memory is shared out for a setup and its open runner."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.artifacts.recipe import open_recipe
from toolkit.artifacts.text_head import longest_text
from toolkit.configs.engine import EngineConfig, PytorchEngineConfig
from toolkit.engine.load.memory_plan import MemoryPlan, Wishes, plan
from toolkit.engine.load.setup import Setup
from toolkit.engine.options import EngineOptions
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.eyes.pictures import most_patches
from toolkit.models.eyes.vision import VisionSpec
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import Runner

if TYPE_CHECKING:
    from toolkit.engine.load.drafts.open import OpenedDraft


def share_out(setup: Setup, runner: Runner, draft: OpenedDraft | None) -> MemoryPlan:
    """How memory is shared out. Raises UsageError for blocks that do not fill the cache's, ToolkitError where a picture
    that is computed whole does not fit."""
    config, spec = setup.config, runner.spec
    _check_blocks(spec, config, config.block_size)
    patches = picture_patches(setup.path, spec.vision)
    longest = spec.max_position
    if spec.encodes or spec.learned:
        longest += spec.encodes  # a text of as many tokens as it reads leaves no place for one that is drawn
        if (asked := config.session_len or 0) > longest:
            raise UsageError(
                f"session_len: found {asked}, expected at most {longest}: this model reads {spec.max_position} tokens"
            )
    texts = longest_text(setup.path)
    planned = partial(
        plan,
        block_size=config.block_size,
        vocab_size=spec.vocab_size,
        max_position=longest,
        usual=longest if texts is None else min(longest, texts + 1),
        device=runner.device,
        guessed=spec.block,
        wishes=Wishes(
            config.session_len,
            config.max_batch_size,
            step_tokens(spec, config.max_prefill_token_num),
            getattr(config, "num_gpu_blocks", 0) or config.cache_max_entry_count,
            config.target_step_ms,
            setup.pictures_together * patches,
            EngineOptions.pictures_kept * patches,
            config.memory_share,
        ),
    )
    need, groups = runner.memory(), spec.cache_groups
    memory = planned(need, groups) if draft is None else draft.plan(need, groups, planned)
    if memory.max_prefill_token_num < spec.together:
        found = f"{memory.max_prefill_token_num} prompt tokens a step fit, a picture of this model has {spec.together}"
        raise ToolkitError(f"not enough memory: {found}; free some memory or use a smaller max_batch_size")
    return memory


def _check_blocks(spec: DecoderSpec, config: EngineConfig, size: int) -> None:
    """Blocks of tokens that are guessed together must fill those of the cache; without such no option is for them."""
    given = [(f.name, getattr(config, f.name)) for f in fields(config) if f.name.startswith("dllm_")]
    odd = next(((name, value) for name, value in given if value != getattr(PytorchEngineConfig, name)), None)
    if odd is not None and spec.mask_token is None:
        raise UsageError(f"{odd[0]}={odd[1]}: this model draws one token after another; leave it out")
    if size % spec.block:
        found = f"found {size}, expected a multiple of the {spec.block} tokens that this model guesses together"
        raise UsageError(f"cache_block_seq_len (block_size): {found}")


def step_tokens(spec: DecoderSpec, asked: int) -> int:
    """Prompt tokens of a step, at least as many as the model reads together."""
    return max(asked, spec.together, spec.max_position if spec.mutual else 0)


def picture_patches(path: Path, vision: VisionSpec | None) -> int:
    """Of a picture, at most, as the model at ``path`` has it prepared."""
    recipe = None if vision is None else open_recipe(path)
    return 0 if vision is None or recipe is None else most_patches(recipe, vision.merge)
