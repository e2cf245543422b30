"""Tiny random checkpoints of every family, made with transformers: the stand-ins for real models in tests.

Test modules cannot import this file (``tests`` is no package); ``tests/conftest.py`` loads it and offers

* ``tiny_models(family, **overrides) -> Path``: a checkpoint directory, cached for the session, never to be modified;
* ``tiny_checkpoint(family, path, **overrides) -> Path``: a fresh one under ``path``, yours to break.

``family``: one of ``FAMILIES``. ``overrides``: config fields of the transformers class, and

* ``seed`` (int, 0): of the weights; ``dtype`` ("float32"): as stored;
* ``tokenizer`` (bool, True): a byte-level BPE tokenizer with ChatML template goes along (needs vocab_size >= 320);
* ``max_shard_size`` (str): to get a sharded checkpoint.

Weights are far larger than a model's initial ones, so that logits differ clearly and mistakes show.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "internlm2", "gemma2", "phi3", "mixtral", "qwen3_moe")

VOCAB = 320

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)

# What each family adds, chosen so that its peculiarities matter within a few dozen tokens.
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": dict(
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
    ),
    "mistral": dict(sliding_window=24, head_dim=32),
    "qwen2": dict(use_sliding_window=True, sliding_window=20, max_window_layers=1, tie_word_embeddings=True),
    "qwen3": dict(head_dim=32),
    "internlm2": dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)),
    "gemma2": dict(head_dim=32, sliding_window=16, query_pre_attn_scalar=24, num_hidden_layers=4),
    "phi3": dict(
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            partial_rotary_factor=0.75,
            original_max_position_embeddings=64,
            short_factor=[1.0 + 0.02 * i for i in range(12)],
            long_factor=[1.0 + 0.7 * i for i in range(12)],
        ),
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        num_hidden_layers=3,
        mlp_only_layers=[1],
    ),
}

_TRANSFORMERS_TYPE = {"internlm2": "llama"}

_TEXT = (
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times. "
    "All happy families are alike; every unhappy family is unhappy in its own way. Call me Ishmael."
)

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_checkpoint(family: str, path: Path, **overrides: Any) -> Path:
    """Write a tiny checkpoint of ``family`` to the directory ``path`` and return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    seed = overrides.pop("seed", 0)
    dtype = overrides.pop("dtype", "float32")
    tokenizer = overrides.pop("tokenizer", True)
    shard = {"max_shard_size": overrides.pop("max_shard_size")} if "max_shard_size" in overrides else {}

    settings = {**_COMMON, **_FAMILY[family], **overrides}
    config = AutoConfig.for_model(_TRANSFORMERS_TYPE.get(family, family), **settings)
    with torch.random.fork_rng(devices=[]):  # a test sees the same numbers whether or not a model was made before
        model = AutoModelForCausalLM.from_config(config).eval()
    _randomize(model, torch.Generator().manual_seed(seed))
    model = model.to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, **shard)
    if tokenizer:
        _tokenizer(settings).save_pretrained(path)
    if family == "internlm2":
        _to_internlm2(path)
    return path


class TinyModels:
    """Session-wide cache of tiny checkpoints: ``models(family, **overrides) -> Path``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[str, Path] = {}

    def __call__(self, family: str, **overrides: Any) -> Path:
        key = json.dumps([family, overrides], sort_keys=True)
        if key not in self.made:
            self.made[key] = tiny_checkpoint(family, self.root / f"{family}-{len(self.made)}", **overrides)
        return self.made[key]


def _randomize(model: Any, generator: Any) -> None:
    """Norms near their neutral value, biases and matrices with a spread that keeps activations of order one."""
    import torch

    centre = 0.0 if model.config.model_type == "gemma2" else 1.0
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name:
                p.copy_(centre + 0.2 * noise)
            elif name.endswith("bias"):
                p.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise * 1.2 / p.shape[-1] ** 0.5)


def _tokenizer(settings: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=min(VOCAB, settings["vocab_size"]),
        special_tokens=[AddedToken(t, special=True) for t in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator([_TEXT], trainer)
    assert tok.get_vocab_size() <= settings["vocab_size"], "vocab_size is too small for the tiny tokenizer"
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=_CHATML,
        model_max_length=settings["max_position_embeddings"],
    )


def _to_internlm2(path: Path) -> None:
    """Respell a Llama checkpoint as InternLM2's: its names, and q, k, v interleaved in one matrix per kv head."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    heads_per_kv = config["num_attention_heads"] // kv_heads
    old = load_file(path / "model.safetensors")
    names = {
        "model.embed_tokens.": "model.tok_embeddings.",
        "lm_head.": "output.",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    new: dict[str, torch.Tensor] = {}
    for name, tensor in old.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            rest = tensor.shape[1:]
            q = tensor.view(kv_heads, heads_per_kv, head_dim, *rest)
            k = old[name.replace("q_proj", "k_proj")].view(kv_heads, 1, head_dim, *rest)
            v = old[name.replace("q_proj", "v_proj")].view(kv_heads, 1, head_dim, *rest)
            name = name.replace("self_attn.q_proj", "attention.wqkv")
            tensor = torch.cat([q, k, v], dim=1).reshape(-1, *rest)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        new[name] = tensor.contiguous()
    save_file(new, path / "model.safetensors", metadata={"format": "pt"})

    rope = config.pop("rope_parameters")
    config.update(
        architectures=["InternLM2ForCausalLM"],
        model_type="internlm2",
        bias=config.pop("attention_bias", False),
        rope_theta=rope["rope_theta"],
        rope_scaling={"type": rope["rope_type"], "factor": rope["factor"]} if "factor" in rope else None,
        torch_dtype=config.pop("dtype"),
    )
    del config["head_dim"]
    (path / "config.json").write_text(json.dumps(config, indent=2))


def copy_of(model: Path, path: Path) -> Path:
    """A private copy of a cached checkpoint, to be modified."""
    shutil.copytree(model, path)
    return path
