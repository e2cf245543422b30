"""A checkpoint of LLaVA 1.5's shape with random weights: CLIP's ViT-L/14 at 336 pixels, its projector, and a language
model of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast

IMAGE, TOKENS = 5, ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>")
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "image_size": 336,
    "patch_size": 14,
}
WIDE = {"hidden_size": 4096, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 32}
DEMO = {  # of SmolLM2-135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def write_llava(path: Path, text: dict[str, Any], dtype: torch.dtype) -> LlavaForConditionalGeneration:
    """The model, which is at ``path`` too."""
    torch.manual_seed(0)
    text = {"model_type": "llama", "vocab_size": 320, "max_position_embeddings": 4096, **text}
    config = LlavaConfig(text_config=text, vision_config=VISION, image_token_index=IMAGE, vision_feature_layer=-2)
    model = LlavaForConditionalGeneration(config).eval().to(dtype)
    model.save_pretrained(path)
    size = {"height": 336, "width": 336}
    given = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}, "crop_size": size}
    (path / "preprocessor_config.json").write_text(json.dumps(given))
    _tokenizer().save_pretrained(path)
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    found.train_from_iterator(["What stands on the table, and what is behind it? "], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
