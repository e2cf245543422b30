"""Models that read texts as wholes: hidden states, pooled vectors and scores are those of transformers on the same
float32 weights, on both runners, from a checkpoint and from an artifact; of what transformers has no class for, those
of the model written out (``tests/support/plain_model.py``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit import PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights, left_out
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.convert.options import Packing
from toolkit.engine.pooling import open_head
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import build, get, load_spec, names, text_head
from toolkit.models.spec.check import check_spec
from toolkit.quant.lite import Common, auto_awq, smooth_quant
from toolkit.quant.options import Awq, SmoothQuant
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available

BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)
ENCODERS = [name for name in names() if get(name).encodes]
SHAPES = [(name, shape) for name in ENCODERS for shape in range(len(get(name).tiny))]
CLOSE = {"rtol": 2e-4, "atol": 2e-4}  # states have a spread of about 1
ONE_OF_EACH = ("bert", "modernbert", "jina_bert", "mpnet")
BEHIND_PADDING = {"mpnet": 2}  # rows of positions before that of a text's first token


def texts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[int(x) for x in rng.integers(5, 320, n)] for n in lengths]


def opened(path: Path, backend: Any, support: Any, threads: int = 1, blocks: int = 64) -> Any:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=threads)
    runner, _ = open_runner(path, backend=backend, options=options)
    assert runner.name == {"pytorch": "tensor", "turbomind": "native"}[backend]
    return support("steps").Driver(runner, blocks)


def states_of(driver: Any, parts: list[list[int]], **extra: Any) -> np.ndarray:
    return driver.step({driver.add(): part for part in parts}, want="all", **extra).hidden


def reference(path: Path, support: Any) -> Any:
    """``reference(ids, types) -> states`` [ids, hidden]."""
    checkpoint = open_checkpoint(path)
    spec, stored = load_spec(checkpoint)
    if spec.family == "jina_bert":
        dense = {
            k: v if isinstance(v, torch.Tensor) else v.weight for k, v in canonical_weights(checkpoint, stored).items()
        }
        plain = support("plain_model").states
        return lambda ids, types=None: plain(spec, dense, ids, types).numpy()
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()

    def states(ids: list[int], types: list[int] | None = None) -> np.ndarray:
        more = {} if types is None else {"token_type_ids": torch.tensor([types])}
        with torch.inference_mode():
            return model(torch.tensor([ids]), **more).last_hidden_state[0].numpy()

    return states


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family, shape", SHAPES)
def test_states_are_transformers(family: str, shape: int, backend: str, tiny_models: Any, support: Any) -> None:
    path = tiny_models(family, shape=shape)
    states, parts = reference(path, support), texts(2, 9, 50, 33)
    expected = np.concatenate([states(part) for part in parts])
    assert expected.std() > 0.2, "too flat to tell anything"
    np.testing.assert_allclose(states_of(opened(path, backend, support), parts), expected, **CLOSE)


@pytest.mark.parametrize("family", ENCODERS)
def test_the_plain_model_is_transformers(family: str, tiny_models: Any, support: Any) -> None:
    """What stands in where transformers has no class, and by what random specs are tried."""
    checkpoint = open_checkpoint(tiny_models(family))
    spec, stored = load_spec(checkpoint)
    check_spec(spec)
    assert left_out(checkpoint, stored) == ""
    dense = {
        k: v if isinstance(v, torch.Tensor) else v.weight for k, v in canonical_weights(checkpoint, stored).items()
    }
    ids = texts(40)[0]
    found = support("plain_model").states(spec, dense, ids).numpy()
    np.testing.assert_allclose(found, reference(checkpoint.path, support)(ids), **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["bert", "nomic_bert", "jina_bert"])
def test_the_second_text_of_a_pair_has_a_type_of_its_own(
    family: str, backend: str, tiny_models: Any, support: Any
) -> None:
    path = tiny_models(family)
    parts, kinds = texts(12, 30), [[0] * 5 + [1] * 7, [0] * 30]
    types = np.array(kinds[0] + kinds[1], np.int32)
    states, driver = reference(path, support), opened(path, backend, support)
    expected = np.concatenate([states(part, kind) for part, kind in zip(parts, kinds, strict=True)])
    found = states_of(driver, parts, types=types)
    np.testing.assert_allclose(found, expected, **CLOSE)
    assert abs(found - states_of(driver, parts)).max() > 0.05, "types change nothing"


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the native library is not built")
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_native_bits_depend_on_nothing_but_the_text(family: str, tiny_models: Any, support: Any) -> None:
    """Alone, beside others, on another number of threads, in steps of several chunks of 512, and longer than one."""
    path = tiny_models(family, max_position_embeddings=2048 + BEHIND_PADDING.get(family, 0))
    one, *others = texts(700, 300, 2, 450, 33, 512)
    alone = states_of(opened(path, "turbomind", support, blocks=256), [one])
    beside = states_of(opened(path, "turbomind", support, threads=2, blocks=256), [*others, one])[-len(one) :]
    np.testing.assert_array_equal(alone, beside)
    np.testing.assert_allclose(alone, reference(path, support)(one), rtol=1e-3, atol=1e-3)
    short = states_of(opened(path, "turbomind", support, blocks=256), [others[1]])
    many = states_of(opened(path, "turbomind", support, threads=2, blocks=256), others)
    np.testing.assert_array_equal(short, many[len(others[0]) :][: len(others[1])])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_in_two_steps_is_refused(backend: str, tiny_models: Any, support: Any) -> None:
    driver = opened(tiny_models("bert"), backend, support)
    number = driver.add()
    driver.step({number: [5, 6, 7]}, want="all")
    with pytest.raises(RunnerError, match="all of them are in one step"):
        driver.step({number: [8]}, want="all")
    with pytest.raises(RunnerError, match="types"):
        driver.step({driver.add(): [5, 6]}, types=np.array([0, 2], np.int32))


CONFIGS = {
    "pytorch": PytorchEngineConfig(device_type="cpu", dtype="float32", max_prefill_token_num=16, block_size=16),
    "turbomind": TurbomindEngineConfig(device="cpu", dtype="float32", max_prefill_token_num=16, cache_block_seq_len=16),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_vectors_from_checkpoint_and_artifact(
    family: str, backend: str, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    """Texts up to the longest that the model reads, which are longer than a step's budget."""
    path = tiny_models(family, max_position_embeddings=512 + BEHIND_PADDING.get(family, 0))
    states, parts = reference(path, support), texts(1, 60, 512)
    convert(
        str(path), str(tmp_path / "e"), Packing(target="cpu" if backend == "turbomind" else "torch", dtype="float32")
    )
    for model in (path, tmp_path / "e"):
        with pipeline(str(model), CONFIGS[backend]) as pipe:
            for pooling in ("cls", "mean", "last"):
                found = pipe.get_embeddings(parts, pooling=pooling)
                for part, row in zip(parts, found, strict=True):
                    rows = states(part)
                    wanted = {"cls": rows[0], "mean": rows.mean(0), "last": rows[-1]}[pooling]
                    assert cosine(row, wanted) > 0.9999
            np.testing.assert_array_equal(pipe.get_embeddings(parts), pipe.get_embeddings(parts, pooling="cls"))
            with pytest.raises(ToolkitError, match="513 tokens"):
                pipe.get_embeddings([5] * 513)
            assert "writes none" in (pipe("hello").error_message or "")


@pytest.mark.parametrize("family, method", [("bert", "int8"), ("bert", "awq"), ("mpnet", "awq")])
def test_rounded_weights_stay_near(family: str, method: str, tiny_models: Any, tmp_path: Path) -> None:
    """The measure that `lite` gives is the cosine of vectors, and the rounded model runs and is about as near."""
    path = tiny_models(family, num_hidden_layers=2)
    (tmp_path / "texts.txt").write_text("Ships land in a harbour, and hills have no water. " * 200)
    common = Common(calib_dataset=str(tmp_path / "texts.txt"), calib_samples=8, calib_seqlen=64, eval_tokens=512)
    with pytest.raises(UsageError, match="reads texts and writes none"):
        smooth_quant(str(path), tmp_path / "q", common=Common(), options=SmoothQuant())
    if method == "int8":
        result = smooth_quant(str(path), tmp_path / "q", common=common, options=SmoothQuant())
    else:
        result = auto_awq(str(path), tmp_path / "q", common=common, options=Awq(w_group_size=32, tune_steps=0))
    assert (0.995 if method == "int8" else 0.95) < result.quality["cosine_least"] <= result.quality["cosine"] < 1
    assert "perplexity_before" not in result.quality
    parts = texts(20, 60, 90)
    with pipeline(str(path), CONFIGS["pytorch"]) as whole, pipeline(str(tmp_path / "q"), CONFIGS[BACKENDS[-1]]) as less:
        for a, b in zip(whole.get_embeddings(parts), less.get_embeddings(parts), strict=True):
            assert cosine(a, b) > (0.99 if method == "int8" else 0.9)


# -- what is made of hidden states


def folder(path: Path, target: Path, pooling: dict[str, Any], dense: str | None = None) -> Path:
    """The checkpoint as a sentence-transformers folder; ``dense``: the activation of a layer behind."""
    shutil.copytree(path, target)
    (target / "1_Pooling").mkdir()
    (target / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    begin = "sentence_transformers.models"
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *([("2_Dense", "Dense")] if dense else []),
        ("3_N", "Normalize"),
    ]
    entries = [{"idx": i, "name": str(i), "path": p, "type": f"{begin}.{kind}"} for i, (p, kind) in enumerate(modules)]
    (target / "modules.json").write_text(json.dumps(entries))
    if dense:
        from safetensors.torch import save_file

        (target / "2_Dense").mkdir()
        told = {"in_features": 64, "out_features": 24, "bias": True, "activation_function": f"torch.nn.modules.{dense}"}
        (target / "2_Dense" / "config.json").write_text(json.dumps(told))
        g = torch.Generator().manual_seed(1)
        numbers = {"linear.weight": torch.randn(24, 64, generator=g) / 8, "linear.bias": torch.randn(24, generator=g)}
        save_file(numbers, target / "2_Dense" / "model.safetensors")
    return target


@pytest.mark.parametrize("activation", ["activation.Tanh", "linear.Identity"])
def test_sentence_transformers_folders(activation: str, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    path = tiny_models("bert")
    made = folder(
        path, tmp_path / "st", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, activation
    )
    convert(str(made), str(tmp_path / "e"), Packing(target="torch"))
    g = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 64, generator=g) / 8, torch.randn(24, generator=g)
    ids = texts(30)[0]
    wanted = torch.from_numpy(reference(path, support)(ids)).mean(0) @ weight.T + bias
    wanted = torch.tanh(wanted) if "Tanh" in activation else wanted
    for model in (made, tmp_path / "e"):
        with pipeline(str(model), CONFIGS["pytorch"]) as pipe:
            row = pipe.get_embeddings([ids])[0]
            assert row.shape == (24,) and cosine(row, wanted.numpy()) > 0.9999


@pytest.mark.parametrize(
    "change, told",
    [
        ({"pooling_mode_max_tokens": True}, "expected cls_token, mean_tokens or lasttoken, found max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "found cls_token, mean_tokens"),
        ({"pooling_mode": "weightedmean"}, "found weightedmean"),
    ],
)
def test_other_poolings_are_named(change: dict[str, Any], told: str, tiny_models: Any, tmp_path: Path) -> None:
    made = folder(tiny_models("bert"), tmp_path / "st", change)
    with pytest.raises(ToolkitError, match=told):
        open_head(made)
    with pytest.raises(UsageError, match="pooling: expected auto"):
        open_head(made, "max")


@pytest.mark.parametrize(
    "family", ["bert", "roberta", "modernbert", "gte", "nomic_bert", "eurobert", "distilbert", "electra", "mpnet"]
)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_transformers(family: str, labels: int, tiny_models: Any, tmp_path: Path) -> None:
    """Of a classifier's checkpoint, and of an artifact."""
    from transformers import AutoModelForSequenceClassification

    own = {"eurobert": {"classifier_pooling": "bos" if labels == 1 else "mean"}}
    path = tiny_models(family, labels=labels, **own.get(family, {}))
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    ids = texts(25)[0]
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    convert(str(path), str(tmp_path / "e"), Packing(target="torch"))
    for folder in (path, tmp_path / "e"):
        head = open_head(folder)
        assert head.scores and head.spec.labels == labels
        with pipeline(str(folder), CONFIGS["pytorch"]) as pipe:
            row = pipe.get_embeddings([ids], pooling=head.spec.pooling, normalize=False)[0]
        np.testing.assert_allclose(head.through(row), wanted, rtol=1e-3, atol=1e-3)
        if labels == 1:
            assert head.score(row) == pytest.approx(1 / (1 + np.exp(-wanted[0])), abs=1e-4)
        else:
            with pytest.raises(UsageError, match="one label to rank by, found 3"):
                head.score(row)


@pytest.mark.parametrize("told", [{}, {"classifier_pooling": "late"}])
def test_a_classifier_that_scores_each_token_is_no_embedding(told: dict[str, str]) -> None:
    config = {"architectures": ["EuroBertForSequenceClassification"], "model_type": "eurobert", **told}
    with pytest.raises(ToolkitError, match="classifier_pooling: found late, expected bos or mean"):
        text_head(config, "config.json")


@pytest.mark.parametrize(
    "family, kind",
    [
        ("distilbert", "DistilBertForMaskedLM"),
        ("electra", "ElectraForPreTraining"),
        ("electra", "ElectraForMaskedLM"),
    ],
)
def test_heads_of_training_are_no_part_of_the_model(family: str, kind: str, tiny_models: Any, tmp_path: Path) -> None:
    """As they are published: under the name of the model inside, with what nobody asks for here."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(tiny_models(family), architectures=None)
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    _, stored = load_spec(checkpoint)
    assert left_out(checkpoint, stored) == ""
    assert canonical_weights(checkpoint, stored)


@pytest.mark.parametrize(
    "field, value, told", [("relative_attention_num_buckets", 64, "32"), ("max_position_embeddings", 2, "more than 2")]
)
def test_an_mpnet_that_transformers_computes_otherwise_or_not_is_refused(field: str, value: int, told: str) -> None:
    config = {"architectures": ["MPNetModel"], "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 40}
    build(config)
    with pytest.raises(ToolkitError, match=f"{field}: found {value}, expected {told}"):
        build({**config, field: value})


def test_electra_small_is_refused() -> None:
    config = {"architectures": ["ElectraModel"], "hidden_size": 256, "embedding_size": 128}
    with pytest.raises(ToolkitError, match="embedding_size: found 128, expected 256, the hidden_size"):
        build(config)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_model_saved_without_its_head_embeds(family: str, tiny_models: Any, tmp_path: Path) -> None:
    """As AutoModel saves Qwen3-Embedding-8B and e5-mistral, whose head and embedding are not one."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_models(family, tie_word_embeddings=False), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "bare")
    for file in tiny_models(family).glob("tokenizer*"):
        (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    ids = list(range(7, 40))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
    for config in (TurbomindEngineConfig(dtype="float32", device="cpu"), PytorchEngineConfig(dtype="float32")):
        with pipeline(str(tmp_path / "bare"), config) as pipe:
            np.testing.assert_allclose(pipe.get_embeddings([ids], normalize=False)[0], expected, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "gemma3_text"])  # qwen2's upper layers see a window
def test_a_decoder_whose_tokens_see_each_other_is_an_encoder(
    family: str, backend: str, tiny_models: Any, support: Any
) -> None:
    """Gemma 3 by its own flag, as EmbeddingGemma has it."""
    flags = {"use_bidirectional_attention": True} if family == "gemma3_text" else {"is_causal": False}
    path = tiny_models(family, **flags)
    states, parts = reference(path, support), texts(9, 50)
    expected = np.concatenate([states(part) for part in parts])
    causal = states_of(opened(tiny_models(family), backend, support), parts)
    assert np.abs(causal - expected).max() > 0.1, "the same either way"
    np.testing.assert_allclose(states_of(opened(path, backend, support), parts), expected, **CLOSE)


def test_what_cannot_see_both_ways_is_refused(tiny_models: Any, tmp_path: Path) -> None:
    for family in ("gpt_oss", "deepseek_v3", "mamba2"):
        config = json.loads((tiny_models(family) / "config.json").read_text())
        with pytest.raises(ToolkitError, match="is_causal: found false, expected true"):
            build({**config, "is_causal": False})
    with pytest.raises(ToolkitError, match="gguf: encoders are not"):
        rewrite(str(tiny_models("llama", is_causal=False)), tmp_path / "m.gguf", to="gguf", quiet=True)


def test_the_user_may_say_that_tokens_see_each_other(tiny_models: Any) -> None:
    ids, found = [list(range(7, 40))], []
    for path, changes in ((tiny_models("llama", is_causal=False), None), (tiny_models("llama"), {"is_causal": False})):
        with pipeline(str(path), TurbomindEngineConfig(dtype="float32", device="cpu", hf_overrides=changes)) as pipe:
            found.append(pipe.get_embeddings(ids)[0])
            assert "reads texts for embeddings" in str(pipe("hello").error_message)
    np.testing.assert_array_equal(*found)
