"""A language model and an eye as one checkpoint in LLaVA's form, which transformers opens too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tiny_vlm.tower import PATCH, PREPROCESSOR, VISION, Eye

SPARE = "<jupyter_text>"  # a token of the language model that no chat has; it is called IMAGE here
IMAGE = "<image>"
LANGUAGE, ADAPTER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['content'] is string %}{{ message['content'] }}\
{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<image>\\n' }}{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def write_llava(demo: Path, eye: Eye, target: Path) -> None:
    """``demo``: the language model's checkpoint, whose tensors are copied as they are."""
    with safe_open(demo / "model.safetensors", "pt") as file:
        language = {f"language_model.{name}": file.get_tensor(name) for name in file.keys()}
    own = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in eye.state_dict().items()}
    adapter = {_as_llava(name): tensor for name, tensor in own.items() if "position_ids" not in name}
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for name, tensors in ((LANGUAGE, language), (ADAPTER, adapter)):
        save_file(tensors, target / name, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, name)
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index["metadata"]["total_size"] = index["metadata"].get("total_size", 0) + total
    _write(target / "model.safetensors.index.json", index)
    _write_config(demo, target)
    _write_tokenizer(demo, target)
    _write(target / "preprocessor_config.json", PREPROCESSOR)
    processor = {"processor_class": "LlavaProcessor", "image_token": IMAGE, "patch_size": PATCH}
    processor |= {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    _write(target / "processor_config.json", processor)
    shutil.copy(demo / "generation_config.json", target)


def _as_llava(name: str) -> str:
    tower = "vision_tower."
    if name.startswith(tower) and not name.startswith(f"{tower}vision_model."):
        return f"{tower}vision_model.{name.removeprefix(tower)}"
    return name


def _write_config(demo: Path, target: Path) -> None:
    text = json.loads((demo / "config.json").read_text())
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": VISION,
        "image_token_index": _spare_id(demo),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "image_seq_length": (VISION["image_size"] // PATCH) ** 2,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    _write(target / "config.json", config)


def _spare_id(demo: Path) -> int:
    added = json.loads((demo / "tokenizer.json").read_text())["added_tokens"]
    return next(token["id"] for token in added if token["content"] == SPARE)


def _write_tokenizer(demo: Path, target: Path) -> None:
    whole = (demo / "tokenizer.json").read_text()
    (target / "tokenizer.json").write_text(whole.replace(json.dumps(SPARE), json.dumps(IMAGE)))
    shutil.copy(demo / "tokenizer_config.json", target)
    (target / "chat_template.jinja").write_text(TEMPLATE)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))
