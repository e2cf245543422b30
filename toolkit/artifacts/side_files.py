"""The small files that travel with the weights from stage to stage: tokenizer, chat template, generation config."""

from __future__ import annotations

import shutil
from pathlib import Path

from toolkit.artifacts.checkpoint import Checkpoint

_TOKENIZER = (
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
)


def copy_side_files(checkpoint: Checkpoint, target: Path) -> list[str]:
    """Copy tokenizer, chat template and generation config to ``target`` (not config.json); return the names copied."""
    source = checkpoint.tokenizer_dir
    names = {file.name for pattern in _TOKENIZER for file in source.glob(pattern) if file.is_file()}
    if (source / "generation_config.json").is_file():
        names.add("generation_config.json")
    for name in sorted(names):
        shutil.copyfile(source / name, target / name)
    return sorted(names)
