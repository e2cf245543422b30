"""Which experts tokens went to, against transformers' routers, however the request is run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.engine.text.stream import Asked
from toolkit.errors import UsageError
from toolkit.messages import Response
from toolkit.runners.step import NO_EXPERT

PROMPT = [(7 * i) % 250 + 5 for i in range(150)]
ROUTED = GenerationConfig(max_new_tokens=20, ignore_eos=True, return_routed_experts=True)
PLAIN = GenerationConfig(max_new_tokens=20, ignore_eos=True)
COMMON: dict[str, Any] = {"dtype": "float32", "session_len": 400}
CONFIGS = {
    "torch": PytorchEngineConfig(device_type="cpu", **COMMON),
    "native": TurbomindEngineConfig(device="cpu", **COMMON),
}


def answer(engine: AsyncEngine, prompt: list[int] = PROMPT, config: GenerationConfig = ROUTED) -> Response:
    whole = Response()
    for delta in engine.generate_sync(prompt, config):
        whole.extend(delta)
    assert whole.finish_reason in ("length", "stop"), whole.error_message
    return whole


def routers(model: Any, ids: list[int], top_k: int) -> np.ndarray:
    """[tokens, layers, top_k] of transformers' model, the likeliest first."""
    told = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        found = told(torch.tensor([ids]), output_router_logits=True).router_logits
    layers = [logits.float().softmax(-1).topk(top_k, -1).indices for logits in found]
    return torch.stack(layers, 1).numpy()


@pytest.mark.parametrize("runner", ["torch", "native"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_they_are_those_of_transformers(tiny_models: Any, family: str, runner: str) -> None:
    model = tiny_models(family)
    with AsyncEngine.open(model, backend_config=CONFIGS[runner]) as engine:
        found = answer(engine)
        again = answer(engine, config=PLAIN)
    assert found.token_ids == again.token_ids and again.routed_experts is None
    routed = found.routed_experts
    assert routed.dtype == np.uint16 and len(routed) == len(PROMPT) + len(found.token_ids) - 1
    wanted = routers(model, PROMPT + found.token_ids[:-1], routed.shape[2])
    mixtures = (routed != NO_EXPERT).all((0, 2))  # of these families one has a layer without
    assert (routed[:, mixtures] == wanted).all()


def test_layers_without_experts_have_none(tiny_models: Any) -> None:
    both = []
    for config in CONFIGS.values():
        with AsyncEngine.open(tiny_models("deepseek"), backend_config=config) as engine:
            both.append(answer(engine).routed_experts)
            dense = [not any(m.kind == "moe" for m in mixers(engine, i)) for i in range(both[0].shape[1])]
    assert (both[0] == both[1]).all()
    assert any(dense) and not all(dense)
    assert (both[0][:, dense] == NO_EXPERT).all() and (both[0][:, np.logical_not(dense)] != NO_EXPERT).all()


def mixers(engine: Any, layer: int) -> list[Any]:
    return [mixer for i, mixer in engine._loop._core.runner.spec.mixers() if i == layer]


def test_however_a_request_is_run(tiny_models: Any) -> None:
    """In chunks, behind a prefix that is cached, beside others, with more threads, in another process."""
    model = tiny_models("qwen3_moe")
    with AsyncEngine.open(model, backend_config=CONFIGS["native"]) as engine:
        wanted = answer(engine)
        warm = answer(engine)
        assert warm.cached_tokens == 0  # of a prompt that is not computed nobody knows
        prompts = [PROMPT, PROMPT[:70], PROMPT[30:], PROMPT]
        several: dict[int, Response] = {}
        for i, delta in engine.generate_all([Asked(p, ROUTED if i else PLAIN) for i, p in enumerate(prompts)]):
            several.setdefault(i, Response()).extend(delta)
        assert several[0].routed_experts is None and several[0].token_ids == wanted.token_ids
        assert len(several[1].routed_experts) == 70 + 20 - 1
        assert (several[1].routed_experts[:70] == wanted.routed_experts[:70]).all()
    small = TurbomindEngineConfig(device="cpu", max_prefill_token_num=17, threads=2, **COMMON)
    with AsyncEngine.open(model, backend_config=small, process=True) as engine:
        chunked = answer(engine)
    for other in (warm, several[3], chunked):
        assert other.token_ids == wanted.token_ids
        assert (other.routed_experts == wanted.routed_experts).all()


def test_after_a_stop_word_there_are_no_more(tiny_models: Any) -> None:
    with AsyncEngine.open(tiny_models("mixtral"), backend_config=CONFIGS["native"]) as engine:
        whole = answer(engine)
        pieces = [engine.tokenizer.decode(whole.token_ids[: n + 1]) for n in range(20)]
        word = next(pieces[n][len(pieces[n - 1]) :] for n in range(4, 20) if len(pieces[n]) > len(pieces[n - 1]))
        stopped = answer(engine, config=GenerationConfig(**vars(ROUTED) | {"stop_words": [word]}))
        assert stopped.finish_reason == "stop" and stopped.generate_token_len < 20
        assert len(stopped.routed_experts) == len(PROMPT) + stopped.generate_token_len - 1
        assert (stopped.routed_experts == whole.routed_experts[: len(stopped.routed_experts)]).all()


def test_from_python_and_where_there_are_none(tiny_models: Any) -> None:
    config = GenerationConfig(max_new_tokens=5, ignore_eos=True, return_routed_experts=True)
    with pipeline(str(tiny_models("mixtral")), CONFIGS["native"]) as pipe:
        found = pipe("hello", config, do_preprocess=False)
        assert found.routed_experts.shape[0] == found.input_token_len + 4
    with pipeline(str(tiny_models("llama")), CONFIGS["native"]) as pipe:
        refused = pipe("hello", config, do_preprocess=False)
        assert refused.error_code == 400 and "no experts" in refused.error_message
    with pytest.raises(UsageError, match="return_routed_experts"):
        GenerationConfig(return_routed_experts=5)  # type: ignore[arg-type]
