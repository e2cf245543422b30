"""A llama in numpy, written to be read: the self-test's answer key. Nothing of the engine is used here.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023); grouped-query attention and
rotary halves as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def random_weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Weights for CONFIG by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, ffn = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    q, kv = CONFIG["num_attention_heads"] * CONFIG["head_dim"], CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
        layer |= {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, ffn)}
        layer |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {f"model.layers.{i}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (CONFIG["vocab_size"], hidden)}
    weights = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        weights[name] = (1 + 0.1 * values if len(shape) == 1 else values * 1.5 / np.sqrt(shape[-1])).astype(np.float32)
    return weights


def _norm(x: F64, weight: F64) -> F64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def _rotate(x: F64) -> F64:
    """Rotary embedding of [tokens, heads, head_dim] at positions 0, 1, 2 …"""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), CONFIG["rope_theta"] ** (-np.arange(half) / half))[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _attention(x: F64, weight: Mapping[str, F64]) -> F64:
    tokens, size = len(x), CONFIG["head_dim"]
    q, k, v = ((x @ weight[f"self_attn.{name}_proj.weight"].T).reshape(tokens, -1, size) for name in ("q", "k", "v"))
    groups = CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    k, v = np.repeat(_rotate(k), groups, 1), np.repeat(v, groups, 1)
    scores = np.einsum("qhd,khd->hqk", _rotate(q), k) / np.sqrt(size)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
    return mixed.reshape(tokens, -1) @ weight["self_attn.o_proj.weight"].T


def _feed_forward(x: F64, weight: Mapping[str, F64]) -> F64:
    gate, up = (x @ weight[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ weight["mlp.down_proj.weight"].T


def logits(weights: Mapping[str, NDArray[np.float32]], token_ids: list[int]) -> F64:
    """The logits after the last of ``token_ids``, float64 [vocab]."""
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    x = wide["model.embed_tokens.weight"][token_ids]
    for i in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): w for name, w in wide.items() if name.startswith(prefix)}
        x = x + _attention(_norm(x, layer["input_layernorm.weight"]), layer)
        x = x + _feed_forward(_norm(x, layer["post_attention_layernorm.weight"]), layer)
    return _norm(x[-1], wide["model.norm.weight"]) @ wide["lm_head.weight"].T


def greedy(weights: Mapping[str, NDArray[np.float32]], token_ids: list[int], count: int) -> tuple[list[int], float]:
    """``count`` tokens by argmax, and the smallest lead that a winner had over its runner-up (how safe they are)."""
    tokens, lead = list(token_ids), np.inf
    for _ in range(count):
        scores = logits(weights, tokens)
        best = int(scores.argmax())
        lead = min(lead, float(scores[best] - np.delete(scores, best).max()))
        tokens.append(best)
    return tokens[len(token_ids) :], lead
