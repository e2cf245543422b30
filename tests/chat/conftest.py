from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer_dirs(support: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind (byte_level, sentencepiece, metaspace, wordpiece) -> directory of a small tokenizer."""
    found: dict[str, Path] = support("tokenizers_small").make_all(tmp_path_factory.mktemp("tokenizers"))
    return found
