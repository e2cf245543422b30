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


def write_dflash(path: Path, target: Path, *, right: bool = False, **inner: Any) -> Path:
    """For the tiny model at ``path``; ``right``: for one made by ``constant``. ``inner``: of its ``dflash_config``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = json.loads((path / "config.json").read_text())
    config = Qwen3Config(
        vocab_size=model["vocab_size"], hidden_size=model["hidden_size"], intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        attention_bias=True, tie_word_embeddings=False,
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
    h = model["hidden_size"]
    made |= {"fc.weight": torch.randn(h, 2 * h) / h**0.5, "hidden_norm.weight": torch.rand(h) + 0.5}
    if right:
        made["norm.weight"] = load_file(path / "model.safetensors")["model.norm.weight"].clone()
    target.mkdir()
    told = config.to_dict() | {
        "architectures": ["DFlashDraftModel"], "block_size": 6, "num_target_layers": model["num_hidden_layers"],
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, model["num_hidden_layers"] - 1]} | inner,
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


@torch.no_grad()
def guess(path: Path, draft: Path, tokens: list[int], count: int) -> list[tuple[int, float]]:
    """The tokens that follow a text, guessed at once, and by how much each was likelier than the next likeliest."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    told, stored = json.loads((draft / "config.json").read_text()), load_file(draft / "model.safetensors")
    config = Qwen3Config(**{k: v for k, v in told.items() if k not in ("dflash_config", "block_size", "architectures")})
    small = Qwen3ForCausalLM(config).float()
    small.load_state_dict({f"model.{name}": x for name, x in stored.items()}, strict=False)
    states = whole(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    # transformers norms the last of them; DFlash reads what layers give
    last: dict[str, Tensor] = {}
    hook = whole.model.norm.register_forward_pre_hook(lambda _, x: last.update(x=x[0]))
    whole(torch.tensor([tokens[:-1]]))
    hook.remove()
    taps = [last["x"] if i + 1 == len(states) - 1 else states[i + 1] for i in told["dflash_config"]["target_layer_ids"]]
    joined = torch.cat(taps, -1)[0] @ stored["fc.weight"].T
    known = joined * torch.rsqrt(joined.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    known = known * stored["hidden_norm.weight"]
    x = whole.get_input_embeddings()(torch.tensor([tokens[-1], *[MASK] * count]))
    places = torch.arange(len(tokens) + count)[None]
    cos, sin = small.model.rotary_emb(x, places)
    for layer in small.model.layers:
        a, h = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat([known, h])
        q, k, v = a.q_proj(h), a.k_proj(both), a.v_proj(both)
        q, k, v = (y.view(1, len(y), -1, a.head_dim).transpose(1, 2) for y in (q, k, v))
        q, k = a.q_norm(q), a.k_norm(k)
        q = apply_rotary_pos_emb(q, q, cos[:, -len(h) :], sin[:, -len(h) :])[0]
        k = apply_rotary_pos_emb(k, k, cos, sin)[0]
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + a.o_proj(seen[0].transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    best = torch.topk(whole.lm_head(small.model.norm(x[1:])), 2)
    return [(int(i[0]), float(v[0] - v[1])) for i, v in zip(best.indices, best.values, strict=True)]
