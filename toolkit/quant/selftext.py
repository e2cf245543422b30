"""Calibration text that the model writes itself, so that nothing need be downloaded. Seeded, and cached by model.

Idea: Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models" (2023).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.tokenizer import Tokenizer
from toolkit.engine.frontend import AsyncEngine
from toolkit.errors import ToolkitError
from toolkit.messages import GenerationConfig
from toolkit.quant.calibration import CalibrationPlan

# Openings that lead a model into different kinds of text; each sample starts with one.
STARTS = (
    "The", "In the", "A", "When", "How to", "What is", "I", "There are", "It was", "One of the", "My", "Although",
    "This", "We", "Let us", "Some", "Once upon a time", "First,", "Question:", "def ", "According to", "She", "On",
    "Dear", "Today", "If", "#", "Many people", "He said", "To", "You", "For example,",
)  # fmt: skip
RECIPE = 1  # part of the cache key; raise it when the text below would come out differently


def self_samples(
    model: Path, digest: str, plan: CalibrationPlan, tokenizer: Tokenizer, progress: Callable[[int, int], None]
) -> list[list[int]]:
    """``plan.samples`` samples of ``plan.seqlen`` tokens drawn from the model at ``model`` (cached under ``digest``).

    ``progress`` is called with (samples done, samples in all).
    """
    name = f"{digest.removeprefix('sha256:')[:16]}-{plan.samples}x{plan.seqlen}-seed{plan.seed}-v{RECIPE}.json"
    cache = toolkit_home() / "calibration" / name
    found = _read_cache(cache, plan)
    if found is None:
        found = asyncio.run(_generate(model, plan, tokenizer, progress))
        _write_cache(cache, found)
    return found


async def _generate(
    model: Path, plan: CalibrationPlan, tokenizer: Tokenizer, progress: Callable[[int, int], None]
) -> list[list[int]]:
    engine = AsyncEngine.open(model, progress=lambda line: None)
    done = 0

    async def sample(index: int) -> list[int]:
        nonlocal done
        ids = tokenizer.encode(STARTS[index % len(STARTS)])[: plan.seqlen - 1]
        config = GenerationConfig(
            max_new_tokens=plan.seqlen - len(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=0.95,
            ignore_eos=True,
            bad_token_ids=sorted(tokenizer.eos_ids),
            random_seed=(plan.seed * 1_000_003 + index) & 0xFFFFFFFF,
        )
        async for delta in engine.generate(ids, config):
            if delta.finish_reason == "error":
                raise ToolkitError(f"{model}: the model cannot write its own calibration text: {delta.text}")
            ids = ids + list(delta.token_ids)
        done += 1
        progress(done, plan.samples)
        return ids

    try:
        samples = list(await asyncio.gather(*(sample(i) for i in range(plan.samples))))
    finally:
        engine.close()
    short = [s for s in samples if len(s) != plan.seqlen]
    if short:
        raise ToolkitError(
            f"{model}: a calibration sample ended after {len(short[0])} of {plan.seqlen} tokens; "
            "give a smaller --calib-seqlen or a --calib-dataset"
        )
    return samples


def _read_cache(path: Path, plan: CalibrationPlan) -> list[list[int]] | None:
    """Cached samples; None where there are none or the file is not what it should be."""
    try:
        samples = json.loads(path.read_text(encoding="utf-8"))
        good = len(samples) == plan.samples and all(
            len(s) == plan.seqlen and all(isinstance(i, int) for i in s) for s in samples
        )
    except (OSError, ValueError, TypeError):
        return None
    return samples if good else None


def _write_cache(path: Path, samples: list[list[int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(samples), encoding="utf-8")
    os.replace(scratch, path)
