"""Random small specs with all that a spec can say, on every executor that takes them, against one plain reference."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.models.spec import DecoderSpec, Mixer
from toolkit.quant.layers.along import along
from toolkit.quant.layers.forward import Given, added_by, embed, head_logits, layer_forward
from toolkit.runners.base import RunnerOptions
from toolkit.runners.native import library
from toolkit.runners.native import runner as native
from toolkit.runners.tensor.runner import TensorRunner
from toolkit.runners.tensor.support import experts_apart
from toolkit.runners.tensor.traits import model_traits

OPTIONS = RunnerOptions(dtype="float32", device="cpu", block_size=16, threads=1)
EXAMPLES = 25
ROUNDED = 0.1  # relative error that 8-bit activations and an 8-bit head may make on the native runner


def _by_runner(make, spec, weights, ids, support):
    """Logits of a text in chunks of 13, 20, 1 and the rest, or of whole blocks, with another sequence beside it."""
    runner = make(spec, lambda: weights, OPTIONS)
    driver = support("steps").Driver(runner)
    one, other = driver.add(long=support("random_specs").is_long(spec, len(ids))), driver.add()
    cuts = (13, 33, 34, len(ids)) if spec.block == 1 else (12, 32, 36, len(ids))
    rows = [driver.step({one: ids[: cuts[0]], other: [5, 6]}, "all").logits[: cuts[0]]]
    for a, b in pairwise(cuts):
        rows.append(driver.step({one: ids[a:b], other: [7]}, "all").logits[: b - a])
    if hasattr(runner, "close"):
        runner.close()
    return np.concatenate(rows)


def _by_torch(spec, weights, ids, support):
    return _by_runner(TensorRunner, spec, weights, ids, support)


def _by_native(spec, weights, ids, support):
    return _by_runner(native.NativeRunner, spec, weights, ids, support)


def _by_calibration(spec, weights, ids, support):
    w = support("random_specs").dense(weights)
    if spec.tied:
        w[spec.head] = w[spec.embed]
    table = spec.per_layer
    given = None if table is None else Given(table, lambda ids: w[table.embed][ids], w)
    x = embed(spec, w[spec.embed], torch.tensor([ids]), None, added_by(spec, w), given)
    for i, layer in enumerate(spec.layers):
        x = layer_forward(layer, w, x, along=along(spec, i))
    return head_logits(spec, w, x)[0].numpy()


STACKS = ("moe_experts_int8", "moe_experts_group_int")  # torch's wait for how many tokens an expert got


def _by_graphs(spec, weights, ids, support):
    """As on a GPU, on a CPU."""
    graphs = support("graphs")
    device = graphs.CpuDevice()

    def make(*args):
        return device.watch(TensorRunner(*args, graphs=device, ops=graphs.interpreted_ops(*STACKS)))

    return _by_runner(make, spec, weights, ids, support)


EXECUTORS = {"torch": _by_torch, "native": _by_native, "calibration": _by_calibration, "graphs": _by_graphs}
SLOW = pytest.param("graphs", marks=pytest.mark.slow)  # Triton's interpreter takes ten seconds a model


def _accepts(executor, spec, weights):
    if executor == "graphs":  # what the kernels behind them lack
        return not model_traits(spec) and experts_apart(spec, weights, torch.float32) is None
    return executor != "native" or native.unsupported(spec, OPTIONS) is None


OF_PICTURES = {
    "vision",
    "head_rows",
    "seen",
    "cross",
    "pad",
    "strict",
}  # texts have none: tests of families and vision have these
NOT_VARIED = {"slopes", "kind", "family", "vocab_size", "max_position", "embed", "head", "shard", "group"}
NOT_VARIED |= {"float16", "doubled"}  # they decide something as a model is opened: no executor reads them
NOT_VARIED |= {"mute"}  # the engine refuses what such models would write
NOT_VARIED |= {"spread"}  # parts of models have it: tests/parallel/test_families.py
# of texts that are read whole: tests/families/test_encoders.py
NOT_VARIED |= {"mutual", "carries", "writes", "types", "type_rows", "position_bias"}
NOT_VARIED |= {"sink_tokens"}  # where a user asks for it: tests/native/test_streaming.py
NOT_VARIED |= {"own"}  # the engine says each token's length: tests/pipeline/test_dynamic_rope.py
NOT_VARIED |= {"outside", "newest"}  # of a model that drafts beside another: tests/engine/test_assistant.py


def test_random_specs_say_all_that_a_spec_can(support):
    """A field that they never set is one that no executor was tried with."""
    chance, seen = random.Random(1), {}

    def look(part):
        if isinstance(part, tuple):
            for each in part:
                look(each)
        elif dataclasses.is_dataclass(part):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                seen.setdefault((type(part).__name__, field.name), set()).add(str(value))
                look(value)

    for _ in range(300):
        look(support("random_specs").any_spec(lambda options: options[int(chance.random() * len(options))]))
    same = {
        f"{owner}.{name}"
        for (owner, name), given in seen.items()
        if len(given) < 2 and name not in NOT_VARIED | OF_PICTURES
    }
    missing = {mixer.__name__ for mixer in get_args(Mixer) if mixer.kind not in OF_PICTURES} - {
        owner for owner, _ in seen
    }
    assert not same | missing, sorted(same | missing)


@pytest.mark.parametrize("executor", ["torch", "native", "calibration", SLOW])
@pytest.mark.parametrize("form", ["dense", "int4", "int8", "mixed"])
def test_every_executor_gives_the_reference_s_logits(executor, form, support):
    models, plain = support("random_specs"), support("plain_model")
    taken, examples = 0, 12 if executor == "graphs" else EXAMPLES

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def check(data):
        nonlocal taken
        spec = data.draw(models.specs(quantized=form != "dense"))
        assert DecoderSpec.from_json(spec.to_json()) == spec
        seed = data.draw(st.integers(0, 1000))
        weights = models.weights(spec, form, seed)
        if not _accepts(executor, spec, weights):
            return
        taken += 1
        ids = np.random.default_rng(seed).integers(0, models.VOCAB, models.LENGTH).tolist()
        expected = plain.logits(spec, models.dense(weights), ids).numpy()
        found = EXECUTORS[executor](spec, weights, ids, support)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        rounds = form != "dense" and executor != "calibration" and not (executor == "torch" and form == "int4")
        assert error < (ROUNDED if rounds else 1e-4)

    check()
    assert taken > examples // (8 if executor == "graphs" else 4) or library.available() is not None
