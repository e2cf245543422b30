"""Runs a tiny random llama through the engine and compares its greedy tokens with the numpy answer key."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.check_env.reference_llama import CONFIG, greedy, random_weights
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner

NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 7, 70)  # shorter than a block, longer than a block; one is prefilled in two chunks


def engine_self_test(backend: Any = None, device: str = "auto") -> dict[str, Any]:
    """Generate in fp32, three ragged requests at once, chunked prefill. Keys: name, passed, detail, seconds."""
    begin = time.perf_counter()
    try:
        runner, wrong = _run(backend, device)
    except Exception as error:
        passed, detail = False, f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    else:
        passed = not wrong
        total = len(PROMPT_LENGTHS) * NEW_TOKENS
        detail = wrong or f"{runner}: {total} greedy tokens equal the numpy reference's"
    seconds = round(time.perf_counter() - begin, 2)
    name = f"engine, {backend or 'auto'}" + ("" if device == "auto" else f" on {device}")
    return {"name": name, "passed": passed, "detail": detail, "seconds": seconds}


def _run(backend: Any, device: str) -> tuple[str, str]:
    """(backend and runner, what differs or "")."""
    weights = random_weights()
    rng = np.random.default_rng(1)
    prompts = {f"r{n}": rng.integers(0, CONFIG["vocab_size"], n).tolist() for n in PROMPT_LENGTHS}
    with tempfile.TemporaryDirectory(prefix="toolkit-self-test-") as folder:
        _write(Path(folder), weights)
        options = RunnerOptions(device=device, dtype="float32")
        runner, _ = open_runner(Path(folder), backend=backend, options=options)
        which = f"{runner.backend}, {runner.name} runner"
        try:
            runner.load_weights()
            got = _generate(runner, prompts)
        finally:
            runner.close()
    for name, prompt in prompts.items():
        expected, _ = greedy(weights, prompt, NEW_TOKENS)
        if got[name] != expected:
            return which, f"{which}: {len(prompt)} tokens in: expected {expected}, found {got[name]}"
    return which, ""


def _write(folder: Path, weights: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _generate(runner: Any, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    blocks = tuple(8 * len(prompts) for _ in runner.spec.cache_groups)
    runner.allocate_cache(blocks)
    options = EngineOptions(session_len=128, max_batch_size=4, max_prefill_token_num=48, num_blocks=blocks)
    core = EngineCore(runner, options, None)
    for name, prompt in prompts.items():
        core.add(EngineRequest(name, prompt, SamplingParams(max_new_tokens=NEW_TOKENS)))
    got: dict[str, list[int]] = {name: [] for name in prompts}
    while core.has_work:
        for output in core.step():
            if output.error:
                raise RuntimeError(output.error)
            got[output.id] += output.token_ids
    return got
