"""A draft head in the engine: its guesses are those of the text however steps were cut, and change no answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.draft_head import LAYERS, SPEC, write
from tests.support.hidden_states import hidden_states
from tests.support.numpy_head import Head, KeysValues
from toolkit.artifacts.canonical import Dense
from toolkit.artifacts.drafts.draft_head import PICKLED, HeadSpec
from toolkit.artifacts.weight_files.safetensors_file import widened
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.configs.speculative import Speculation, SpeculativeConfig
from toolkit.engine.core import EngineCore
from toolkit.engine.drafts.draft import Guess
from toolkit.engine.drafts.head import DraftHead
from toolkit.engine.load.drafts.head import open_head
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.engine.sequence import Sequence
from toolkit.errors import ToolkitError, UsageError
from toolkit.parallel.choose import open_ranks
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.quant.layers.source import LayerSource
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.drafts.head import Rows
from toolkit.runners.native import library
from toolkit.runners.native.draft.eagle3 import BITS, NativeHead, packed_bytes
from toolkit.runners.native.packing.head import quantize_head
from toolkit.runners.tensor.drafts.eagle3 import TorchHead

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library is not here")
PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 40, 150)]


def in_few_bits(*what: Any, threads: int = 2) -> NativeHead:
    """As an engine of the native runner has it."""
    spec, weights, embed, d2t = what
    return NativeHead(spec, weights, lambda ids: widened(embed[ids]), d2t, threads)


def random_head(spec: HeadSpec = SPEC, scale: float = 0.3, make: Any = Head, **more: Any) -> Any:
    draw = np.random.default_rng(7)
    weights = {
        name: (np.ones(shape) if len(shape) == 1 else draw.normal(size=shape) * scale).astype(np.float32)
        for name, shape in spec.shapes(len(spec.layers)).items()
    }
    weights |= more
    embed = draw.normal(size=(spec.vocab_size, spec.hidden_size)).astype(np.float32)
    ids = np.sort(draw.choice(spec.vocab_size, spec.draft_vocab_size, replace=False))
    return make(spec, weights, embed, ids - np.arange(spec.draft_vocab_size))


def rounded(*what: Any) -> Head:
    """The same in float32: the weights are those that 4 bits have, but of its vocabulary."""
    spec, weights, *more = what
    for name in [name for name, w in weights.items() if name != "lm_head.weight" and w.ndim > 1]:
        made = quantize_head(Dense(torch.from_numpy(weights[name])), BITS)
        weights[name] = weights[name] if made is None else made.dequantize().numpy()
    return Head(spec, weights, *more)


def on_torch(spec: HeadSpec, weights: Any, embed: Any, d2t: Any) -> TorchHead:
    return TorchHead(spec, lambda: weights, lambda ids: widened(embed[ids]), d2t, torch.device("cpu"))


class Told(DraftHead):
    """Keeps what it guesses, and says in its place what comes, as far as ``answers`` has it; every third is wrong."""

    def __init__(self, answers: dict[str, list[int]], make: Any = Head) -> None:
        super().__init__(random_head(make=make), LAYERS, 400, 64)
        self.answers, self.made = answers, list[tuple[list[int], list[int]]]()

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        found = []
        for (seq, most), guess in zip(asked, super().propose(asked), strict=True):
            if not guess.tokens:
                found.append(guess)
                continue
            self.made.append((seq.tokens[: seq.known].tolist(), guess.tokens[:2]))
            right = self.answers[seq.id][seq.known - seq.prompt_len :][:most]
            if len(self.made) % 3 == 0 and right:
                right[-1] = (right[-1] + 1) % 320
            found.append(Guess(right, [0.9] * len(right)))
        return found


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> Path:
    return tiny_models("llama", num_hidden_layers=4)


def answers_of(
    model: Path, drafts: list[DraftHead] | None, backend: Any = "turbomind", ranks: int = 1, **options: Any
) -> dict[str, list[int]]:
    runner: Any
    if ranks > 1:
        how = RunnerOptions(dtype="float32", threads=ranks, device="cpu")
        runner, _ = open_ranks(Model(str(model), how, {}), Layout(tp=ranks), backend)
    else:
        runner, _ = open_runner(model, backend=backend, options=RunnerOptions(dtype="float32", threads=1))
    runner.load_weights()
    blocks = (options.pop("blocks", 60),)
    runner.allocate_cache(blocks)
    words = {"session_len": 300, "max_batch_size": 4, "max_prefill_token_num": 64, "num_blocks": blocks} | options
    speculation = None if drafts is None else Speculation(most=5, always=True, shared="off")
    core = EngineCore(runner, EngineOptions(**words, speculation=speculation), None, drafts=drafts or ())
    if drafts is not None and core.speculator is not None:
        core.speculator.drafts = list(drafts)
    found: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(40, temperature=0.7 * (i % 2), seed=i)
        core.add(EngineRequest(str(i), prompt, params))
    while core.has_work:
        for output in core.step():
            assert output.error is None
            found.setdefault(output.id, []).extend(output.token_ids)
    core.check_integrity()
    core.close()
    return found


def short_of_the_best(source: LayerSource, head: Head, tokens: list[int], guess: list[int]) -> list[float]:
    """How far each guess lies below the best one, in the spread of the logits: behind a text and the guesses before it,
    from the hidden states of the model's float32 forward pass over all of the text."""
    fused = head.fuse(hidden_states(source, torch.tensor([tokens[:-1]]), LAYERS)[0].numpy())
    kept = KeysValues(head.spec, 1)
    hidden = head.run(np.array(tokens[1:]), fused, [Rows(kept, len(tokens) - 1)])[-1:]
    found: list[float] = []
    for token in guess:
        logits = head.logits(hidden)[0]
        found.append(float((logits.max() - logits[head.ids.tolist().index(token)]) / logits.std()))
        hidden = head.run(np.array([token]), hidden, [Rows(kept, 1)])
    return found


RUNNERS = [("turbomind", Head), ("turbomind", in_few_bits), ("pytorch", on_torch)]


@pytest.mark.parametrize("backend, make", RUNNERS)
@pytest.mark.parametrize("chunk", [9, 300])
def test_guesses_are_those_of_the_text(model: Path, chunk: int, backend: str, make: Any) -> None:
    """Whatever was guessed before, came true or did not, and however the prompt was cut."""
    plain = answers_of(model, None, backend)
    told = Told(plain, make)
    assert answers_of(model, [told], backend, max_prefill_token_num=chunk) == plain
    source, head = LayerSource(model), random_head(make=rounded if make is in_few_bits else Head)
    made = told.made[:: max(1, len(told.made) // 24)]
    short = np.concatenate([short_of_the_best(source, head, tokens, guess) for tokens, guess in made])
    assert len(made) > 20 and np.mean(short == 0) > 0.7  # a state is rounded to bfloat16 there, each processor its way
    # of 4 bits one guess in fifty lies further off, for a state rounded to bfloat16 turns codes of what a layer reads
    worst = np.quantile(short, 0.95) if make is in_few_bits else short.max()
    assert np.mean(short) < 0.1 and worst < 1.0, "a token of no merit lies two or three spreads below the best"


@pytest.mark.parametrize("options", [{"blocks": 5}, {"prefix_caching": False}, {"max_batch_size": 1}], ids=str)
@pytest.mark.parametrize("backend, make", RUNNERS)
def test_answers_stay_what_they_are(model: Path, options: dict[str, Any], backend: str, make: Any) -> None:
    plain = answers_of(model, None, backend)
    assert answers_of(model, [Told(plain, make)], backend, **options) == plain


@pytest.mark.skipif(sys.platform != "linux", reason="ranks meet in Linux's memory")
@pytest.mark.parametrize("backend, make", RUNNERS)
def test_ranks_answer_the_same(model: Path, backend: str, make: Any) -> None:
    plain, told = answers_of(model, None, backend), Told(answers_of(model, None, backend), make)
    assert answers_of(model, [told], backend, ranks=2) == plain and len(told.made) > 20


@pytest.mark.parametrize("make", [Head, in_few_bits])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e30])
def test_a_broken_head_changes_no_answer(model: Path, wrong: float, make: Any) -> None:
    words = np.full((SPEC.draft_vocab_size, SPEC.hidden_size), wrong, np.float32)
    head = random_head(make=make, **{"lm_head.weight": words})
    with np.errstate(all="ignore"):
        assert answers_of(model, [DraftHead(head, LAYERS, 400, 64)]) == answers_of(model, None)


def test_what_a_token_takes_is_known_after_the_first_guess(model: Path) -> None:
    """Though prompts were read for it: while it is not known, no guess seems to pay."""
    known: list[bool] = []

    class Short(DraftHead):
        def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
            found = super().propose([(seq, 1) for seq, _ in asked])
            known.extend([self.cost.known] * any(guess.tokens for guess in found))
            return found

    assert answers_of(model, [Short(random_head(), LAYERS, 400, 64)]) == answers_of(model, None)
    assert known[0]


def test_there_is_no_more_room(model: Path) -> None:
    draft = DraftHead(random_head(), LAYERS, 400, 64, room=0)
    assert answers_of(model, [draft]) == answers_of(model, None)


@pytest.mark.parametrize("cols", [16, 96, 128, 192, 200])  # of which the last makes no groups, the first none in 4 bits
@pytest.mark.parametrize("name", ["fc.weight", "layers.0.mlp.down_proj.weight", "lm_head.weight"])
def test_the_vocabulary_has_8_bits_and_what_stands_before_it_4(cols: int, name: str) -> None:
    bytes_each = {0: 1.6 if name == "lm_head.weight" else 0.8, 16: 1.6}.get(cols % 32, 4.2)
    assert packed_bytes(name, (40000 // cols, cols)) < bytes_each * 40000


FLAGS = [
    {},
    {"norm_before_residual": False},
    {"norm_output": True},
    {"qk_norm": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
]


SHAPES: list[dict[str, int]] = [
    {},
    {"kv_heads": 4},
    {"kv_heads": 1},
    {"hidden_size": 72, "intermediate_size": 90},
    {"head_dim": 24},
    {"vocab_size": 5000, "draft_vocab_size": 4001},
    {"states_size": 96},
    {"states_size": 48, "fc_norm": True},
    {"states_size": 80, "norm_before_fc": True},
]


def made_of(spec: HeadSpec, make: Any) -> tuple[Any, Any]:
    """The head, and the same in float32."""
    return random_head(spec, make=make), random_head(spec, make=rounded)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("fields", [*FLAGS, *SHAPES[1:]], ids=str)
def test_the_native_head_makes_of_rows_what_numpy_does(fields: dict[str, Any], threads: int) -> None:
    """Of a long text in pieces, some of them cut off again as guesses are, and short ones beside it; as near as inputs
    of 8 bits and cells of bfloat16 are."""
    spec, draw = replace(SPEC, **fields), np.random.default_rng(3)
    if "head_dim" in fields:
        spec = replace(spec, rope=replace(spec.rope, rotary_dim=spec.head_dim))
    native, exact = made_of(spec, lambda *what: in_few_bits(*what, threads=threads))
    texts = [[head.open(1), head.open(5), head.open(9)] for head in (native, exact)]
    apart, alike, sure = list[float](), list[bool](), list[float]()
    for counts in ((300, 1, 40), (1, 7, 1), (2, 2, 2), *[(1, 1, 1)] * 20):
        ids, states = draw.integers(0, 320, sum(counts)), draw.normal(size=(sum(counts), 3, spec.reads))
        fused = exact.fuse(states.astype(np.float32))
        np.testing.assert_allclose(native.fuse(states), fused, atol=0.03 * np.abs(fused).max())
        drawn = []
        for head, kept in zip((native, exact), texts, strict=True):
            drawn.append(head.step(ids, fused, [Rows(text, count) for text, count in zip(kept, counts, strict=True)]))
            kept[0].length -= counts[0] == 2
        sizes = np.linalg.norm(drawn[1].states, axis=1)
        apart += (np.linalg.norm(drawn[0].states - drawn[1].states, axis=1) / sizes).tolist()
        alike += (drawn[0].tokens == drawn[1].tokens).tolist()
        sure += (np.log(drawn[0].sure) - np.log(drawn[1].sure)).tolist()
    assert max(apart) < 0.25 and np.median(apart) < 0.06
    assert np.mean(alike) > 0.85 and np.median(np.abs(sure)) < 0.15


@pytest.mark.parametrize("words", [np.nan, np.inf])
def test_what_is_no_number_is_not_sure(words: float) -> None:
    head = random_head(make=in_few_bits)
    text = head.open(1)
    with np.errstate(all="ignore"):
        drawn = head.step(np.zeros(1, np.int64), np.full((1, 64), words, np.float32), [Rows(text, 1)])
    assert 0 <= drawn.tokens[0] < SPEC.vocab_size and not drawn.sure[0] > 0.5


@pytest.mark.parametrize("flags", [*FLAGS, *SHAPES[-3:]], ids=str)
def test_torch_makes_of_rows_what_the_host_does(flags: dict[str, bool]) -> None:
    """Of a long text in pieces and a short one beside it."""
    spec, draw = replace(SPEC, **flags), np.random.default_rng(3)
    heads = [random_head(spec, make=make) for make in (Head, on_torch)]
    texts = [[head.open(1), head.open(5)] for head in heads]
    for counts in ((300, 1), (1, 7), (2, 2)):
        ids, states = (
            draw.integers(0, 320, sum(counts)),
            draw.normal(size=(sum(counts), 3, spec.reads)).astype(np.float32),
        )
        drawn, fused = [], []
        for head, kept in zip(heads, texts, strict=True):
            fused.append(head.fuse(states))
            rows = [Rows(text, count) for text, count in zip(kept, counts, strict=True)]
            drawn.append(head.step(ids, fused[0], rows))
        np.testing.assert_allclose(fused[1], fused[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(drawn[1].states, drawn[0].states, rtol=2e-3, atol=2e-3)
        np.testing.assert_array_equal(drawn[1].tokens, drawn[0].tokens)
        np.testing.assert_allclose(drawn[1].sure, drawn[0].sure, rtol=2e-2)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_rows_one_by_one_are_rows_together(flags: dict[str, bool]) -> None:
    """Of two texts at once, in pieces, and each alone."""
    fields = {name: getattr(SPEC, name) for name in SPEC.__dataclass_fields__} | flags
    spec, draw = HeadSpec(**fields), np.random.default_rng(2)
    head, ids = random_head(spec), [draw.integers(0, 320, n) for n in (300, 7)]
    states = [head.fuse(draw.normal(size=(len(x), 3, 64)).astype(np.float32)) for x in ids]
    whole: list[NDArray[np.float32]] = []
    for x, state in zip(ids, states, strict=True):
        kept = KeysValues(spec, 1)
        parts = [
            head.run(x[a : a + 100], state[a : a + 100], [Rows(kept, len(x[a : a + 100]))])
            for a in range(0, len(x), 100)
        ]
        whole.append(np.concatenate(parts))
    rows = [Rows(KeysValues(spec, 1), len(x)) for x in ids]
    together = head.run(np.concatenate(ids), np.concatenate(states), rows)
    np.testing.assert_allclose(together, np.concatenate(whole), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_a_head_without_an_embedding_has_that_of_its_model(model: Path, backend: Any, tmp_path: Path) -> None:
    """As the authors' heads are, which are files of torch.save, too."""
    paths = [write(tmp_path / name) for name in ("whole", "lacks", "pickled")]
    tensors = load_file(paths[0] / "model.safetensors")
    words = load_file(model / "model.safetensors")["model.embed_tokens.weight"].float()
    save_file(tensors | {"embed_tokens.weight": words}, paths[0] / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, paths[1] / "model.safetensors")
    (paths[2] / "model.safetensors").unlink()
    torch.save({name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}, paths[2] / PICKLED)
    runner, _ = open_runner(model, backend=backend, options=RunnerOptions(dtype="float32", threads=1))
    runner.load_weights()
    plan: Any = SimpleNamespace(session_len=300, max_prefill_token_num=64)
    heads = [open_head(path, runner).load(plan).head for path in paths]
    ids, states = np.arange(5, 45), np.random.default_rng(3).normal(size=(40, 64)).astype(np.float32)
    first, *others = (head.step(ids, states, [Rows(head.open(1), len(ids))]) for head in heads)
    for drawn in others:
        np.testing.assert_array_equal(drawn.tokens, first.tokens)
        np.testing.assert_allclose(drawn.states, first.states, rtol=1e-5, atol=1e-5)
    runner.close()


def test_a_head_of_another_width_than_its_model(model: Path, tiny_models: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "head", replace(SPEC, states_size=96), target_hidden_size=96)
    runner, _ = open_runner(
        tiny_models("llama", num_hidden_layers=4, hidden_size=96), backend="turbomind", options=RunnerOptions()
    )
    assert open_head(path, runner).spec.reads == 96
    tensors = load_file(path / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ToolkitError, match=r"expected a tensor embed_tokens.weight as wide as the head, found none"):
        open_head(path, runner)
    runner.close()


def test_heads_of_other_models_are_refused(model: Path, tiny_models: Any, tmp_path: Path) -> None:
    from toolkit import ChatTemplateConfig, pipeline

    # A model's own is rendered by a process whose limit of memory leaves no room for checks of addresses.
    template = ChatTemplateConfig("chatml")

    def opened(path: Path, config: Any = TurbomindEngineConfig, on: Path = model, **fields: Any) -> None:
        fields = {"speculative_algorithm": "eagle3", "speculative_draft_model": str(path)} | fields
        pipeline(str(on), backend_config=config(session_len=64, **fields), chat_template_config=template).close()

    made = write(tmp_path / "head")
    opened(made)
    opened(made, speculative_algorithm=None)  # what it is its files say
    with pytest.raises(UsageError, match=r"is of a model of width 64, the model has 96"):
        opened(made, on=tiny_models("llama", num_hidden_layers=4, hidden_size=96))
    with pytest.raises(UsageError, match=r"is of a model of 320 tokens, the model has 400"):
        opened(made, on=tiny_models("llama", num_hidden_layers=4, vocab_size=400))
    with pytest.raises(UsageError, match=r"reads layer 4, the model has 2"):
        opened(made, on=tiny_models("llama"))
    opened(made, PytorchEngineConfig)
    with pytest.raises(ToolkitError, match=r"expected an EAGLE-3 head .* found a model; use draft_model"):
        opened(model)
    with pytest.raises(UsageError, match="is a head, no model; use eagle3"):
        opened(made, speculative_algorithm="draft_model")
    with pytest.raises(UsageError, match="eagle3 needs speculative_draft_model"):
        TurbomindEngineConfig(speculative_algorithm="eagle3")
    assert SpeculativeConfig("eagle3", "x").fields()["speculative_draft_model"] == "x"
