"""What to do next, by what ``report`` has found."""

from __future__ import annotations

from typing import Any


def advice(found: dict[str, Any]) -> list[str]:
    """A line for each thing that can be mended or should be known, the command to type next at the end."""
    lines = [
        f"{test['name']}: FAILED ({test['detail']}); paste `tool check_env --verbose` into a bug report"
        for test in found["self_test"]
        if not test["passed"]
    ]
    if not any(row["runs"] for row in found["native"]):
        why = found["native"][0]["why_not"]
        lines.append(f"the native runner is missing, and models run several times slower: {why}")
    for name in ("tokenizers", "fastapi", "uvicorn"):
        if name in found["versions"] and found["versions"][name] is None:
            lines.append(f"{name} is not installed: pip install {name}")
    if found["no_torch"]:
        lines.append(f"GPUs, kernels and the self-test were left out: {found['no_torch']}")
    if found["environment"].get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        lines.append("HF_HUB_OFFLINE is set: models from the Hugging Face hub are not fetched; unset it if they should")
    if found["memory"]["free_gib"] < 2:
        lines.append(
            f"{found['memory']['free_gib']} GiB of memory are free: close other programs, or take a small model"
        )
    if not lines:
        lines.append("everything that this machine can run works")
    model = "DIR  (a model that `tool convert` packed for the CPU)" if found["no_torch"] else "demo"
    return [*lines, f"next: tool chat {model}"]
