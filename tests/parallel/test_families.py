"""What ranks compute together, of every family: logits and greedy tokens are those of one process.

The ranks are threads here (``support/together.py``); ``test_ranks.py`` has them as processes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import UsageError
from toolkit.models.registry import get, names
from toolkit.parallel.layout import Layout
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.vision.eyes import Eyes

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = np.random.default_rng(3).integers(3, 300, 45).tolist()
SHAPES = [(name, shape) for name in names() if not get(name).encodes for shape in range(len(get(name).tiny))]
# biases of sums; windows, norms after, softcaps; parallel blocks; ALiBi; one head of keys; experts with a shared one;
# experts with biases, sinks; norms over all heads; latent rows; Mamba-2; gated short convolutions; the delta rule
FAMILIES = (
    "qwen2 gemma2 cohere phi mpt falcon qwen2_moe gpt_oss mixtral olmo2 deepseek_v2 mamba2 bamba lfm2 qwen3_next"
).split()


def options(**fields: Any) -> RunnerOptions:
    return RunnerOptions(**{"dtype": "float32", "block_size": 16, "device": "cpu", "threads": 1} | fields)


def same(path: Path, layout: Layout, support: Any, adapter: int = -1, **fields: Any) -> None:
    """Logits of a prompt in chunks and greedy tokens are alike."""
    steps = support("steps")
    runner = open_runner(path, backend="pytorch", options=options(**fields))[0]
    ranks = support("together").Together(path, layout, options(**fields))
    try:
        one, several = steps.Driver(runner), steps.Driver(ranks)
        a, b, block = one.add(), several.add(), one.runner.spec.block
        whose = {"adapter": np.array([adapter], np.int32)}
        for start, stop in ((0, 20), (20, 28), (28, 44)):  # of models that guess blocks, whole ones
            expected = one.step({a: PROMPT[start:stop]}, "all", **whose)
            found = several.step({b: PROMPT[start:stop]}, "all", **whose)
            np.testing.assert_allclose(found.logits, expected.logits, **CLOSE)
            np.testing.assert_allclose(found.hidden, expected.hidden, **CLOSE)
        if block == 1:
            assert several.generate(PROMPT, 12, chunk=16) == one.generate(PROMPT, 12, chunk=16)
    finally:
        ranks.close()
        runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_what_one_process_gives(family: str, tiny_models: Any, support: Any) -> None:
    same(tiny_models(family), Layout(tp=2), support)


@pytest.mark.parametrize(("family", "ranks"), [("qwen2_moe", 2), ("llama4", 2), ("deepseek_v3", 2), ("afmoe", 4)])
def test_whole_experts_on_each_rank(family: str, ranks: int, tiny_models: Any, support: Any) -> None:
    """Beside a shared one; with inputs that are weighed; of models whose other layers have none; of a single row, with
    more ranks than that."""
    same(tiny_models(family), Layout(tp=ranks, ep=ranks), support)


# what a tiny model needs for three ranks or stages; and families that have more to say for it: lists by layer, sections
# of heads, fields of their own
WIDER = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
DEEPER = {"num_hidden_layers": 4}
NOT_WIDER = """bamba chatglm cogvlm dbrx glm4v_9b granitemoehybrid lara_mini nemotron_h phi3 qwen2_5_vl qwen2_vl qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen3_vl qwen3_vl_moe""".split()
NOT_DEEPER = "aya_vision chatglm glm4v_9b gpt_neo ministral".split()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(2), Layout(3), Layout(4), Layout(pp=2), Layout(pp=3), Layout(2, 2)], ids=str)
@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=[f"{name}-{shape}" for name, shape in SHAPES])
def test_every_family(family: str, shape: int, layout: Layout, tiny_models: Any, support: Any) -> None:
    try:
        same(tiny_models(family, shape=shape), layout, support)
    except UsageError as e:
        if layout.pp > 1 and "layers read what other stages have" in str(e):
            pytest.skip(str(e))
        few = f"{layout.tp} ranks" in str(e) and layout.tp > 2
        assert few or f"fewer than {layout.pp} stages" in str(e), e  # so many do not fit the tiny model
        if shape == 0 and layout == Layout(3) and family not in NOT_WIDER:
            return same(tiny_models(family, **WIDER), layout, support)
        if shape == 0 and layout == Layout(pp=3) and family not in NOT_DEEPER:
            return same(tiny_models(family, **DEEPER), layout, support)
        pytest.skip(str(e))


@pytest.mark.parametrize(("family", "targets", "folded"), [
    ("llama", r"(?:[qkvo]|gate|up|down)_proj", False), ("deepseek_v3", "q_[ab]_proj|kv_a_proj_with_mqa|o_proj", False),
    ("llama", r"(?:[qkvo]|gate|up|down)_proj", True),
])  # fmt: skip
def test_adapters_are_cut_as_their_linears_are(
    family: str, targets: str, folded: bool, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    """``folded``: and so are the scales of the model's linears, by which adapters change."""
    path = tiny_models(family)
    made = support("adapters").write_adapter(tmp_path / "one", path, targets)
    path = support("folded").fold_checkpoint(path, tmp_path / "folded") if folded else path
    same(path, Layout(tp=2), support, adapter=0, adapters=(("one", str(made)),))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(2, ep=2), Layout(4, ep=4)], ids=str)
@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=[f"{name}-{shape}" for name, shape in SHAPES])
def test_whole_experts_of_every_family(family: str, shape: int, layout: Layout, tiny_models: Any, support: Any) -> None:
    try:
        same(tiny_models(family, shape=shape), layout, support)
    except UsageError as e:
        few = (f"{layout.tp} ranks" in str(e) or "are fewer than ep" in str(e)) and layout.tp > 2
        assert few or "it has no experts to share out" in str(e), e
        pytest.skip(str(e))


def _png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    rng = np.random.default_rng(width)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


# rows in the prompt; layers that look at pictures; linears of their own for tokens of pictures
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("family", ["qwen2_vl", "mllama", "cogvlm"])
def test_models_that_see(family: str, layout: Layout, tiny_models: Any, support: Any) -> None:
    path = tiny_models(family)
    eyes = Eyes.open(path)
    assert eyes is not None
    files = [_png(75, 40), *([] if family == "cogvlm" else [_png(31, 62)])]
    pictures = eyes.look([{"role": "user", "content": [{"type": "image", "image": file} for file in files]}])
    said = eyes.spell("b".join([eyes.recipe.mark] * len(files)) + "what is it", pictures)
    ids = Tokenizer.open(path).encode(said, add_special_tokens=False)
    ranks = support("together").Together(path, layout, options())
    runner = open_runner(path, backend="pytorch", options=options())[0]
    answers = []
    for opened in (runner, ranks):
        opened.load_weights()
        blocks = (32,) * len(opened.spec.cache_groups)
        opened.allocate_cache(blocks)
        plan = EngineOptions(session_len=400, max_batch_size=4, max_prefill_token_num=64, num_blocks=blocks)
        core = EngineCore(opened, plan, None)
        core.add(EngineRequest("a", ids, SamplingParams(max_new_tokens=8), pictures=pictures))
        tokens: list[int] = []
        while core.has_work:
            for out in core.step():
                assert out.error is None, out.error
                tokens += out.token_ids
        answers.append(tokens)
        opened.close()
    assert answers[0] == answers[1] and len(answers[0]) > 1
