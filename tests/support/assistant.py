"""Tiny assistants of Gemma 4, made by transformers' own classes, and what they guess there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ZERO = ("o_proj.weight", "down_proj.weight", "per_layer_projection.weight", "experts.down_proj")


def write_assistant(path: Path, target: Path, *, right: bool = False, clusters: bool = False) -> Path:
    """For the tiny Gemma 4 at ``path``. ``right``: for one made by ``alone``; ``clusters``: its head looks at some of
    the vocabulary alone."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    whole = json.loads((path / "config.json").read_text())
    model = whole.get("text_config", whole)
    names = ("vocab_size", "head_dim", "sliding_window", "num_key_value_heads", "rope_parameters", "rms_norm_eps")
    names += ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config")
    sizes: dict[str, Any] = {name: model[name] for name in names if model.get(name) is not None}
    width = model["hidden_size"]
    sizes |= {"hidden_size": width if right else 48, "intermediate_size": 96, "num_attention_heads": 4}
    if "per_layer_config" in sizes:
        types = model["layer_types"]
        full = sizes["per_layer_config"][str(types.index("full_attention"))]
        sizes["per_layer_config"] = {"2": full, "3": full}
    text = {
        "model_type": "gemma4_text", "num_hidden_layers": 4, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
        "num_kv_shared_layers": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2, **sizes,
    }  # fmt: skip
    torch.manual_seed(3)
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=width, use_ordered_embeddings=clusters, num_centroids=16,
        centroid_intermediate_top_k=5,
    )  # fmt: skip
    made = Gemma4AssistantForCausalLM(config).float()
    with torch.no_grad():
        for name, x in made.named_parameters():
            x.copy_(torch.rand_like(x) + 0.5 if x.ndim == 1 else torch.randn_like(x) * x.shape[-1] ** -0.5)
            if right and name.endswith(ZERO):
                x.zero_()
        for name, buffer in made.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.9)
        if clusters:
            made.masked_embedding.token_ordering.copy_(torch.randperm(sizes["vocab_size"]))
        if right:
            theirs = load_file(path / "model.safetensors")
            find = {name.replace("language_model.", ""): x for name, x in theirs.items()}
            made.pre_projection.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], 1))
            made.model.norm.weight.copy_(find["model.norm.weight"])
            made.model.embed_tokens.weight.copy_(find["model.embed_tokens.weight"])
    made.save_pretrained(target)
    return target


def alone(path: Path, target: Path) -> Path:
    """The tiny model at ``path``, but that it says what follows a token by that token alone."""
    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    tensors = {name: torch.zeros_like(x) if name.endswith(ZERO) else x for name, x in tensors.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@torch.no_grad()
def guess(path: Path, assistant: Path, tokens: list[int], count: int) -> list[tuple[int, float]]:
    """What follows a text, by transformers, and by how much each token was likelier than the next likeliest. Of a
    window it is shown what the newest token sees beside itself."""
    from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    small = Gemma4AssistantForCausalLM.from_pretrained(assistant, dtype=torch.float32, attn_implementation="eager")
    text, embed = whole.config.get_text_config(), whole.get_input_embeddings()
    out = whole(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    seen: dict[str, tuple[Tensor, ...]] = dict(out.shared_kv_states)
    newest = slice(1 - text.sliding_window, None)
    seen["sliding_attention"] = tuple(x[:, :, newest] for x in seen["sliding_attention"])
    state, token, found = out.hidden_states[-1][:, -1:], tokens[-1], list[tuple[int, float]]()
    for _ in range(count):
        rows = torch.cat([embed(torch.tensor([[token]])), state], -1)
        made = small(inputs_embeds=rows, position_ids=torch.tensor([[len(tokens) - 1]]), shared_kv_states=seen)
        best = torch.topk(made.logits[0, -1], 2)
        state, token = made.last_hidden_state, int(best.indices[0])
        found.append((token, float(best.values[0] - best.values[1])))
    return found
