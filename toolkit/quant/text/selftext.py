"""Calibration text that the model writes itself, so that nothing need be downloaded. Seeded, and cached by model.

Idea: Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models" (2023).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path

from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base.whole_file import write_whole
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError
from toolkit.messages import GenerationConfig
from toolkit.quant.text.calibration import CalibrationPlan
from toolkit.runners.choose import gpu_is_likely
from toolkit.runners.native import library

PIECE = 128  # tokens: many short texts cover more kinds of it than a few long ones, and are written side by side
RECIPE = 4  # part of the cache key; raise it when the text below would come out differently


def openings() -> list[str]:
    """Beginnings of texts of many kinds (tales, news, law, science, code, talk, some languages), one for each piece."""
    return json.loads(resources.files("toolkit.quant.text").joinpath("openings.json").read_text(encoding="utf-8"))


def open_writer(model: Path, session_len: int | None = None) -> AsyncEngine:
    """The model at ``model``, to write text."""
    # With 8-bit weights the native runner on a CPU takes seven tenths of the time, and draws as good a text.
    rounded = library.available() is None and not gpu_is_likely()
    config = TurbomindEngineConfig(load_format="int8" if rounded else "auto", session_len=session_len)
    return AsyncEngine.open(model, backend_config=config, progress=lambda line: None)


def self_samples(
    model: Path, digest: str, plan: CalibrationPlan, tokenizer: Tokenizer, progress: Callable[[int, int], None]
) -> list[list[int]]:
    """``plan.samples`` samples of ``plan.seqlen`` tokens drawn from the model at ``model`` (cached under ``digest``).

    A sample is pieces of ``PIECE`` tokens, each begun with another of the ``openings`` and gone on with by the model.
    ``progress`` is called with (pieces done, pieces in all).
    """
    cache = _cache_file(digest, plan)
    found = _read_cache(cache, plan)
    if found is None:
        found = asyncio.run(_generate(model, plan, tokenizer, progress))
        _write_cache(cache, found)
    return found


def is_written(digest: str, plan: CalibrationPlan) -> bool:
    """Whether ``self_samples`` finds its text in the cache."""
    return _read_cache(_cache_file(digest, plan), plan) is not None


def _cache_file(digest: str, plan: CalibrationPlan) -> Path:
    name = f"{digest.removeprefix('sha256:')[:16]}-{plan.samples}x{plan.seqlen}-seed{plan.seed}-v{RECIPE}.json"
    return toolkit_home() / "calibration" / name


async def _generate(
    model: Path, plan: CalibrationPlan, tokenizer: Tokenizer, progress: Callable[[int, int], None]
) -> list[list[int]]:
    starts = openings()
    random.Random(plan.seed).shuffle(starts)
    lengths = [min(PIECE, plan.seqlen - a) for _ in range(plan.samples) for a in range(0, plan.seqlen, PIECE)]
    done = 0

    async def piece(index: int, length: int) -> list[int]:
        nonlocal done
        ids = tokenizer.encode(starts[index % len(starts)])[: max(1, length // 2)]
        config = GenerationConfig(
            max_new_tokens=max(1, length - len(ids)),
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
                raise ToolkitError(f"{model}: the model cannot write its own calibration text: {delta.error_message}")
            ids = ids + list(delta.token_ids)
        done += 1
        progress(done, len(lengths))
        if len(ids) < length:
            raise ToolkitError(
                f"{model}: calibration text ended after {len(ids)} of {length} tokens; give a --calib-dataset"
            )
        return ids[:length]

    with open_writer(model) as engine:
        pieces = await asyncio.gather(*(piece(i, n) for i, n in enumerate(lengths)))
    ids = [i for found in pieces for i in found]
    return [ids[a : a + plan.seqlen] for a in range(0, len(ids), plan.seqlen)]


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
    """Keep the text where that can be: the run that wrote it, for minutes perhaps, has it anyway."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(samples).encode())
