"""LoRA adapters on the native runner against PEFT's own model, in float32. It needs ``peft``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.models.registry import get
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native import library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "mistral",
    "olmo2",
    "granite",
    "glm4",
    "starcoder2",
    "stablelm",
]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora and patterns": {
        "r": 8,
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {"o_proj": 3},
        "alpha_pattern": {"o_proj": 5},
    },
    "dora": {"r": 4, "use_dora": True, "target_modules": "all-linear"},
    "embedding and head": {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "saved whole": {"r": 4, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "stacked experts": {
        "r": 4,
        "use_rslora": True,
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {"experts.gate_up_proj": 3},
    },
}
# rows of gate and up in turn in a stack [in, out]; the same one below the other, which PEFT takes for [out, in]; a
# router of another name; experts apart
LATENT = ["deepseek_v2", "deepseek_v3", "minicpm3", "youtu", "axk1", "glm4_moe_lite"]
MOES = ["gpt_oss", "llama4_text", "phimoe", "granitemoe", "qwen3_moe"]


def trained(model: Path, folder: Path, form: dict[str, Any], ids: list[int]) -> np.ndarray:
    """An adapter that PEFT writes, with numbers of all its tensors drawn, and what it gives: logits [len(ids), V]."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    made = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **form)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            if "lora_magnitude" in name:
                tensor.mul_(1 + 0.3 * torch.rand_like(tensor))
            elif "lora_" in name:
                tensor.normal_(std=0.2)
            elif "modules_to_save" in name:
                tensor.add_(0.5 * tensor.std() * torch.randn_like(tensor))
        logits = made(torch.tensor([ids])).logits[0].numpy()
    made.save_pretrained(folder)
    return np.asarray(logits)


@pytest.mark.skipif(library.available() is not None, reason="the native library does not run here")
@pytest.mark.parametrize(
    ("family", "form"),
    [(f, "plain") for f in FAMILIES]
    + [("llama", f) for f in FORMS if f not in ("plain", "stacked experts")]
    + [(f, "stacked experts") for f in MOES]
    + [(f, "plain") for f in LATENT]
    + [("minicpm3", "dora")]
    + [(f, "plain") for f in ("mixtral", "hunyuan_v1_moe", "hy_v3", "lara_mini")],
)
def test_equals_peft(family: str, form: str, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    assert get(family) is not None
    overrides = {"tie_word_embeddings": False} if "head" in form or "whole" in form else {}
    overrides |= {"intermediate_size": 96} if family == "llama4_text" else {}  # no square, by which sides are not told
    model = tiny_models(family, **overrides)
    ids = [int(x) for x in np.random.default_rng(0).integers(3, 100, 40)]
    parts = {"target_modules": r".*language_model\..*_proj"} if family == "gemma3" else {}  # not what it sees with
    expected = trained(model, tmp_path / "adapter", FORMS[form] | parts, ids)
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, adapters=(("a", str(tmp_path / "adapter")),))
    runner, why = open_runner(model, backend="turbomind", options=options)
    assert runner.name == "native", why
    driver = support("steps").Driver(runner)
    use = {"adapter": np.array([0], np.int32)}
    found = driver.step({driver.add(): ids}, "all", **use).logits
    base = driver.step({driver.add(): ids}, "all").logits
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    assert np.abs(found - base).max() > 0.1

    other = support("folded").fold_checkpoint(model, tmp_path / "folded")  # scales that PEFT knows nothing of
    driver = support("steps").Driver(open_runner(other, backend="turbomind", options=options)[0])
    found = driver.step({driver.add(): ids}, "all", **use).logits
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
