"""Features of the spec that the nine families leave out, against other models of transformers with those features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from toolkit.artifacts.canonical import Dense
from toolkit.models.registry import build
from toolkit.models.spec import AttentionSpec, LinearSpec, MlpSpec, MoeSpec, NormSpec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.tensor.runner import TensorRunner

DIMS = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA = build(DIMS | {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0})[0]


def _transformers(config):
    """A model with random weights of order one, and its weights under canonical names."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = {}
    for name, tensor in model.state_dict().items():
        spread = 0.3 if tensor.ndim == 1 else 1.5 / tensor.shape[-1] ** 0.5
        tensor.copy_(torch.randn(tensor.shape) * spread + (1.0 if "norm" in name else 0.0))
        base = name.removesuffix(".weight")
        weights[base] = Dense(tensor) if tensor.ndim == 2 else tensor
    return model, weights


def _map(spec, change):
    """``change`` every sublayer."""
    layers = [replace(layer, sublayers=tuple(change(s) for s in layer.sublayers)) for layer in spec.layers]
    return replace(spec, layers=tuple(layers))


def _run(spec, weights, steps, dtype="float32"):
    """Logits of a prompt of 20 tokens in two chunks and two more steps, with a second sequence beside it."""
    runner = TensorRunner(spec, lambda: weights, RunnerOptions(dtype=dtype, device="cpu", block_size=16))
    driver, ids = steps.Driver(runner), _ids()
    one, other = driver.add(), driver.add()
    parts = [driver.step({one: ids[:13], other: [5, 6]}, "all").logits[:13]]
    parts += [
        driver.step({one: ids[i:j], other: [7]}, "all").logits[: j - i] for i, j in ((13, 20), (20, 21), (21, 22))
    ]
    return np.concatenate(parts)


def _ids():
    return np.random.default_rng(1).integers(3, 119, 22).tolist()


def _expect(model):
    with torch.no_grad():
        return model(torch.tensor([_ids()]), use_cache=False).logits[0].numpy()


def test_granite_scales(steps):
    """Scaled embeddings, residuals, scores and logits."""
    from transformers import GraniteConfig

    scales = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    }
    model, weights = _transformers(GraniteConfig(**DIMS, **scales))

    def change(s):
        mixer = replace(s.mixer, scale=0.2) if isinstance(s.mixer, AttentionSpec) else s.mixer
        return replace(s, mixer=mixer, residual_scale=0.4)

    spec = replace(_map(LLAMA, change), embed_scale=3.0, head_scale=0.25)
    np.testing.assert_allclose(_run(spec, weights, steps), _expect(model), rtol=1e-4, atol=1e-4)


def test_olmo2_norms(steps):
    """No norm before a sublayer, one after it; q and k normed over all heads at once."""
    from transformers import Olmo2Config

    model, weights = _transformers(Olmo2Config(**DIMS))

    def change(s):
        attention = isinstance(s.mixer, AttentionSpec)
        layer = s.pre_norm.name.rsplit(".", 1)[0]
        after = NormSpec(f"{layer}.post_{'attention' if attention else 'feedforward'}_layernorm", 48, 1e-5)
        mixer = s.mixer
        if attention:
            q, k = (NormSpec(f"{layer}.self_attn.{n}_norm", size, 1e-5) for n, size in (("q", 48), ("k", 24)))
            mixer = replace(mixer, q_norm=q, k_norm=k)
        return replace(s, mixer=mixer, pre_norm=None, post_norm=after)

    np.testing.assert_allclose(_run(_map(LLAMA, change), weights, steps), _expect(model), rtol=1e-4, atol=1e-4)


def test_qwen2_moe_shared_expert(steps):
    """A shared expert with its own gate beside the routed ones; biases on q, k and v."""
    from transformers import Qwen2MoeConfig

    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model, weights = _transformers(Qwen2MoeConfig(**DIMS, **sizes, shared_expert_intermediate_size=64))

    def mlp(prefix, inner):
        return MlpSpec(
            LinearSpec(f"{prefix}.gate_proj", 48, inner),
            LinearSpec(f"{prefix}.up_proj", 48, inner),
            LinearSpec(f"{prefix}.down_proj", inner, 48),
        )

    def change(s):
        if isinstance(s.mixer, AttentionSpec):
            biased = {n: replace(getattr(s.mixer, n), bias=True) for n in "qkv"}
            return replace(s, mixer=replace(s.mixer, **biased))
        prefix = s.mixer.down.name.rsplit(".", 1)[0]
        gate_up, down = (weights.pop(f"{prefix}.experts.{n}_proj") for n in ("gate_up", "down"))
        for e in range(5):
            gate, up = gate_up[e].chunk(2)
            for name, w in (("gate", gate), ("up", up), ("down", down[e])):
                weights[f"{prefix}.experts.{e}.{name}_proj"] = Dense(w)
        return replace(
            s,
            mixer=MoeSpec(
                router=LinearSpec(f"{prefix}.gate", 48, 5),
                experts=tuple(mlp(f"{prefix}.experts.{e}", 32) for e in range(5)),
                top_k=2,
                norm_topk=False,
                shared=mlp(f"{prefix}.shared_expert", 64),
                shared_gate=LinearSpec(f"{prefix}.shared_expert_gate", 48, 1),
            ),
        )

    found = _run(_map(LLAMA, change), weights, steps)
    np.testing.assert_allclose(found, _expect(model), rtol=1e-4, atol=1e-4)


@pytest.fixture
def llama():
    from transformers import LlamaConfig

    return _transformers(LlamaConfig(**DIMS))


def test_a_feed_forward_without_gate(steps, llama):
    """down(relu(up(x))), the gate projection standing for up."""
    model, weights = llama

    def ungated(s):
        if isinstance(s.mixer, AttentionSpec):
            return s
        return replace(s, mixer=replace(s.mixer, gate=None, up=s.mixer.gate, activation="relu"))

    class Relu(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            return self.mlp.down_proj(torch.relu(self.mlp.gate_proj(x)))

    for layer in model.model.layers:
        layer.mlp = Relu(layer.mlp)
    np.testing.assert_allclose(_run(_map(LLAMA, ungated), weights, steps), _expect(model), rtol=1e-4, atol=1e-4)


def test_head_bias(steps, llama):
    model, weights = llama
    bias = torch.randn(120)
    found = _run(replace(LLAMA, head_bias=True), weights | {"lm_head.bias": bias}, steps)
    np.testing.assert_allclose(found, _expect(model) + bias.numpy(), rtol=1e-4, atol=1e-4)


def test_sinks_take_mass_from_every_row(steps, llama):
    """A sink of -inf is none; one that holds all mass leaves attention nothing to add."""
    model, weights = llama

    def with_sinks(s):
        named = isinstance(s.mixer, AttentionSpec)
        return replace(s, mixer=replace(s.mixer, sinks=s.mixer.q.name.replace("q_proj", "sinks"))) if named else s

    spec = _map(LLAMA, with_sinks)
    names = [a.sinks for _, a in spec.attention_layers()]
    off = _run(spec, weights | {n: torch.full((4,), float("-inf")) for n in names}, steps)
    np.testing.assert_allclose(off, _expect(model), rtol=1e-4, atol=1e-4)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    unheard = _expect(model)
    model, weights = _transformers(model.config)
    every = _run(spec, weights | {n: torch.full((4,), 1e4) for n in names}, steps)
    np.testing.assert_allclose(every, unheard, rtol=1e-4, atol=1e-4)


def test_without_rope(steps, llama):
    model, weights = llama

    def bare(s):
        return replace(s, mixer=replace(s.mixer, rope=None)) if isinstance(s.mixer, AttentionSpec) else s

    def still(x, position_ids):
        shape = (*position_ids.shape, 12)
        return torch.ones(shape), torch.zeros(shape)

    model.model.rotary_emb.forward = still
    np.testing.assert_allclose(_run(_map(LLAMA, bare), weights, steps), _expect(model), rtol=1e-4, atol=1e-4)
