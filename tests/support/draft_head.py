"""``write(path, spec=SPEC, **fields)``: an EAGLE-3 head of random weights in the form of its authors, with an
embedding, for a tiny Llama of four layers; ``fields`` go into its config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from toolkit.artifacts.drafts.draft_head import HeadSpec
from toolkit.models.spec import RopeSpec

LAYERS = (1, 2, 4)
SPEC = HeadSpec(64, 96, 4, 2, 16, 320, 150, 1e-5, RopeSpec(16, 1e4), LAYERS, norm_before_residual=True)


def write(path: Path, spec: HeadSpec = SPEC, **fields: Any) -> Path:
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "max_position_embeddings": 512,
        "eagle_aux_hidden_state_layer_ids": list(spec.layers),
    }
    (path / "config.json").write_text(json.dumps(config | fields))
    tensors = {name: torch.randn(shape) for name, shape in spec.shapes(len(spec.layers)).items()}
    tensors |= {"embed_tokens.weight": torch.randn(spec.vocab_size, spec.hidden_size)}
    tensors |= {"d2t": torch.zeros(spec.draft_vocab_size, dtype=torch.int64)}
    save_file(tensors, path / "model.safetensors")
    return path
