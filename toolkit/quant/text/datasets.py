"""Calibration sets by name: which dataset of the Hugging Face hub, and which of its columns are text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.user_path import user_path
from toolkit.errors import ToolkitError, UsageError


@dataclass(frozen=True)
class Known:
    """``columns`` are joined by blank lines; a single ``messages`` column holds a chat. ``revision``: the branch, where
    it is not the main one."""

    repository: str
    split: str
    columns: tuple[str, ...]
    config: str | None = None
    revision: str | None = None


KNOWN: dict[str, Known] = {
    "wikitext2": Known("Salesforce/wikitext", "train", ("text",), "wikitext-2-raw-v1"),
    "c4": Known("allenai/c4", "train", ("text",), "en"),
    "pileval": Known("mit-han-lab/pile-val-backup", "validation", ("text",)),
    # Its main branch is a script, which the library no longer runs; the hub's own conversion has one unnamed subset.
    "ptb": Known("ptb-text-only/ptb_text_only", "train", ("sentence",), revision="refs/convert/parquet"),
    "gsm8k": Known("openai/gsm8k", "train", ("question", "answer"), "main"),
    "open-platypus": Known("garage-bAInd/Open-Platypus", "train", ("instruction", "output")),
    "openwebtext": Known("Skylion007/openwebtext", "train", ("text",)),
    "ultrachat": Known("HuggingFaceH4/ultrachat_200k", "train_sft", ("messages",)),
}
_SHUFFLE_BUFFER = 10_000


def find_known(dataset: str) -> tuple[str, Path | None] | None:
    """(name, folder of a copy or None) where ``dataset`` is a known name or ``NAME=FOLDER``, None where it is a path.

    Raises UsageError where there is no such folder.
    """
    name, given, folder = dataset.partition("=")
    if name.lower() not in KNOWN or user_path(dataset).exists():
        return None
    if given and not (folder and user_path(folder).is_dir()):
        raise UsageError(f"--calib-dataset {dataset}: expected a folder, a copy of {KNOWN[name.lower()].repository}")
    return name.lower(), user_path(folder) if given else None


def known_texts(name: str, folder: Path | None, seed: int) -> Iterator[str | list[dict[str, Any]]]:
    """Rows of a known dataset, streamed in an order drawn by the seed: from the hub, or from a ``folder`` laid out as
    its repository there is. Raises ToolkitError if out of reach."""
    import datasets

    known = KNOWN[name]
    source, revision = (known.repository, known.revision) if folder is None else (str(folder), None)
    try:
        rows = datasets.load_dataset(source, known.config, split=known.split, revision=revision, streaming=True)
        for row in rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER):
            if known.columns == ("messages",):
                yield row["messages"]
            else:
                yield "\n\n".join(str(row[c]) for c in known.columns)
    except ToolkitError:
        raise
    except Exception as error:  # the datasets library raises what its many back ends raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        if folder is not None:
            raise ToolkitError(
                f"--calib-dataset {name}={folder}: cannot be read as a copy of {known.repository} ({reason})"
            ) from error
        raise ToolkitError(
            f"--calib-dataset {name}: {known.repository} cannot be fetched from the hub ({reason}); "
            f"give a copy of it ({name}=FOLDER), a local file, or --calib-dataset self, which needs no download"
        ) from error
