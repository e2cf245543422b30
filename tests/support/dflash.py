"""Tiny draft models of DFlash, and what they guess by the paper (arXiv 2602.06036), in torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MASK = 7


def write_dflash(
    path: Path,
    target: Path,
    *,
    right: bool = False,
    form: str = "authors",
    windows: tuple[int | None, ...] = (None, None),
    tokens: int = 0,
    **inner: Any,
) -> Path:
    """For the tiny model at ``path``; ``right``: for one made by ``constant``. ``form``: of its files; ``windows``: of
    its layers; ``tokens``: of a vocabulary of its own, in speculators' form. ``inner``: of its ``dflash_config``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = json.loads((path / "config.json").read_text())
    sees = {"layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows]}
    if (window := max((w or 0 for w in windows), default=0)) > 0:
        sees |= {"use_sliding_window": True, "sliding_window": window}
    config = Qwen3Config(
        vocab_size=model["vocab_size"], hidden_size=model["hidden_size"], intermediate_size=96,
        num_hidden_layers=len(windows), num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=512, attention_bias=True, tie_word_embeddings=False, **sees,
    )  # fmt: skip
    torch.manual_seed(4)
    layers = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, x in layers.named_parameters():
            x.copy_(torch.rand_like(x) + 0.5 if x.ndim == 1 else torch.randn_like(x) * x.shape[-1] ** -0.5)
            if right and name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight")):
                x.zero_()
    made = {name.removeprefix("model."): x for name, x in layers.state_dict().items()}
    made = {name: x.clone() for name, x in made.items() if not name.startswith(("embed_tokens", "lm_head"))}
    h, whole = model["hidden_size"], load_file(path / "model.safetensors")
    made |= {"fc.weight": torch.randn(h, 2 * h) / h**0.5, "hidden_norm.weight": torch.rand(h) + 0.5}
    if right:
        made["norm.weight"] = whole["model.norm.weight"].clone()
    if tokens:  # every second of the model's
        ids, head = torch.arange(tokens), whole.get("lm_head.weight", whole["model.embed_tokens.weight"])
        seen = torch.zeros(model["vocab_size"], dtype=torch.bool)
        seen[2 * ids] = True
        made |= {"d2t": ids, "t2d": seen, "lm_head.weight": head[2 * ids]}
    target.mkdir()
    taps = [0, model["num_hidden_layers"] - 1]
    if form == "authors":
        told = config.to_dict() | {
            "architectures": ["DFlashDraftModel"], "block_size": 6, "num_target_layers": model["num_hidden_layers"],
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": taps} | inner,
        }  # fmt: skip
    else:
        told = {
            "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
            "aux_hidden_state_layer_ids": [i + 1 for i in taps], "block_size": 6, "mask_token_id": MASK,
            "draft_vocab_size": tokens or model["vocab_size"], "sample_from_anchor": False,
            "sliding_window_non_causal": False, "target_hidden_size": None,
            "transformer_layer_config": config.to_diff_dict(),
            "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy"},
        }  # fmt: skip
    (target / "config.json").write_text(json.dumps(told))
    save_file({name: x.contiguous() for name, x in made.items()}, target / "model.safetensors", {"format": "pt"})
    return target


def constant(path: Path, target: Path) -> Path:
    """The tiny model at ``path``, but that it says the same behind whatever stands there."""
    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    for name, x in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias")):
            tensors[name] = torch.zeros_like(x)
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = x[:1].expand_as(x).contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def taps_of(told: dict[str, Any]) -> list[int]:
    """Of the model's layers those whose inputs a draft reads."""
    if "dflash_config" in told:
        return [i + 1 for i in told["dflash_config"]["target_layer_ids"]]
    return list(told["aux_hidden_state_layer_ids"])


@torch.no_grad()
def states_of(path: Path, taps: list[int], tokens: list[int]) -> Tensor:
    """What a draft reads of the model at ``path`` behind a text: [tokens, taps * hidden]."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    # transformers norms the last of them; DFlash reads what layers give
    last: dict[str, Tensor] = {}
    hook = whole.model.norm.register_forward_pre_hook(lambda _, x: last.update(x=x[0]))
    states = whole(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.cat([last["x"] if i == len(states) - 1 else states[i] for i in taps], -1)[0]


@torch.no_grad()
def logits_of(path: Path, draft: Path, tokens: list[int], count: int) -> Tensor:
    """Of ``count`` masks behind a text, [count, tokens of the head]."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    told, stored = json.loads((draft / "config.json").read_text()), load_file(draft / "model.safetensors")
    inner = told.get("transformer_layer_config", told)
    config = Qwen3Config(
        **{k: v for k, v in inner.items() if k not in ("dflash_config", "block_size", "architectures")}
    )
    small = Qwen3ForCausalLM(config).float()
    layers = {f"model.{name}": x for name, x in stored.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    small.load_state_dict(layers, strict=False)
    joined = states_of(path, taps_of(told), tokens[:-1]) @ stored["fc.weight"].T
    known = joined * torch.rsqrt(joined.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    known = known * stored["hidden_norm.weight"]
    x = whole.get_input_embeddings()(torch.tensor([tokens[-1], *[MASK] * count]))
    places = torch.arange(len(tokens) + count)
    cos, sin = small.model.rotary_emb(x, places[None])
    for layer, sees in zip(small.model.layers, config.layer_types, strict=True):
        a, h = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat([known, h])
        q, k, v = a.q_proj(h), a.k_proj(both), a.v_proj(both)
        q, k, v = (y.view(1, len(y), -1, a.head_dim).transpose(1, 2) for y in (q, k, v))
        q, k = a.q_norm(q), a.k_norm(k)
        q = apply_rotary_pos_emb(q, q, cos[:, -len(h) :], sin[:, -len(h) :])[0]
        k = apply_rotary_pos_emb(k, k, cos, sin)[0]
        away = places[-len(h) :, None] - places[None]
        mask = (away >= 0) & (away < config.sliding_window) if sees == "sliding_attention" else None
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        x = x + a.o_proj(seen[0].transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    normed = small.model.norm(x[1:])
    return normed @ stored["lm_head.weight"].T if "d2t" in stored else whole.lm_head(normed)


def guess(path: Path, draft: Path, tokens: list[int], count: int) -> list[tuple[int, float]]:
    """The tokens that follow a text, guessed at once, and by how much each was likelier than the next likeliest."""
    best, ids = torch.topk(logits_of(path, draft, tokens, count), 2), load_file(draft / "model.safetensors").get("d2t")
    found = best.indices[:, 0]
    found = found if ids is None else found + ids[found]
    return [(int(i), float(v[0] - v[1])) for i, v in zip(found, best.values, strict=True)]
