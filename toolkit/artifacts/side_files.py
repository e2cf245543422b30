"""The small files that travel with the weights from stage to stage: tokenizer, chat template, generation config, how
pictures are prepared, what is made of hidden states, and what was folded into the weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.scales import copy_scales
from toolkit.artifacts.text_head import POOLING_CONFIGS, pooling_config, write_head

_TEXTS_AND_PICTURES = (
    "tokenizer*.json",
    "*.model",  # also spiece.model, sentencepiece.bpe.model, tiktoken.model
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


def copy_side_files(checkpoint: Checkpoint, target: Path, *, head_apart: bool = True) -> list[str]:
    """Copy tokenizer, chat template, preprocessor and generation config to ``target`` (not config.json); return their
    names. ``head_apart``: see ``write_head``."""
    source = checkpoint.tokenizer_dir
    files = [file for pattern in _TEXTS_AND_PICTURES for file in source.glob(pattern) if file.is_file()]
    names = {str(file.relative_to(source)) for file in files}
    if (source / "generation_config.json").is_file():
        names.add("generation_config.json")
    for name in sorted(names):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    if (pooling := pooling_config(source)) is not None:
        shutil.copyfile(pooling, target / POOLING_CONFIGS[0])
        names.add(POOLING_CONFIGS[0])
    names.update(write_head(source, target, apart=head_apart))
    copy_scales(checkpoint.path, target)
    return sorted(names)
