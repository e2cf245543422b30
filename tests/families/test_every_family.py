"""Every family of the registry, as its file describes it, through everything: a new file is tested here by itself.

The oracle is transformers (or the twin that the file names) on the same float32 weights, of every tiny model:
logits of ragged batches and greedy tokens on both runners, engine artifacts, quantizing, GGUF there and back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.gguf.metadata import spelling
from toolkit.artifacts.weights import canonical_weights, left_out, validate_checkpoint
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.convert.options import Packing
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError
from toolkit.models.gguf import Gguf
from toolkit.models.registry import get, load_spec, names
from toolkit.models.spec import DecoderSpec
from toolkit.quant.lite import Common, auto_awq, auto_gptq, auto_round, blocked_fp8, mxfp4, search, smooth_quant
from toolkit.quant.methods.kv import kv
from toolkit.quant.options import AutoRound, Awq, Gptq, Search, SmoothQuant
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available
from toolkit.runners.native.program import unsupported

RUNNERS = {"pytorch": "tensor", "turbomind": "native"}  # backend → runner
BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)
WRITERS = [name for name in names() if not get(name).encodes]  # others: test_encoders.py
SHAPES = [(name, shape) for name in WRITERS for shape in range(len(get(name).tiny))]
BLIND = [(name, shape) for name, shape in SHAPES if get(name).recipe is None]  # of others tests/vision tries this too
METHODS: dict[str, Any] = {
    "awq": partial(auto_awq, options=Awq(w_group_size=32, tune_steps=0, search_scale=False)),
    "gptq": partial(auto_gptq, options=Gptq(w_group_size=32, tune_steps=0)),
    "auto_round": partial(auto_round, options=AutoRound(w_group_size=32, iters=1)),
    "search": partial(search, options=Search(bits=5.0, tune_steps=0)),
    "int8": smooth_quant,
    "fp8": partial(smooth_quant, options=SmoothQuant(quant_dtype="fp8")),
    "tiles": blocked_fp8,
    "mxfp4": mxfp4,
    "kv": kv,
}
CLOSE = {"rtol": 2e-4, "atol": 2e-4}  # logits have a spread of about 1
NEW = 8
LATER = ("hy_v3",)  # architectures that llama.cpp has and the newest gguf package not yet


def name_of(shape: tuple[str, int]) -> str:
    return f"{shape[0]}-{shape[1]}"


@pytest.fixture(scope="module", params=SHAPES, ids=name_of)
def model(request: Any, tiny_models: Any) -> tuple[str, Path, Path]:
    """The family, its checkpoint, and the one that transformers opens."""
    family, shape = request.param
    return family, tiny_models(family, shape=shape), tiny_models.twin(family, shape=shape)


@pytest.fixture(scope="module")
def oracle(model: tuple[str, Path, Path], support: Any, tiny_models: Any) -> Any:
    """``oracle(ids) -> logits`` by transformers; what it was asked before, for another runner, it knows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    shape = next(i for i in range(len(get(model[0]).tiny)) if tiny_models(model[0], shape=i) == model[1])
    if stand_in := support("stand_ins").STAND_INS.get(f"{model[0]}-{shape}"):
        return remembering(stand_in(model[1]).logits)
    spec = load_spec(open_checkpoint(model[1]))[0]
    alibi = next((a.alibi for _, a in spec.attention_layers() if a.alibi is not None), None)
    # In the eager form transformers (seen in 5.0, 5.12, 5.23 and 5.24) add Falcon's twice, to the mask and to the
    # scores; MPT and BLOOM have no other form.
    form = "eager" if alibi is None or model[0] in ("bloom", "mpt") else "sdpa"
    kind = AutoModelForCausalLM if get(model[0]).recipe is None else AutoModelForImageTextToText
    support("upstream").mend()
    theirs = kind.from_pretrained(model[2], dtype=torch.float32, attn_implementation=form).eval()
    if model[0] in ("gemma4", "gemma4_unified"):  # they read marks of pictures as pads; texts here have any tokens
        theirs.config.image_token_id = -1
    twin = alibi is not None and model[1] != model[2]  # without ALiBi of its own: without rope, and a mask with it
    block = spec.block

    def logits(ids: list[int]) -> np.ndarray:
        where = torch.arange(len(ids))
        extra = {}
        if twin:
            risen = torch.tensor(alibi.slopes)[:, None, None] * (where - where[:, None])
            mask = risen.masked_fill(where > where[:, None], torch.finfo(torch.float32).min)
            extra = {"position_ids": torch.zeros_like(where)[None], "attention_mask": mask[None]}
        if block > 1:
            later = where // block > where[:, None] // block
            mask = torch.zeros(later.shape).masked_fill(later, torch.finfo(torch.float32).min)
            extra = {"attention_mask": mask[None, None]}
        with torch.inference_mode():
            return theirs(torch.tensor([ids]), use_cache=False, **extra).logits[0].numpy()

    return remembering(logits)


def remembering(logits: Callable[[list[int]], np.ndarray]) -> Callable[[list[int]], np.ndarray]:
    known = functools.cache(lambda ids: logits(list(ids)))
    return lambda ids: known(tuple(ids))


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[int(x) for x in rng.integers(5, 320, n)] for n in lengths]


def logits_of(path: Path, backend: Any, support: Any, texts: list[list[int]]) -> np.ndarray:
    """Of all positions, in one ragged step and one more token (or block of tokens) of each."""
    driver = support("steps").Driver(opened(path, backend))
    cuts = [(driver.add(), t, ahead(t, driver.runner.spec.block)) for t in texts]
    first = driver.step({n: t[:cut] for n, t, cut in cuts if cut}, want="all").logits
    second = driver.step({n: t[cut:] for n, t, cut in cuts}, want="all").logits
    return np.concatenate([first, second])


def wrong_tokens(right: np.ndarray, cuts: list[int], texts: list[list[int]]) -> str:
    """Where ``right``, a flag for each row of ``logits_of``, is wrong, by text and token, both counted from 1."""
    sizes = [*cuts, *(len(text) - cut for text, cut in zip(texts, cuts, strict=True))]
    rows = np.split(right, np.cumsum(sizes)[:-1])
    told = []
    for i, text in enumerate(texts):
        if (wrong := np.flatnonzero(~np.concatenate([rows[i], rows[len(texts) + i]])) + 1).size:
            told.append(f"text {i + 1}, token {wrong[0]} of {len(text)} ({wrong.size} are wrong)")
    return "\n".join(["", "The first wrong token of each text:", *told])


def ahead(text: list[int], block: int) -> int:
    """Tokens before the last block."""
    return (len(text) - 1) // block * block


def opened(path: Path, backend: Any) -> Any:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    runner, why = open_runner(path, backend=backend, options=options)
    refusal = None if backend == "pytorch" else unsupported(runner.spec)
    assert runner.name == (RUNNERS[backend] if refusal is None else "tensor")
    assert refusal is None or refusal in why
    return runner


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_transformers(model: Any, oracle: Any, support: Any, backend: str) -> None:
    texts = prompts(2, 9, 50, 33)
    whole = [oracle(text) for text in texts]
    block = load_spec(open_checkpoint(model[1]))[0].block
    cuts = [ahead(text, block) for text in texts]
    pairs = list(zip(whole, cuts, strict=True))
    expected = np.concatenate([w[:cut] for w, cut in pairs] + [w[cut:] for w, cut in pairs])
    assert expected.std() > 0.2, "the oracle's logits are too flat to tell anything"
    found = logits_of(model[1], backend, support, texts)  # of more tokens where the embedding has more than the head
    found = found[:, : expected.shape[1]]
    right = np.isclose(found, expected, equal_nan=True, **CLOSE).all(axis=1)
    np.testing.assert_allclose(found, expected, err_msg=wrong_tokens(right, cuts, texts), **CLOSE)


@pytest.mark.parametrize("model", BLIND, indirect=True, ids=name_of)
@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_are_transformers(model: Any, oracle: Any, support: Any, backend: str) -> None:
    """Of requests that run together, in chunks, with a cache that the second half finds filled."""
    texts = prompts(21, 3, 40)
    texts.append(texts[2][:35])
    runner = opened(model[1], backend)
    runner.load_weights()
    blocks = (32,) * len(runner.spec.cache_groups)
    runner.allocate_cache(blocks)
    options = EngineOptions(session_len=128, max_batch_size=4, max_prefill_token_num=17, num_blocks=blocks, check=True)
    core, found = EngineCore(runner, options, None), {str(i): list[int]() for i in range(len(texts))}
    for part in (texts[:3], texts[3:]):
        for text in part:
            core.add(EngineRequest(str(texts.index(text)), text, SamplingParams(max_new_tokens=NEW)))
        while core.has_work:
            for out in core.step():
                assert out.error is None, out.error
                found[out.id].extend(out.token_ids)
    for i, text in enumerate(texts):
        ids = [*text, *found[str(i)]]
        assert len(found[str(i)]) == NEW or ids[-1] == 2  # the end of text
        if runner.spec.mask_token is not None:
            wanted = support("denoise").denoise(oracle, text, NEW, runner.spec.block, runner.spec.mask_token)
            assert found[str(i)] == wanted
            continue
        assert oracle(ids[:-1])[len(text) - 1 :].argmax(-1).tolist() == found[str(i)]


def test_the_spec_is_whole(model: Any) -> None:
    """Every parameter has its place once, under a name of Llama's, and the checkpoint holds those tensors alone."""
    from toolkit.models.spec.check import check_spec

    family, path, _ = model
    checkpoint = open_checkpoint(path)
    spec, stored = load_spec(checkpoint)
    check_spec(spec)
    validate_checkpoint(checkpoint, stored)
    assert left_out(checkpoint, stored) == ""
    assert spec.family == family
    tensors = {s.weight_name for s in stored} | {s.bias_name for s in stored if s.bias}
    assert tensors == set(checkpoint.names())
    weights = canonical_weights(checkpoint, stored)
    for linear in spec.linears():
        assert tuple(weights[linear.name].shape) == (linear.out_features, linear.in_features)
        parts = ("self_attn.", "cross_attn.", "conv.", "mamba.", "linear_attn.", "mlp.", "experts.", "per_layer.")
        assert linear.name.split(".", 3)[3].startswith(parts)


@pytest.mark.parametrize("family", sorted({name for name, _ in BLIND}))
def test_artifacts_give_the_same_logits(family: str, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    path, texts = tiny_models(family), prompts(30, 3)
    native = unsupported(load_spec(open_checkpoint(path))[0]) is None
    for backend, target in zip(BACKENDS, ("torch", "cpu" if native else "auto"), strict=False):
        head = 16 if target == "cpu" else None  # fewer bits would round what is compared
        convert(str(path), tmp_path / target, Packing(target=target, dtype="float32", head_bits=head), quiet=True)
        expected = logits_of(path, backend, support, texts)
        np.testing.assert_array_equal(logits_of(tmp_path / target, backend, support, texts), expected)


def _fitting(family: str, method: str, tiny_models: Any) -> tuple[Path, DecoderSpec]:
    """The tiny model that a method is tried on: the last one whose sizes it takes. auto-round takes multiples of 32
    alone, others groups of so many inputs."""
    shapes = [0] if method == "awq" else [*reversed(range(len(get(family).tiny)))]
    for shape in shapes:
        path = tiny_models(family, shape=shape)
        spec = load_spec(open_checkpoint(path))[0]
        sizes = [x.in_features for x in spec.linears()]
        sizes += [x.out_features for x in spec.linears() if method == "auto_round"]
        if method in ("awq", "kv", "int8", "fp8") or not any(size % 32 for size in sizes):
            return path, spec
    pytest.skip(f"no tiny model has sizes that {method} takes")


@pytest.mark.every_family
@pytest.mark.parametrize("method", [m if m == "awq" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_quantizers_take_it(
    family: str, method: str, tiny_models: Any, support: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear but routers is rounded, folding loses nothing, and what is written runs."""
    support("lite").quicken(monkeypatch)
    path, spec = _fitting(family, method, tiny_models)
    text = tmp_path / "calibration.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 20)
    common = Common(calib_dataset=str(text), calib_samples=8, calib_seqlen=32, eval_tokens=64, batch_size=4)
    if method == "kv" and not spec.keeps_keys():
        with pytest.raises(ToolkitError, match="lite kv finds scales of keys and values"):
            kv(str(path), tmp_path / "out", common=common)
        return
    quality = METHODS[method](str(path), tmp_path / "out", common=common).quality
    checkpoint = open_checkpoint(tmp_path / "out")
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    if method != "kv":
        assert {x["name"] for x in quality["layers"]} == {x.name for x in spec.linears()} - spec.routers()
        assert all(x["rel_error"] < 0.4 for x in quality["layers"])
        if not spec.encodes:
            assert quality["perplexity_after"] / quality["perplexity_before"] < 2
        else:
            assert quality["cosine"] > 0.5  # what its vectors are is tried in test_encoders.py
            return
    assert np.isfinite(logits_of(tmp_path / "out", "pytorch", support, prompts(12))).all()


@pytest.mark.every_family
def test_gguf_and_back(family: str, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """At least one of the tiny models is in GGUF what it was, under names that llama.cpp's architecture has."""
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
    from gguf.gguf_reader import GGUFReader

    known, whole = get(family), 0
    texts = prompts(30, 5)
    for shape in range(len(known.tiny)):
        path, file = tiny_models(family, shape=shape), tmp_path / f"{shape}.gguf"
        try:
            notes = rewrite(str(path), file, to="gguf").notes
        except ToolkitError as error:
            assert str(error).startswith("gguf: ")
            assert not isinstance(known.gguf, str) or known.gguf in str(error)
            if "encoders are not written" in str(error):
                return  # what others have written: test_gguf_encoders.py
            continue
        found = spelling(load_spec(open_checkpoint(path))[0])
        assert isinstance(found, Gguf)
        arch = next((a for a in MODEL_ARCH if MODEL_ARCH_NAMES[a] == found.arch), None)
        assert arch is not None or found.arch in LATER
        allowed = {TENSOR_NAMES[t].replace("{bid}", "0") for t in MODEL_TENSORS[arch]} if arch is not None else None
        names = {re.sub(r"^blk\.\d+", "blk.0", tensor.name) for tensor in GGUFReader(file).tensors}
        stems = {re.sub(r"\.(weight|bias|scale)$", "", name) for name in names}
        assert allowed is None or {stem for stem in stems if not stem.startswith("rope_")} <= allowed
        if any("no sliding window" in note or "no place" in note for note in notes):
            continue
        expected = logits_of(path, "pytorch", support, texts)
        np.testing.assert_allclose(logits_of(file, "pytorch", support, texts), expected, rtol=1e-4, atol=1e-4)
        whole += 1
    assert whole or isinstance(known.gguf, str)
