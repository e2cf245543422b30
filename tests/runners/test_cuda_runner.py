"""The runner with graphs on a CPU: graphs by ``tests/support/graphs.py``, Triton's kernels by its interpreter.

The oracle is the runner without graphs, which ``test_parity.py`` compares with transformers.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from toolkit.artifacts.canonical import Fp4
from toolkit.artifacts.rounding import to_group_int
from toolkit.errors import UsageError
from toolkit.kernels import KernelError
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.step import uniform
from toolkit.runners.tensor.runner import TensorRunner
from toolkit.runners.tensor.step.draws import columns, uniforms
from toolkit.runners.tensor.step.idle import idle_batch
from toolkit.runners.tensor.step.inputs import graph_rows
from toolkit.runners.tensor.step.prompts import most_tokens, parts_room
from toolkit.runners.tensor.step.sampler import row_best
from toolkit.runners.tensor.step.steps import Steps
from toolkit.runners.tensor.step.tiles import AttentionPlan
from toolkit.runners.tensor.traits import model_traits

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="session")
def graphs(support):
    return support("graphs")


@pytest.fixture
def pair(tiny_models, steps, graphs):
    """``pair(family, triton ops …, **options)``: a driver over the runner with graphs, its device, one over torch's; of
    one layer unless ``layers`` says more (None: as many as the tiny model has), for the interpreter is slow."""

    def make(family, *triton, layers=1, blocks=64, config=(), **options):
        settings = RunnerOptions(**({"dtype": "float32", "block_size": 16, "device": "cpu"} | options))
        path = tiny_models(family, **dict(config), **({} if layers is None else {"num_hidden_layers": layers}))
        opened, device = open_model(path), graphs.CpuDevice()
        ops = graphs.interpreted_ops(*triton, **model_traits(opened.spec))
        runner = TensorRunner(opened.spec, opened.weights, settings, graphs=device, ops=ops)
        oracle, _ = open_runner(path, backend="pytorch", options=settings)
        return steps.Driver(device.watch(runner), blocks), device, steps.Driver(oracle, blocks)

    return make


def _prompt(length, seed=0):
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def _both(ours, oracle, new, **extra):
    """One step of both; tokens must be the same. Returns our output."""
    found, expected = ours.step(dict(new), **extra), oracle.step(dict(new), **extra)
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logits, expected.logits, **CLOSE)
    np.testing.assert_allclose(found.hidden, expected.hidden, **CLOSE)
    return found


# Beside attention the kernels of Triton that run, of families with latent rows and with states.
STATES = {
    "minicpm3": ("latent_write",),
    "lfm2": ("causal_conv",),
    "deepseek_v3": ("latent_write",),
    "falcon_h1": ("causal_conv", "state_scan"),
    "qwen3_next": ("causal_conv", "delta_rule"),
}
ALIBI = {"falcon": {"alibi": True, "new_decoder_architecture": False, "parallel_attn": False}}
OTHERS = ("qwen3", "llama4_text", "internlm2", "mixtral", "deepseek_v3", "falcon_h1", "qwen3_next")
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in OTHERS]


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "minicpm3", "lfm2", "mamba2", "falcon", *SLOW])
def test_chunks_ragged_batches_and_padded_decode_steps_give_the_torch_runners_tokens(family, pair):
    ours, device, oracle = pair(family, *STATES.get(family, ()), layers=None, config=ALIBI.get(family, ()))
    numbers = [ours.add(long=family == "phi3" and i == 0) for i in range(3)]
    assert [oracle.add(long=s.long) for s in ours.sequences] == numbers
    _both(ours, oracle, {numbers[0]: _prompt(33, 1)}, want="all")
    out = _both(ours, oracle, {numbers[0]: [5, 6], numbers[1]: _prompt(7, 2), numbers[2]: [9]})
    for size in (3, 3, 1, 2, 3):  # of which 3 runs padded to 4, and 2 as it is
        tokens = [*out.tokens[:, 0].tolist(), 4, 4]
        out = _both(ours, oracle, {n: [t] for n, t in zip(numbers[:size], tokens, strict=False)})
    assert device.captures >= 1 and device.replays >= 1
    _both(ours, oracle, {n: [7] for n in numbers}, want="all")  # what the graphs wrote to the cache


def test_tokens_of_a_block_see_each_other(pair):
    ours, device, oracle = pair("sdar")
    assert [ours.add(), ours.add()] == [oracle.add(), oracle.add()]
    _both(ours, oracle, {0: _prompt(36, 1), 1: _prompt(8, 2)}, want="all")
    _both(ours, oracle, {0: [5, 3, 3, 6], 1: _prompt(8, 3)}, want="all")
    ours.runner.warm_up(2, 64, 16)
    assert device.captures == 0, "no step is of one token a sequence"


@pytest.mark.parametrize("policy", [8, 4, 16])
def test_quantized_caches_through_graphs(policy, pair):
    ours, device, oracle = pair("llama", "rope_kv_write", quant_policy=policy)
    numbers = [ours.add(), ours.add()]
    assert [oracle.add(), oracle.add()] == numbers
    ours.step({numbers[0]: _prompt(20, 1), numbers[1]: _prompt(5, 2)})
    oracle.step({numbers[0]: _prompt(20, 1), numbers[1]: _prompt(5, 2)})
    for token in (5, 6, 7):
        ours.step({n: [token] for n in numbers})
        oracle.step({n: [token] for n in numbers})
    assert device.replays > 0
    new = {n: [8] for n in numbers}
    np.testing.assert_allclose(ours.step(dict(new), "all").logits, oracle.step(dict(new), "all").logits, atol=2e-2)


def test_long_contexts_are_split_and_merged_in_graphs_with_room_to_spare(pair):
    ours, device, oracle = pair("llama")
    ours.runner.warm_up(2, 300, 16)
    tiles = [(key.rows, room) for key in ours.runner._steps.graphs.keys() for _, _, room in key.tiles]
    assert tiles == [(2, 2), (2, 4), (1, 1), (1, 2)]  # up to 256 tokens, and beyond
    assert [ours.add(), ours.add()] == [oracle.add(), oracle.add()]
    _both(ours, oracle, {0: _prompt(254, 1), 1: [3]})
    before = device.replays
    for token in (5, 6, 7, 8):  # the second ends a range of keys: 2 tiles, then 3 in room for 4
        _both(ours, oracle, {0: [token], 1: [token]})
    assert len(ours.runner._steps.graphs.keys()) == 4 and device.replays == before + 4


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma2",
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
    ],
)
def test_prompts_chunks_and_both_beside_decoding_are_graphs_padded_to_a_size(family, pair):
    ours, device, oracle = pair(family, layers=None)
    assert [ours.add() for _ in range(4)] == [oracle.add() for _ in range(4)]
    prompts, sizes = ours.runner._ready().prompts, []
    for turn in range(4):  # kernel by kernel, then as graphs; each time other tokens, lengths and tables
        before = len(prompts.keys())
        _both(ours, oracle, {0: _prompt(27 + turn, turn), 1: _prompt(6, turn)}, want="all")  # a prompt and a chunk
        _both(ours, oracle, {2: _prompt(2, turn), 3: [5 + turn], 1: _prompt(20 - turn, turn)})  # beside decoding
        _both(ours, oracle, {2: [4, 6, 7], 0: [8, turn, 9], 3: [3, 3, turn]}, want="all")  # as guesses are verified
        _both(ours, oracle, {n: [7] for n in range(4)})
        sizes.append(len(prompts.keys()) - before)
    assert {key.rows for key in prompts.keys()} == {16, 32, 64} and sizes[-1] == 0 and device.replays > 4


@pytest.mark.parametrize("family", ["minicpm3", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_latent_attention_of_few_tokens_a_sequence_is_a_graph(family, pair):
    ours, device, oracle = pair(family, "latent_write", layers=None)
    assert [ours.add(), ours.add()] == [oracle.add(), oracle.add()]
    steps = ours.runner._ready()
    few = int(steps._absorbed)
    for turn in range(4):
        _both(ours, oracle, {0: _prompt(few, turn), 1: _prompt(few - 1 - turn % 2, turn)}, want="all")
    assert few > 2 and len(steps.prompts.keys()) > 0 and device.replays > 0
    replays = device.replays
    _both(ours, oracle, {0: _prompt(few + 1, 5), 1: [3]}, want="all")
    assert device.replays == replays


def test_prompts_behind_long_contexts_merge_in_graphs(pair):
    ours, device, oracle = pair("llama")
    assert [ours.add(), ours.add()] == [oracle.add(), oracle.add()]
    _both(ours, oracle, {0: _prompt(260, 1), 1: [3]})
    for turn in range(4):
        _both(ours, oracle, {0: [5 + turn], 1: _prompt(9 + turn, turn)})
    assert any(parts for key in ours.runner._steps.prompts.keys() for *_, parts in key.tiles) and device.replays > 0


def test_a_graph_of_a_large_step_has_room_for_the_partial_results_that_there_are_alone(pair, monkeypatch):
    """Room for one of every tile that could be would be a gigabyte of a 7B model."""
    room, give = [], AttentionPlan.give

    def seen(plan, heads, items, merges, parts, kind="decode"):
        room.append((len(items), parts))
        give(plan, heads, items, merges, parts, kind)

    ours, device, oracle = pair("llama")
    assert [ours.add(), ours.add()] == [oracle.add(), oracle.add()]
    _both(ours, oracle, {0: _prompt(260, 1), 1: [3]})
    monkeypatch.setattr(AttentionPlan, "give", seen)
    for turn in range(3):
        _both(ours, oracle, {0: [5 + turn], 1: _prompt(70 + turn, turn)})
    assert device.replays > 0 and (128, 16) in room and max(parts for _, parts in room) == 16


def test_room_for_partial_results():
    found = {n: parts_room(n) for n in range(5000)}
    assert sorted(set(found.values())) == [0, 16, 64, 256, 1024, 4096, 16384]
    assert all(n <= room < max(17, 4 * n + 1) for n, room in found.items())


def test_texts_of_models_that_see_run_as_graphs_and_tokens_of_pictures_do_not(pair):
    """A token of a text has the same position three times, one of a picture a row and a column."""
    ours, device, oracle = pair("qwen2_vl", layers=None)
    assert [ours.add(), oracle.add()] == [0, 0]
    for turn in range(4):
        batches = [driver.batch({0: _prompt(12 + turn, turn)}, "all") for driver in (ours, oracle)]
        for batch in batches:
            batch.positions = np.repeat(batch.positions, 3, 0)
            if turn == 3:
                batch.positions[1:, 4:9] += [[2], [1]]
        found, expected = (d.runner.submit(b).result() for d, b in zip((ours, oracle), batches, strict=True))
        np.testing.assert_allclose(found.logits, expected.logits, **CLOSE)
    assert (
        device.replays == 1 and len(ours.runner._steps.prompts.keys()) == 1
    )  # the first finds tiles, the second is it


def test_what_goes_into_layers_comes_out_of_graphs_too(pair):
    ours, device, oracle = pair("llama")
    assert [ours.add(), oracle.add()] == [0, 0]
    for turn in (0, 1):
        _both(ours, oracle, {0: _prompt(12, turn)})
    layers = {"aux_layers": (0, 1), "aux_index": np.array([3, 4, 9], np.int32)}
    for turn in range(3):
        found, expected = (driver.step({0: _prompt(12, turn)}, **layers) for driver in (ours, oracle))
        np.testing.assert_allclose(found.aux, expected.aux, **CLOSE)
        assert found.aux.shape == (3, 2, ours.runner.spec.hidden_size) and device.replays == turn
    _both(ours, oracle, {0: _prompt(12, 3)})
    assert device.replays == 3


@pytest.mark.parametrize(
    "family, expands, most",
    [("llama", False, 1024), ("llama", True, 256), ("minicpm3", False, 1024), ("mamba2", False, 0)],
)
def test_which_steps_with_prompts_are_graphs(family, expands, most, tiny_models):
    spec = open_model(tiny_models(family)).spec
    assert most_tokens(spec, expands) == most


@pytest.mark.parametrize("form", ["int4", "fp4"])
@pytest.mark.parametrize("which", [0, -1])
def test_weights_that_become_dense_for_many_rows_end_graphs_wherever_they_are(which, form, tiny_models, graphs):
    opened = open_model(tiny_models("llama"))
    weights, name = dict(opened.weights()), opened.spec.linears()[which].name
    dense = weights[name].weight
    rounded = to_group_int(dense, 4, 32)
    scales = torch.ones(dense.shape[0], dense.shape[1] // 16).to(torch.float8_e4m3fn)
    weights[name] = rounded if form == "int4" else Fp4(rounded.codes, scales, 16)
    options = RunnerOptions(dtype="float32", device="cpu")
    made = (opened.spec, lambda: weights, options)
    assert TensorRunner(*made, graphs=graphs.CpuDevice(), ops=graphs.interpreted_ops())._prompts == 256


def test_the_larger_a_model_the_fewer_tokens_are_worth_a_graph():
    def most(billions):
        linear = SimpleNamespace(in_features=1000, out_features=int(billions * 1e6))
        mixer = SimpleNamespace(kind="mlp", linears=lambda: [linear])
        spec = SimpleNamespace(
            mixers=lambda: [(0, mixer)], paged=list, cache_groups=(), mutual=False, block=1, linears=lambda: [linear]
        )
        return most_tokens(spec, False)

    assert [most(b) for b in (0.1, 1, 7, 13, 70, 1000)] == [1024, 1024, 512, 384, 64, 0]


def test_of_a_mixture_the_experts_that_a_token_chooses_count():
    def mlp(billions):
        linear = SimpleNamespace(in_features=1000, out_features=int(billions * 1e6))
        return SimpleNamespace(linears=lambda: [linear])

    experts = [mlp(0.3) for _ in range(100)]
    every = [*experts[0].linears(), *mlp(0.7).linears()] + [x for e in experts[1:] for x in e.linears()]
    mixer = SimpleNamespace(kind="moe", experts=experts, top_k=1, linears=lambda: every)
    spec = SimpleNamespace(
        mixers=lambda: [(0, mixer)], paged=list, cache_groups=(), mutual=False, block=1, linears=list
    )
    assert most_tokens(spec, False) == 1024


def test_a_graph_of_prompts_that_cannot_be_leaves_decode_steps_theirs(pair, caplog):
    ours, device, oracle = pair("llama")
    assert [ours.add(), oracle.add()] == [0, 0]
    _both(ours, oracle, {0: _prompt(20)})
    device.fail_captures = 2
    for turn in range(3):
        _both(ours, oracle, {0: _prompt(20, turn)})
    assert "no memory is left to capture steps with prompts" in caplog.text
    for token in (5, 6, 7):
        _both(ours, oracle, {0: [token]})
    assert device.captures == 1 and device.replays == 1


def test_without_attention_a_graph_serves_every_length(pair):
    ours, device, oracle = pair("mamba2")
    ours.runner.warm_up(2, 300, 16)
    assert [(key.rows, key.tiles) for key in ours.runner._steps.graphs.keys()] == [(2, ()), (1, ())]
    assert [ours.add(), ours.add()] == [oracle.add(), oracle.add()]
    _both(ours, oracle, {0: _prompt(40, 1), 1: [3]})
    for new in ({0: [5], 1: [5]}, {1: [6]}, {1: [7], 0: [7]}):
        _both(ours, oracle, new)
    assert device.captures == 2 and device.replays == 3


def test_all_that_triton_has_runs_through_graphs(pair):
    ours, device, oracle = pair(
        "gemma2", "embedding", "rope_kv_write", "rms_norm", "add_rms_norm", "act_and_mul", "sample", layers=2
    )
    number = ours.add()
    assert oracle.add() == number
    out = _both(ours, oracle, {number: [3, 4, 5]})
    for _ in range(3):
        out = _both(ours, oracle, {number: [int(out.tokens[0, 0])]})
    assert device.replays == 2


def test_tokens_of_the_step_before_are_read_on_the_device(pair, steps):
    ours, device, oracle = pair("llama")
    for driver in (ours, oracle):
        driver.add(), driver.add()
    rows = steps.sampling(2, temperature=0.9, seed=np.array([5, 6]), position=np.array([0, 0]))
    handles = [ours.runner.submit(ours.batch({0: [3, 4], 1: [5, 6, 7]}, sampling=rows))]
    for position in (1, 2, 3):  # each is submitted before anything is read; rows change places
        rows = steps.sampling(2, temperature=0.9, seed=np.array([5, 6]), position=np.full(2, position))
        new = {1: [0], 0: [0]} if position % 2 else {0: [0], 1: [0]}
        source = np.array([1, 0], np.int32)
        handles.append(ours.runner.submit(ours.batch(new, sampling=rows, from_previous=source)))
    found = [h.result().tokens[:, 0].tolist() for h in handles]
    rows = steps.sampling(2, temperature=0.9, seed=np.array([5, 6]), position=np.array([0, 0]))
    expected = [oracle.step({0: [3, 4], 1: [5, 6, 7]}, sampling=rows).tokens[:, 0].tolist()]
    for position in (1, 2, 3):
        rows = steps.sampling(2, temperature=0.9, seed=np.array([5, 6]), position=np.full(2, position))
        last = expected[-1][::-1]
        new = dict(zip((1, 0) if position % 2 else (0, 1), ([t] for t in last), strict=True))
        expected.append(oracle.step(new, sampling=rows).tokens[:, 0].tolist())
    assert found == expected and device.replays >= 1


def test_every_rule_of_sampling_gives_the_torch_runners_tokens(pair, steps):
    ours, device, oracle = pair("llama")
    count, vocab = 5, 320
    for driver in (ours, oracle):
        numbers = [driver.add() for _ in range(count)]
    rng = np.random.default_rng(0)
    new = {n: _prompt(3 + n, n) for n in numbers}
    for position in range(4):
        grammar = rng.integers(-(2**31), 2**31, (count, vocab // 32), dtype=np.int64).astype(np.int32)
        rows = steps.sampling(
            count,
            temperature=np.array([0, 0.7, 1, 1.3, 0.9]),
            top_k=np.array([0, 0, 9, 0, 30]),
            top_p=np.array([1, 1, 1, 0.7, 0.9]),
            min_p=np.array([0, 0, 0, 0, 0.05]),
            repetition_penalty=np.array([1, 1.4, 1, 1, 1]),
            frequency_penalty=np.array([0, 0, 0.5, 0, 0]),
            seed=np.arange(count) * 977,
            position=position,
            logprobs=np.array([-1, 0, 3, -1, 2]),
            history_ptr=np.array([0, 0, 2, 3, 3, 3], np.int32),
            history_ids=np.array([7, 9, 11], np.int32),
            history_count=np.array([1, 0, 2], np.int32),
            bias_ptr=np.array([0, 1, 1, 1, 3, 3], np.int32),
            bias_ids=np.array([5, 6, 7], np.int32),
            bias_values=np.array([90, -np.inf, 3], np.float32),
            grammar=grammar if position % 2 else None,
        )
        found, expected = (d.step(dict(new), sampling=rows) for d in (ours, oracle))
        assert found.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(found.logprob, expected.logprob, **CLOSE)
        assert found.top_ids.tolist() == expected.top_ids.tolist()
        np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, **CLOSE)
        new = {n: [int(t)] for n, t in zip(numbers, found.tokens[:, 0], strict=True)}
    assert device.replays >= 1


def test_what_goes_into_layers_comes_back(pair):
    """Of a prompt, and of a step of one token a sequence, which then is no graph."""
    graphs, _, torch_ = pair("llama", layers=2)
    tokens, found = list(range(5, 25)), []
    for driver in (graphs, torch_):
        numbers = [driver.add(), driver.add()]
        index = np.array([0, 3, 19], np.int32)
        rows = [driver.step({numbers[0]: tokens}, aux_layers=(1, 0, 2), aux_index=index).aux]
        driver.step({numbers[1]: tokens[:3]})
        both = {n: [7] for n in numbers}
        rows.append(driver.step(both, aux_layers=(2,), aux_index=np.arange(2, dtype=np.int32)).aux)
        found.append(rows)
    assert [rows.shape for rows in found[0]] == [(3, 3, 64), (2, 1, 64)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(RunnerError, match=r"aux_layers: expected values in \[0, 3\)"):
        torch_.step({0: [7]}, aux_layers=(3,), aux_index=np.zeros(1, np.int32))


def test_rows_come_back_as_asked(pair, steps):
    ours, _, oracle = pair("llama")
    extra = {
        "logits_index": np.array([2, 0, 2], np.int32),
        "hidden_index": np.array([1], np.int32),
        "target_index": np.array([2, 1], np.int32),
        "target_ids": np.array([8, 9], np.int32),
        "sample_index": np.array([3], np.int32),
    }
    found, expected = (d.step({d.add(): [3, 4, 5, 6]}, **extra) for d in (ours, oracle))
    for name in ("logits", "hidden", "target_logprobs"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), **CLOSE)
    assert found.tokens.dtype == np.int32 and found.tokens.tolist() == expected.tokens.tolist()
    none = {name: np.zeros(0, np.int32) for name in extra}
    empty = ours.step({0: [3]}, **none, sampling=steps.sampling(0))
    assert empty.tokens.shape == (0, 1) and empty.logits.shape == (0, 320) and empty.bad_rows.shape == (0,)


@pytest.mark.parametrize("policy", [0, 16])
def test_copied_and_moved_blocks(policy, pair):
    ours, _, oracle = pair("llama", quant_policy=policy)
    prompt = _prompt(20, 3)
    outputs = []
    for driver in (ours, oracle):
        source, twin = driver.add(), driver.add()
        driver.step({source: prompt})
        pairs = []
        for block in driver.sequences[source].blocks[0]:
            driver.sequences[twin].blocks[0].append(driver._free[0].pop(0))
            pairs.append((block, driver.sequences[twin].blocks[0][-1]))
        driver.sequences[twin].length = 20
        copies = (np.asarray(pairs, np.int32),)
        outputs.append(driver.step({source: [9], twin: [9]}, copy_blocks=copies).tokens.tolist())
    assert outputs[0] == outputs[1] and outputs[0][0] == outputs[0][1]
    moved = ours.runner.export_block(0, ours.sequences[0].blocks[0][0])
    ours.runner.import_block(0, ours.sequences[1].blocks[0][0], moved)
    with pytest.raises(RunnerError, match=r"expected .* bytes"):
        ours.runner.import_block(0, 0, b"12")


def test_rows_that_hold_no_numbers_are_named(pair):
    ours, _, _ = pair("llama")
    numbers = [ours.add(), ours.add()]
    ours.step({n: [3, 4] for n in numbers})
    with torch.inference_mode():
        ours.runner._decoder.table[7] = float("nan")
    assert ours.step({numbers[0]: [5], numbers[1]: [7]}).bad_rows.tolist() == [1]


def test_memory_that_runs_out_fails_the_step_with_the_numbers(pair):
    ours, device, _ = pair("llama")
    number = ours.add()
    ours.step({number: [3, 4]})
    device.fail_step = True
    with pytest.raises(
        RunnerError, match=r"ran out of memory in a step of 1 sequences and 3 tokens: 8\.00 of 16\.00 GiB"
    ):
        ours.step({number: [5, 6, 7]})
    assert ours.step({ours.add(): [3]}).tokens.shape == (1, 1)


def test_without_memory_for_graphs_decode_steps_run_kernel_by_kernel(pair, caplog):
    ours, device, oracle = pair("llama")
    device.fail_captures = 99
    assert [ours.add(), oracle.add()] == [0, 0]
    _both(ours, oracle, {0: [3, 4]})
    for token in (5, 6, 7):
        _both(ours, oracle, {0: [token]})
    assert device.captures == 0 and "no memory is left to capture decode steps" in caplog.text


def test_a_capture_that_fails_is_tried_once_more(pair, caplog):
    ours, device, oracle = pair("llama")
    device.fail_captures = 1
    assert [ours.add(), oracle.add()] == [0, 0]
    for ids in ([3, 4], [5], [6], [7], [8]):
        _both(ours, oracle, {0: ids})
    assert device.captures > 0 and device.replays > 0 and not caplog.text


def test_a_step_that_breaks_off_leaves_no_graph_that_lacks_tiles(pair, monkeypatch):
    """Of one that failed in its second layer, which has a window, or has none, only the first one's tiles are known."""
    ours, device, oracle = pair("gemma2", layers=2)
    assert ours.add() == oracle.add() == 0
    _both(ours, oracle, {0: _prompt(20)})
    tiles, asked = AttentionPlan.tiles, []

    def breaks(plan, *arguments):
        asked.append(plan)
        if len(asked) == 2:
            raise RuntimeError("no more")
        return tiles(plan, *arguments)

    monkeypatch.setattr(AttentionPlan, "tiles", breaks)
    with pytest.raises(RunnerError, match="no more"):
        ours.step({0: [5]})
    ours.sequences[0].length -= 1
    for token in (5, 6, 7, 8):
        _both(ours, oracle, {0: [token]})
    assert device.replays > 0


def test_graphs_that_were_forgotten_are_captured_anew(pair, caplog):
    """Into memory of their own: torch refuses the pool of graphs that are gone."""
    ours, device, oracle = pair("llama")
    assert [ours.add(), oracle.add()] == [0, 0]
    replays = 0
    for ids in ([3, 4], [5], [6], [7]):
        _both(ours, oracle, {0: ids})
    for ids in ([8], [9], [10]):
        if not replays:
            ours.runner._ready().graphs.clear()
            replays = device.replays
        _both(ours, oracle, {0: ids})
    assert device.replays > replays > 0 and not caplog.text


def test_a_kernel_that_cannot_be_captured_is_no_failed_step(pair, caplog, monkeypatch):
    ours, device, oracle = pair("llama")

    def refused(run, pool):
        raise KernelError("cuLaunchKernelEx: operation not permitted when stream is capturing (CUDA error 900)")

    monkeypatch.setattr(device, "capture", refused)
    assert [ours.add(), oracle.add()] == [0, 0]
    for ids in ([3, 4], [5], [6]):
        _both(ours, oracle, {0: ids})
    assert "the device refuses to capture decode steps" in caplog.text and device.replays == 0


def test_graphs_go_when_the_cache_goes(pair):
    ours, device, oracle = pair("llama")
    ours.add(), oracle.add()
    for driver in (ours, oracle):
        for ids in ([3, 4], [5], [6], [7]):
            driver.step({0: ids})
    before = device.captures
    for driver in (ours, oracle):
        driver.runner.release_cache()
        driver.runner.allocate_cache((64,))
        driver.free(0)
    for ids in ([3, 4], [5], [6], [7]):
        _both(ours, oracle, {0: ids})
    assert device.captures > before
    ours.runner.release_weights()
    with pytest.raises(RunnerError, match="load_weights"):
        ours.step({0: [6]})


def test_a_model_that_has_slept_needs_no_more_graphs_than_before(pair):
    ours, _, oracle = pair("llama")
    ours.runner.warm_up(9, 64, 16)
    before = set(ours.runner._steps.prompts.keys())
    ours.runner.release_cache()
    ours.runner.allocate_cache((64,))
    assert [ours.add(), ours.add()] == [oracle.add(), oracle.add()]
    for new in ({0: _prompt(12)}, {0: _prompt(12)}, {1: _prompt(5), 0: _prompt(9)}):
        _both(ours, oracle, new)
    assert {key.rows for key in before} == {8, 16} and before >= set(ours.runner._steps.prompts.keys()) != set()


def test_no_graph_is_forgotten_for_a_text_as_long_as_was_expected(pair, monkeypatch):
    ours, device, _ = pair("llama")
    monkeypatch.setattr(Steps, "warm_up", lambda *sizes: None)  # the interpreter takes a minute for it
    ours.runner.warm_up(1, 5000, 16)
    ours.runner.release_cache()
    ours.runner.allocate_cache((64,))
    number = ours.add()
    for ids in ([3, 4], [5, 6]):
        ours.step({number: ids})
    ours.step({number: [7, 8]}, positions=np.array([[4500, 4501]], np.int32))
    assert (device.captures, device.replays) == (1, 1)


def test_memory_is_given_back_at_once_though_there_are_graphs(pair):
    """Nobody looks for cycles in an engine's process, which takes what was loaded for what stays: a model that sleeps
    would hold its cache and weights, and one that wakes want the memory of two."""
    ours, device, _ = pair("llama")
    ours.add()
    for ids in ([3, 4], [5, 6], [5], [6]):
        ours.step({0: ids})
    assert device.captures >= 2
    gc.collect()  # what torch's own imports left
    gc.disable()
    held = [weakref.ref(x) for x in (ours.runner._cache, ours.runner._steps, ours.runner._decoder)]
    try:
        ours.runner.release_cache()
        ours.runner.release_weights()
        assert [ref() for ref in held] == [None] * 3
    finally:
        gc.enable()


def test_wrong_batches_are_refused_and_the_next_step_runs(pair):
    ours, _, _ = pair("llama")
    with pytest.raises(RunnerError, match="token_ids"):
        ours.step({ours.add(): [3, 400]})
    assert ours.step({ours.add(): [3]}).tokens.shape == (1, 1)


def test_options_that_cannot_be(tiny_models, graphs):
    opened = open_model(tiny_models("llama"))
    with pytest.raises(UsageError, match="quant_policy"):
        options = RunnerOptions(device="cpu", quant_policy=5)
        TensorRunner(opened.spec, opened.weights, options, graphs=graphs.CpuDevice(), ops=graphs.interpreted_ops())


@pytest.mark.parametrize("rows, width", [(1, 1 << 15), (3, 49152), (40, 1 << 15), (2, 300), (2, (1 << 15) + 1)])
def test_the_best_of_a_row_and_what_is_no_number(rows, width):
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    assert torch.equal(row_best(logits), logits.amax(-1))
    logits[-1, 5] = float("nan")
    best = row_best(logits)
    assert best[-1].isnan() and not best[:-1].isnan().any()


def test_uniform_numbers_are_the_boundarys():
    rng = np.random.default_rng(1)
    seed = rng.integers(0, 2**64, 200, dtype=np.uint64)
    position = rng.integers(0, 1 << 40, 200)
    seed[:2], position[:2] = (0, 2**64 - 1), (0, 1)
    expected = np.array([uniform(int(s), int(p)) for s, p in zip(seed, position, strict=True)], np.float32)
    np.testing.assert_array_equal(uniforms(seed, position), expected)


def test_temperatures_next_to_nothing_are_greedy():
    """A logit of 1 divided by 1e-40 is no number of float32 any more."""
    sampling = idle_batch([(1, 1)] * 4, (0,), 16).sampling
    sampling.temperature[:] = (0, 1e-40, 9e-7, 1e-6)
    assert columns(sampling)["temperature"].tolist() == [0, 0, 0, np.float32(1e-6)]


def test_sizes_of_graphs():
    sizes = sorted({graph_rows(n) for n in range(1, 400)})
    assert sizes[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and all(graph_rows(n) >= n for n in range(1, 1000))
    assert graph_rows(256) == 256 and graph_rows(257) == 288


def test_memory_is_known_before_anything_is_loaded(pair):
    ours, _, oracle = pair("qwen2")
    need = ours.runner.memory()
    assert need.block_bytes == oracle.runner.memory().block_bytes
    assert need.weights == oracle.runner.memory().weights and 0 < need.free < 8 << 30


def test_the_stand_in_has_the_methods_of_a_device(pair):
    """The stand-in has every method of the device, and the device every method that is used."""
    from toolkit.runners.tensor.devices.cuda_device import CudaDevice

    _, device, _ = pair("llama")
    for name in ("working", "pinned", "mark", "capture", "memory", "trim", "trouble"):
        assert callable(getattr(device, name)) and callable(getattr(CudaDevice, name))
    assert torch.device("cpu") == device.torch


def test_warm_up_captures_every_size_and_leaves_no_trace(pair):
    ours, device, oracle = pair("llama")
    ours.runner.warm_up(9, 64, 40)
    decode, prompts = ours.runner._steps.graphs.keys(), ours.runner._steps.prompts.keys()
    assert [key.rows for key in decode] == [16, 8, 4, 2, 1] and {key.rows for key in prompts} == {8, 16, 32}
    captures, before = device.captures, device.replays
    assert captures == len(decode) + len(prompts)
    assert [ours.add(), oracle.add()] == [0, 0]
    for replays, ids in enumerate((_prompt(9), [5], _prompt(30)), start=1):
        _both(ours, oracle, {0: ids})
        assert device.captures == captures and device.replays == before + replays
    with pytest.raises(RunnerError, match="from_previous"):
        ours.runner.warm_up(1, 64, 16)
        ours.step({0: [0]}, from_previous=np.zeros(1, np.int32))
