"""LoRA adapters that an engine artifact holds: each a directory below ``adapters/``, as PEFT writes them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.artifacts.adapters.config import CONFIG
from toolkit.artifacts.manifest import content_digest
from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec, StoredTensor

FOLDER = "adapters"
_NAME = re.compile(r"\w[\w.-]{0,99}")


def check_adapters(given: Mapping[str, Path], spec: DecoderSpec, stored: Sequence[StoredTensor]) -> dict[str, str]:
    """Digests of adapters by their names. Raises UsageError for a name that no directory can have, ToolkitError for an
    adapter that does not fit the model."""
    from toolkit.artifacts.adapters.adapter import read_changes  # not for who only asks which there are

    found = {}
    for name, path in given.items():
        if not _NAME.fullmatch(name):
            raise UsageError(f"--adapters: expected a name of letters, digits, dots and dashes, found {name!r:.80}")
        read_changes(path, spec, stored)
        found[name] = content_digest(path)
    return found


def write_adapters(directory: Path, given: Mapping[str, Path]) -> None:
    """Copies of adapters into an artifact that is being written. OSError passes through."""
    from toolkit.artifacts.adapters.adapter import WEIGHTS

    for name, path in given.items():
        to = directory / FOLDER / name
        to.mkdir(parents=True)
        files = [file for file in (CONFIG, *WEIGHTS) if (path / file).is_file()]
        for file in files[:2]:  # of weights those that are read: safetensors before a pickle
            shutil.copyfile(path / file, to / file)


def packed_adapters(path: Path) -> dict[str, str]:
    """Those that the artifact at ``path`` holds, name → directory."""
    found = sorted((path / FOLDER).glob(f"*/{CONFIG}")) if path.is_dir() else []
    return {file.parent.name: str(file.parent) for file in found}
