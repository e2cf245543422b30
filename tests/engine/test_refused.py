"""What the engine says of requests, options and machines that cannot be: the whole line."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.refused import refusing
from toolkit.base import child_process
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.adapters import Adapters
from toolkit.engine.admission import check_request
from toolkit.engine.cache.kept.port import Port
from toolkit.engine.constraints.grammar_format import check_format, fitted_format
from toolkit.engine.load import ranks
from toolkit.engine.load.drafts.eagle import open_eagle_layer
from toolkit.engine.load.drafts.layers import OpenLayers
from toolkit.engine.load.memory_plan import Wishes, plan
from toolkit.engine.nap import Nap
from toolkit.engine.pictures.spans import find_spans
from toolkit.engine.pooling import Head
from toolkit.engine.process.adapter_names import AdapterNames
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.engine.process.peers import Peers
from toolkit.engine.process.streams import Streams
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import build, get
from toolkit.models.spec import CacheGroup, DecoderSpec, HeadLayer, TextHead
from toolkit.models.tiny import tiny_config
from toolkit.runners.base import MemoryNeed, RunnerError, RunnerLost
from toolkit.runners.native.runner import NativeRunner

TYPES = "text, json_object, json_schema, regex_schema, grammar, choice, structural_tag"
MIB = 1 << 20

refused = refusing(UsageError)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"type": "odd"}, f"expected a type among {TYPES}, found 'odd'"),
        (5, f"expected a type among {TYPES}, found 5"),
        ({"type": "json_schema"}, "field 'json_schema': expected an object, found None"),
        (
            {"type": "regex_schema", "regex_schema": ""},
            "field 'regex_schema': expected a non-empty string, found ''",
        ),
        ({"type": "choice", "choice": [""]}, "field 'choice': expected a list of non-empty strings, found ['']"),
        (
            {"type": "json_schema", "json_schema": {1: 2}},
            "field 'json_schema': expected plain JSON values, found a key of no text",
        ),
    ],
)
def test_formats_of_answers(found: Any, told: str) -> None:
    assert refused(lambda: check_format(found)) == f"response_format: {told}"


def test_a_schema_that_no_grammar_holds_to() -> None:
    asked = {"type": "json_schema", "json_schema": {"not": {"type": "string"}}}
    told = "the json_schema has 'not', to which no answer can be held here; leave it out, or say strict: false"
    assert refused(lambda: fitted_format(asked)) == f"response_format: {told}"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            PytorchEngineConfig(tp=2, attn_tp_size=1),
            "attn_tp_size: found 1, expected 2, as tp=2 has it, or none",
        ),
        (
            PytorchEngineConfig(tp=2, nnodes=2, dist_init_addr="a:1", master_addr="b", master_port=2),
            "master_addr and master_port: they say what dist_init_addr says; give one of them",
        ),
        (
            PytorchEngineConfig(nnodes=2),
            "nnodes=2: expected tp, pp or dp above 1 to lay out over so many machines",
        ),
        (
            PytorchEngineConfig(tp=2, distributed_executor_backend="uni"),
            "distributed_executor_backend: uni is one process, found tp=2; expected mp, or tp=1",
        ),
        (
            TurbomindEngineConfig(tp=2, pp=2),
            "tp=2, pp=2: turbomind splits by tp alone, and starts its ranks by itself; leave the rest out, or use "
            "PytorchEngineConfig (--backend pytorch)",
        ),
        (
            PytorchEngineConfig(tp=2, nnodes=2, dist_init_addr="a:1", distributed_executor_backend="ray"),
            "distributed_executor_backend: ray places ranks by itself; leave nnodes or torchrun out",
        ),
        (
            PytorchEngineConfig(tp=2, distributed_executor_backend="ray", devices=[0, 1]),
            "devices: found with distributed_executor_backend ray, which chooses GPUs; leave one out",
        ),
    ],
)
def test_layouts(config: Any, told: str) -> None:
    assert refused(lambda: ranks.check(config)) == told


def test_what_several_machines_do_not_run() -> None:
    config = PytorchEngineConfig(tp=2, nnodes=2, dist_init_addr="a:1")
    told = "nnodes (or torchrun): tool eval is not run on several machines; serve one model"
    assert refused(lambda: ranks.only_lead(config, "tool eval")) == told


@pytest.mark.parametrize(
    ("block", "wishes", "told"),
    [
        (
            1,
            {"kv": 100_000},
            "cache_max_entry_count 100000: that many blocks take 97.66 GiB, 693.2 MiB are left beside weights and "
            "activations; at most 693 fit",
        ),
        (
            900,
            {},
            "not enough memory for a KV cache: 173.3 MiB are left for it beside weights and activations, one block of "
            "64 tokens takes 900.0 MiB; free some memory, or use a quantized model or --quant-policy 8",
        ),
        (
            900,
            {"session_len": 4096},
            "not enough memory for a KV cache: 693.2 MiB are left for it beside weights and activations, one block of "
            "64 tokens takes 900.0 MiB; free some memory, or use a quantized model or --quant-policy 8",
        ),
        (
            100,
            {"session_len": 4096},
            "session_len 4096: its KV cache takes 6.25 GiB, 693.2 MiB are left beside weights and activations; use a "
            "session_len of at most 384, or --quant-policy 8 or 4",
        ),
    ],
)
def test_plans_of_memory(block: int, wishes: dict[str, Any], told: str) -> None:
    def planned() -> object:
        need = MemoryNeed(256 * MIB, 20, (block * MIB,), 1 << 30, False)
        groups, asked = (CacheGroup("full", None, (0,)),), Wishes(**wishes)
        words = {"block_size": 64, "vocab_size": 32000, "max_position": 8192, "device": "cpu"}
        return plan(need, groups, wishes=asked, **words)  # type: ignore[arg-type]

    assert refused(planned, ToolkitError) == told


@pytest.mark.parametrize(
    ("family", "tokens", "fields", "limits", "told"),
    [
        ("llama", 1, {"adapter": 5}, (100, 100), "adapter: expected -1 or one of [], found 5"),
        ("llama", 0, {}, (100, 100), "the prompt is empty: expected at least one token"),
        (
            "llama",
            100,
            {},
            (100, 100),
            "the prompt has 100 tokens, but the session length is 100; shorten the prompt, or raise session_len (the "
            "model takes 512, if the memory does)",
        ),
        (
            "llama",
            100,
            {},
            (100, 200),
            "the prompt has 100 tokens, but the session length is 100 (all that the KV cache holds); shorten the "
            "prompt, or raise cache_max_entry_count",
        ),
        (
            "llama",
            1,
            {"params": SamplingParams(1, routes=True)},
            (100, 100),
            "return_routed_experts: this model has no experts; leave it out",
        ),
        (
            "bert",
            1,
            {},
            (100, 100),
            "this model (bert) reads texts for embeddings and scores and writes none; use /v1/embeddings, /v1/rerank "
            "or `tool embed`",
        ),
    ],
)
def test_requests(family: str, tokens: int, fields: dict[str, Any], limits: tuple[int, int], told: str) -> None:
    spec, _ = build(tiny_config(get(family)))
    runner: Any = SimpleNamespace(spec=spec, options=SimpleNamespace(adapters=()), adapters=())
    request = EngineRequest("x", [1] * tokens, **{"params": SamplingParams(1), **fields})
    assert refused(lambda: check_request(request, runner, *limits)) == told


@pytest.mark.parametrize(
    "architecture, tied, mute",
    [
        ("Qwen2ForSequenceClassification", True, True),
        ("Qwen2ForRewardModel", False, True),
        ("Qwen2Model", False, True),
        ("Qwen2Model", True, False),  # its embedding is its head
        ("Qwen2ForCausalLM", False, False),
    ],
)
def test_models_without_a_head_that_writes(architecture: str, tied: bool, mute: bool) -> None:
    spec, _ = build(tiny_config(get("qwen2")) | {"architectures": [architecture], "tie_word_embeddings": tied})
    assert DecoderSpec.from_json(spec.to_json()).mute == spec.mute == mute
    runner: Any = SimpleNamespace(spec=spec, options=SimpleNamespace(adapters=()), adapters=())
    one = EngineRequest("x", [1], SamplingParams(1))
    check_request(replace(one, only="last"), runner, 100, 100)
    if not mute:
        return check_request(one, runner, 100, 100)
    told = "this model (qwen2) has no head that writes; use /v1/embeddings, /v1/rerank, /classify or `tool embed`"
    assert refused(lambda: check_request(one, runner, 100, 100)) == told


def test_numbers_behind_a_hidden_state() -> None:
    spec, where = TextHead("cls", (HeadLayer("dense"),), 1), "the folder"
    numbers = {"0.weight": np.full((1, 4), np.nan, np.float32)}
    head = Head(spec, numbers, "cls", True, where)
    four, three = np.ones(4, np.float32), np.ones(3, np.float32)
    told = "the scores are NaN or infinite: check the model's weights and dtype"
    assert refused(lambda: head.score(four), ToolkitError) == told
    assert refused(lambda: head.score(three), ToolkitError) == f"{where}: dense: expected 3 inputs, found 4"
    two = TextHead("cls", (HeadLayer("dense"),), 2)
    told = f"{where}: config.json names 2 labels, the classifier has 1"
    assert refused(lambda: Head(two, numbers, "cls", True, where), ToolkitError) == told
    head = Head(two, {"0.weight": np.ones((2, 4), np.float32)}, "cls", True, where)
    assert refused(lambda: head.score(four)) == f"{where}: expected a model with one label to rank by, found 2"


def test_a_number_of_blocks_for_a_longer_session() -> None:
    need, groups = MemoryNeed(256 * MIB, 20, (MIB,), 1 << 30, False), (CacheGroup("full", None, (0,)),)
    words: dict[str, Any] = {"block_size": 64, "vocab_size": 32000, "max_position": 8192, "device": "cpu"}
    told = refused(lambda: plan(need, groups, wishes=Wishes(kv=10, session_len=4096), **words))
    holds = "cache_max_entry_count 10 holds 640 tokens; raise it to 64, or leave one of them out"
    assert told == f"session_len 4096: {holds}"


def test_pictures_and_their_places() -> None:
    spec, _ = build(tiny_config(get("llama")))
    runner: Any = SimpleNamespace(spec=spec, options=SimpleNamespace(adapters=()), adapters=())
    picture: Any = SimpleNamespace(tokens=2)
    request = EngineRequest("x", [1], SamplingParams(1), pictures=(picture,))
    told = "image: this model reads text alone; leave the pictures out, or load a model that sees"
    assert refused(lambda: check_request(request, runner, 100, 100)) == told
    assert refused(lambda: find_spans([1, 2, 3], [picture], 9)) == (
        "prompt: expected 2 image tokens (id 9) for 1 pictures, found 0; write no image tokens of the model's own, and "
        "as many <IMAGE_TOKEN> as pictures"
    )


@pytest.mark.parametrize(
    ("role", "here", "kind", "told"),
    [
        (
            "Hybrid",
            {},
            UsageError,
            "p2p_connect: this engine takes no blocks over; start it with --role decode",
        ),
        ("Decode", {}, ToolkitError, "p2p_connect: this engine hands nothing over; its log says why"),
        (
            "Decode",
            {"model": "x"},
            ToolkitError,
            "the engines differ, and blocks of one are of no use to the other: model: x here, y there",
        ),
    ],
)
def test_engines_that_hand_nothing_over(role: str, here: dict[str, str], kind: type[ToolkitError], told: str) -> None:
    facts: Any = SimpleNamespace(in_common=here)
    peers = Peers(TurbomindEngineConfig(role=role), None, lambda: facts)  # type: ignore[arg-type]
    assert refused(lambda: peers.connect("e", "a:1", False, {"model": "y"}), kind) == told


def test_names_of_adapters() -> None:
    names = AdapterNames(lambda *arguments: True, ("one",), "base")
    for name in ("one", "base"):
        told = f"lora_name: {name!r} is taken; unload that one first, or choose another name"
        assert refused(lambda name=name: names.load(name, Path("x"))) == told  # type: ignore[misc]
    assert refused(lambda: names.unload("two")) == "lora_name: there is no adapter 'two'; there is one"
    assert refused(lambda: names.number("two")) == "adapter_name: expected one of one, found 'two'"


def test_a_backend_whose_adapters_stay() -> None:
    adapters = Adapters(SimpleNamespace(), [])  # type: ignore[arg-type]
    told = refused(lambda: adapters.load(1, Path("x"), digest=False))
    assert told == "adapters: this backend takes them at the start alone (--adapters); restart the server"
    told = refused(lambda: adapters.unload(1))
    assert told == "adapters: this backend keeps those it was started with; restart the server without it"


def test_two_requests_of_one_id() -> None:
    streams, stream = Streams(), SimpleNamespace(id="a#0", name="a")
    streams.follow(stream, lambda: None)  # type: ignore[arg-type]
    told = refused(lambda: streams.follow(stream, lambda: None))  # type: ignore[arg-type]
    assert told == "request id 'a' is already running"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"backend": "odd"}, "backend: expected turbomind or pytorch, found 'odd'"),
        (
            {"backend_config": PytorchEngineConfig(device_type="tpu")},
            "device_type: expected auto, cpu, cuda or cuda:N, or another that torch has here "
            "(docs/how-to/add-a-device.md), found 'tpu'",
        ),
        (
            {"backend_config": TurbomindEngineConfig(speculative_algorithm="mtp", load_format="dummy")},
            "speculative_algorithm: mtp: the model's weights are not read from its files",
        ),
        (
            {"backend_config": TurbomindEngineConfig(speculative_algorithm="mtp")},
            "speculative_algorithm: mtp: MODEL has no layer for multi-token prediction; leave it out",
        ),
        (
            {"backend_config": PytorchEngineConfig(dllm_block_length=8)},
            "dllm_block_length=8: this model draws one token after another; leave it out",
        ),
        (
            {"backend_config": TurbomindEngineConfig(quant_policy="auto")},
            "quant_policy auto: what MODEL bears has not been measured; `tool convert MODEL --quant-policy auto "
            "--dst-path DIR` does that, or give 0, 8 or 4",
        ),
    ],
)
def test_engines_that_cannot_start(tiny_models: Any, options: dict[str, Any], told: str) -> None:
    model = str(tiny_models("llama"))
    told = told.replace("`tool convert MODEL", "`tool convert M")
    assert refused(lambda: AsyncEngine.open(model, **options)) == told.replace("MODEL", model).replace(
        "`tool convert M ", "`tool convert MODEL "
    )


def test_a_reader_s_session(tiny_models: Any) -> None:
    config = TurbomindEngineConfig(session_len=100_000)
    told = refused(lambda: AsyncEngine.open(str(tiny_models("bert")), backend_config=config))
    assert told == "session_len: found 100000, expected at most 513: this model reads 512 tokens"


def test_an_adapter_that_is_a_file(tiny_models: Any, tmp_path: Path) -> None:
    file = tmp_path / "adapter.safetensors"
    file.touch()
    config = TurbomindEngineConfig(adapters={"mine": str(file)})
    told = refused(lambda: AsyncEngine.open(str(tiny_models("llama")), backend_config=config))
    assert told == f"adapters: mine: expected a directory, a .gguf file or a hub id, found the file {file}"


def test_an_adapter_that_is_no_path(tiny_models: Any) -> None:
    config = TurbomindEngineConfig(adapters={"mine": "mine"})
    told = refused(lambda: AsyncEngine.open(str(tiny_models("llama")), backend_config=config))
    assert told == "adapters: mine: no such directory, and not a hub id (owner/name)"


def test_ranks_of_a_model_that_is_not_split(tiny_models: Any) -> None:
    engine = AsyncEngine.open(str(tiny_models("llama")), backend_config=TurbomindEngineConfig(session_len=64))
    told = "ranks: the model is not split; expected --tp, --pp or --dp above 1"
    assert refused(lambda: engine.trace_ranks(True)) == told
    engine.close()


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = refused(lambda: Port("--kv-port", address, b"", "m", None, None), ToolkitError)  # type: ignore[arg-type]
    why = "Address already in use; choose another port, 0 is any free one"
    assert told == f"--kv-port: cannot listen at {address}: {why}"
    address = "192.0.2.1:0"  # a machine of documents'
    told = refused(lambda: Port("--kv-port", address, b"", b"", None, None), ToolkitError)  # type: ignore[arg-type]
    assert told == f"--kv-port: expected an address of this machine, found {address}"
    for address in ("nosuch.invalid:1", "a..b:1"):
        told = refused(partial(Port, "--kv-port", address, b"", b"", None, None), ToolkitError)  # type: ignore[arg-type]
        assert told.startswith(f"--kv-port: expected an address of this machine, found {address} (")


def test_a_token_that_memory_does_not_hold() -> None:
    need, groups = MemoryNeed(256 * MIB, 1 << 30, (MIB,), 1 << 30, False), (CacheGroup("full", None, (0,)),)
    words: dict[str, Any] = {"block_size": 64, "vocab_size": 32000, "max_position": 8192, "device": "cpu"}
    assert refused(lambda: plan(need, groups, wishes=Wishes(), **words), ToolkitError) == (
        "not enough memory: 716.8 MiB are left beside the weights, one token's activations take 1.00 GiB; free some "
        "memory or use a smaller max_batch_size"
    )


def failing(*_: Any, **__: Any) -> Any:
    raise RunnerError("no room")


def test_adapters_and_layers_that_do_not_load() -> None:
    adapters = Adapters(SimpleNamespace(add_adapter=failing), [])  # type: ignore[arg-type]
    assert refused(lambda: adapters.load(1, Path("x"), digest=False), ToolkitError) == "x: no room"
    head: Any = SimpleNamespace(load=failing, name="mtp")
    layer = OpenLayers(Path("m"), head, (2,), "MTP layer", "speculative_algorithm: mtp")
    told = "speculative_algorithm: mtp: m: its MTP layer cannot be loaded: no room"
    assert refused(lambda: layer.load(None), ToolkitError) == told  # type: ignore[arg-type]
    target: Any = SimpleNamespace(spec=SimpleNamespace(final_norm=SimpleNamespace(kind="layer")))
    told = "speculative_draft_model: e: reads a model with an RMS norm at its end, this one has layer"
    assert refused(lambda: open_eagle_layer(Path("e"), target)) == told


def test_a_model_that_does_not_wake() -> None:
    blocks: Any = SimpleNamespace(reset_cache=lambda: None)
    runner: Any = SimpleNamespace(
        release_cache=lambda: None, release_weights=lambda: None, load_weights=failing, use_weights=failing
    )
    nap = Nap(runner, blocks, (1,))
    told = "the new weights cannot be loaded, the old ones stay: no room"
    assert refused(lambda: nap.renew(dict), ToolkitError) == told
    nap.begin()
    assert refused(lambda: nap.end(["weights"]), ToolkitError) == "the model cannot be woken: no room"


def test_blocks_that_do_not_hold_what_is_guessed_together(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    model = support("tiny").copy_of(tiny_models("sdar"), tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"block_size": 6}))
    told = refused(lambda: AsyncEngine.open(str(model)))
    more = "expected a multiple of the 6 tokens that this model guesses together"
    assert told == f"cache_block_seq_len (block_size): found 64, {more}"


def test_memory_that_ends_while_a_model_loads(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(runner: NativeRunner) -> None:
        raise MemoryError("4 GiB")

    monkeypatch.setattr(NativeRunner, "load_weights", full)
    model = tiny_models("llama")
    told = f"{model}: out of memory while loading (4 GiB); close other programs or quantize"
    assert refused(lambda: AsyncEngine.open(str(model)), ToolkitError) == told


@pytest.mark.parametrize("gone", [False, True])
def test_an_engine_that_is_killed_while_it_loads(
    gone: bool, tiny_models: Any, support: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    support("dying_children").kill_children(monkeypatch, gone)
    told = refused(lambda: AsyncEngine.open(str(tiny_models("llama")), process=True), ToolkitError)
    assert told.startswith("the engine failed while it was loading (")


def test_blocks_of_another_process(tiny_models: Any) -> None:
    engine = AsyncEngine.open(str(tiny_models("llama")), process=True)
    told = "tell_blocks: expected an engine in this process (process=False)"
    assert refused(lambda: engine.tell_blocks(None)) == told  # type: ignore[arg-type]
    engine.close()


def test_ranks_that_cannot_be_started(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(child_process, "start", full)
    config = PytorchEngineConfig(tp=2, device_type="cpu")
    told = refused(lambda: AsyncEngine.open(str(tiny_models("llama")), backend_config=config), ToolkitError)
    assert told == "a rank's process cannot be started: [Errno 12] Cannot allocate memory"


def test_an_engine_that_is_lost(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine.open(str(tiny_models("llama")), backend_config=TurbomindEngineConfig(session_len=64))

    def lost(runner: NativeRunner, batch: Any) -> None:
        raise RunnerLost("rank 1 is gone")

    monkeypatch.setattr(NativeRunner, "submit", lost)
    (last,) = [delta for delta in engine.generate_sync([1, 2, 3]) if delta.finish_reason is not None]
    assert last.finish_reason == "error" and last.error_message is not None and "rank 1 is gone" in last.error_message
    told = refused(lambda: engine.tell_blocks(None), ToolkitError)  # type: ignore[arg-type]
    assert told.startswith("the engine failed (") and told.endswith("and has been given up; start it again")
    engine.close()


def test_a_draft_that_does_not_load(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loaded = NativeRunner.load_weights, list[NativeRunner]()

    def second_fails(runner: NativeRunner) -> None:
        loaded.append(runner)
        if len(loaded) == 2:
            raise RunnerError("no room")
        load(runner)

    monkeypatch.setattr(NativeRunner, "load_weights", second_fails)
    draft = str(tiny_models("llama", num_hidden_layers=1))
    config = TurbomindEngineConfig(speculative_draft_model=draft, session_len=64)
    told = refused(lambda: AsyncEngine.open(str(tiny_models("llama")), backend_config=config), ToolkitError)
    assert told == f"speculative_draft_model: {draft}: cannot be loaded: no room; use a smaller one"
