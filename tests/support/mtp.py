"""Tiny models with a layer for multi-token prediction, as DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5 and MiMo spell it,
and what that layer makes of a text by transformers and a few lines of torch.

``add_mtp(path, target, *, right=False)``: a copy of the tiny checkpoint at ``path`` with such a layer of random
weights; ``right``: the model says what follows a token by that token alone, and so does the layer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "glm4_moe": {"num_hidden_layers": 2},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": False, "layer_types": None},  # MiMo
}
_INSIDE = ("model.layers.{n}.", "model.layers.{n}.enorm", "model.layers.{n}.hnorm", "model.layers.{n}.eh_proj")
_MIMO = ("model.mtp_layers.0.", *(
    f"model.mtp_layers.0.{x}" for x in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
))  # fmt: skip
_APART = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc")


def names(family: str, n: int) -> tuple[str, str, str, str, str]:
    """How the layer begins, and its norms of tokens and states, join, and norm before the head."""
    if family == "mimo":
        return _MIMO
    found = _APART if family.startswith("qwen3") else _INSIDE
    last = "mtp.norm" if family.startswith("qwen3") else "model.layers.{n}.shared_head.norm"
    layer, token, state, join, norm = (x.format(n=n) for x in (*found, last))
    return layer, token, state, join, norm


def add_mtp(path: Path, target: Path, *, right: bool = False) -> Path:
    """See above."""
    shutil.copytree(path, target)
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] == "qwen2":
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    family, n, h = config["model_type"], config["num_hidden_layers"], config["hidden_size"]
    tensors = load_file(path / "model.safetensors")
    types = config.get("layer_types") or ["full_attention"] * n
    like = f"model.layers.{max(i for i in range(n) if types[i] == 'full_attention')}."
    layer, token, state, join, norm = names(family, n)
    torch.manual_seed(5)
    offset = 1.0 if family.startswith("qwen3") else 0.0
    if right:
        ends = ("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")
        tensors = {name: torch.zeros_like(x) if name.endswith(ends) else x for name, x in tensors.items()}
    beside = {
        layer + name.removeprefix(like): x.clone() if right else x[..., torch.randperm(x.shape[-1])].contiguous()
        for name, x in tensors.items()
        if name.startswith(like)
    }
    for name in (token, state):
        beside[f"{name}.weight"] = torch.full((h,), 1 - offset) if right else torch.rand(h) + 0.5 - offset
    beside[f"{norm}.weight"] = tensors["model.norm.weight"].clone() if right else torch.rand(h) + 0.5 - offset
    eye = torch.cat([torch.eye(h), torch.zeros(h, h)], 1).roll(h if family == "mimo" else 0, 1)
    beside[f"{join}.weight"] = eye if right else torch.randn(h, 2 * h) / h**0.5
    if family == "mimo":
        (target / "config.json").write_text(json.dumps(config))
    elif not family.startswith("qwen3"):
        stem = f"model.layers.{n}"
        beside[f"{stem}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        beside[f"{stem}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        config["num_nextn_predict_layers"] = 1
        (target / "config.json").write_text(json.dumps(config))
    save_file(tensors | beside, target / "model.safetensors", {"format": "pt"})
    return target


class Oracle:
    """The model at ``path`` and its layer, float32."""

    def __init__(self, path: Path, work: Path) -> None:
        from transformers import AutoModelForCausalLM

        config = json.loads((path / "config.json").read_text())
        self.family, n = config["model_type"], config["num_hidden_layers"]
        if self.family == "mimo":  # a Qwen2 beside its layer
            config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        layer, self.token, self.state, join, norm = names(self.family, n)
        every = load_file(path / "model.safetensors")
        own = {k: v for k, v in every.items() if not k.startswith((layer, "mtp."))}
        outer = ("model.embed_tokens.", "lm_head.")
        alone = {k: v for k, v in every.items() if k.startswith(outer)} | {"model.norm.weight": every[f"{norm}.weight"]}
        shared = ("shared_head", "enorm", "hnorm", "eh_proj", "embed_tokens")
        shared += tuple(x.rpartition(".")[2] for x in _MIMO[1:])
        alone |= {
            f"model.layers.0.{k.removeprefix(layer)}": v
            for k, v in every.items()
            if k.startswith(layer) and not any(part in k for part in shared)
        }
        one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0}
        one |= {"mlp_layer_types": ["sparse"]} if "mlp_layer_types" in config else {}
        models = []
        for name, fields, tensors in (("whole", {}, own), ("layer", one, alone)):
            (work / name).mkdir()
            (work / name / "config.json").write_text(json.dumps(config | fields))
            save_file(tensors, work / name / "model.safetensors", {"format": "pt"})
            models.append(
                AutoModelForCausalLM.from_pretrained(
                    work / name, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
                )
            )
        self.whole, self.layer = models
        self.join, self.beside = every[f"{join}.weight"].float(), every

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm, by hand."""
        weight = self.beside[f"{name}.weight"].float() + (1.0 if self.family.startswith("qwen3") else 0.0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.layer.config.rms_norm_eps) * weight

    @torch.no_grad()
    def guess(self, tokens: list[int], count: int) -> list[tuple[int, float]]:
        """What follows a text token by token, and by how much each was likelier than the next likeliest."""
        ids = torch.tensor([tokens])
        embed = self.whole.get_input_embeddings()
        states = self.whole.model(ids).last_hidden_state[:, :-1]  # behind the final norm
        words, found = embed(ids[:, 1:]), []
        while True:
            both = [self.norm(words, self.token), self.norm(states, self.state)]
            rows = torch.cat(both[::-1] if self.family == "mimo" else both, -1) @ self.join.T
            inner: dict[str, Tensor] = {}
            hook = self.layer.model.norm.register_forward_pre_hook(lambda _, x, to=inner: to.update(before=x[0]))
            after = self.layer.model(inputs_embeds=rows).last_hidden_state
            hook.remove()
            logits = self.layer.lm_head(after[0, -1])
            best = torch.topk(logits, 2)
            found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            if len(found) == count:
                return found
            made = (after if self.family.startswith(("qwen3", "mimo")) else inner["before"])[:, -1:]
            states = torch.cat([states, made], 1)
            words = torch.cat([words, embed(torch.tensor([[found[-1][0]]]))], 1)


def write_eagle(path: Path, target: Path, *, right: bool = False, form: str = "authors", bias: bool = False) -> Path:
    """An EAGLE head for the tiny Llama at ``path``, of its authors' form or "speculators"; ``right``: for a model made
    by ``alone``."""
    config = json.loads((path / "config.json").read_text())
    tensors, h, like = load_file(path / "model.safetensors"), config["hidden_size"], "model.layers.0."
    begin, join = ("layers.0.", "fc") if form == "authors" else ("transformer.", "fusion_fc")
    torch.manual_seed(6)
    made = {
        begin + name.removeprefix(like): x.clone() if right else x[..., torch.randperm(x.shape[-1])].contiguous()
        for name, x in tensors.items()
        if name.startswith(like) and "input_layernorm" not in name
    }
    weight = torch.diag(tensors["model.norm.weight"].float())
    made[f"{join}.weight"] = torch.cat([weight, torch.zeros(h, h)], 1) if right else torch.randn(h, 2 * h) / h**0.5
    made |= {f"{join}.bias": torch.randn(h)} if bias else {}
    made["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    target.mkdir()
    layer = config | {"num_hidden_layers": 1}
    wrapped = {"speculators_model_type": "eagle", "speculators_config": {}, "transformer_layer_config": layer}
    (target / "config.json").write_text(json.dumps(layer if form == "authors" else wrapped))
    save_file(made, target / "model.safetensors", {"format": "pt"})
    return target


def alone(path: Path, target: Path) -> Path:
    """The tiny model at ``path``, but that it says what follows a token by that token alone."""
    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    ends = ("o_proj.weight", "down_proj.weight")
    save_file(
        {name: torch.zeros_like(x) if name.endswith(ends) else x for name, x in tensors.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    return target


@torch.no_grad()
def eagle_guess(path: Path, head: Path, tokens: list[int], count: int) -> list[tuple[int, float]]:
    """As ``Oracle.guess``, of an EAGLE head in its authors' form."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    stored = load_file(head / "model.safetensors")
    layer = LlamaForCausalLM(type(whole.config)(**json.loads((head / "config.json").read_text())))
    layer.config._attn_implementation = "eager"
    found = {f"model.{name}": x for name, x in stored.items() if name.startswith("layers.")}
    layer.load_state_dict(found, strict=False)
    layer.model.layers[0].input_layernorm = torch.nn.Identity()
    layer.model.norm = torch.nn.Identity()
    ids, embed, guess = torch.tensor([tokens]), whole.get_input_embeddings(), list[tuple[int, float]]()
    states, words = whole.model(ids).last_hidden_state[:, :-1], embed(torch.tensor([tokens[1:]]))
    bias = stored.get("fc.bias", torch.zeros(1))
    while True:
        rows = torch.cat([words, states], -1) @ stored["fc.weight"].T + bias
        made = layer.model(inputs_embeds=rows).last_hidden_state[:, -1:]
        best = torch.topk(whole.lm_head(made[0, -1]), 2)
        guess.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
        if len(guess) == count:
            return guess
        states = torch.cat([states, made], 1)
        words = torch.cat([words, embed(torch.tensor([[guess[-1][0]]]))], 1)


_NEXTN = {"mtp.fc": "eh_proj", "mtp.norm": "shared_head.norm", "mtp.pre_fc_norm_embedding": "enorm"}
_NEXTN |= {"mtp.pre_fc_norm_hidden": "hnorm"}


def as_gguf(path: Path, target: Path) -> Path:
    """The checkpoint at ``path``, made by ``add_mtp``, as a GGUF file in float32, its layer spelled as llama.cpp's
    converter does, by gguf-py's own names."""
    import gguf

    from toolkit.convert.formats import rewrite

    config = json.loads((path / "config.json").read_text())
    n, plain = config["num_hidden_layers"], target.with_suffix(".plain.gguf")
    rewrite(str(path), plain, to="gguf", gguf_type="f32", quiet=True)
    reader = gguf.GGUFReader(plain)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", f"{arch}.nextn_predict_layers"):
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        value = field.contents()
        writer.add_key_value(name, n + 1 if name == f"{arch}.block_count" else value, kind, sub_type=inner)
    writer.add_nextn_predict_layers(1)
    for tensor in reader.tensors:
        if not tensor.name.startswith(f"blk.{n}."):
            writer.add_tensor(tensor.name, tensor.data.copy())
    for name, x in _blocks_of(load_file(path / "model.safetensors"), n, arch).items():
        writer.add_tensor(name, x.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _blocks_of(tensors: dict[str, Tensor], n: int, arch: str) -> dict[str, Tensor]:
    """The layer's tensors by GGUF's names, of experts one stack each."""
    import gguf

    whose = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    maps = [gguf.get_tensor_name_map(kind, n + 1) for kind in (whose[arch], gguf.MODEL_ARCH.GLM4_MOE)]
    plus = 1.0 if arch.startswith("qwen3") else 0.0
    found: dict[str, list[Tensor]] = {}
    for name, x in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if stem in _NEXTN:
            stem = f"model.layers.{n}.{_NEXTN[stem]}"
        stem = stem.replace("mtp.layers.0.", f"model.layers.{n}.")
        if not stem.startswith(f"model.layers.{n}."):
            continue
        if suffix == "e_score_correction_bias":
            stem, suffix = f"{stem}.e_score_correction", "bias"
        if suffix == "weight" and stem.endswith("norm"):
            x = x + plus
        names = [f"model.layers.{n}.mlp.experts.{stem.rpartition('.')[2]}"] if ".experts." in stem else [stem]
        theirs = next(t for m in maps if (t := m.get_name(names[0])) is not None)
        found.setdefault(f"{theirs}.{suffix}", []).append(x)
    return {name: torch.stack(x) if "_exps." in name else x[0] for name, x in found.items()}
