"""The text that models are measured on: a file of the user's, or the one that the package ships."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import UsageError

HELDOUT = "heldout"


def heldout_text(tokens: int | None = None) -> str:
    """The held-out text that the package ships; its source is in docs/figures/quantization.md. Where no more than its
    first ``tokens`` are wanted, a beginning that has them in any vocabulary."""
    text = Path(__file__).with_name("heldout.txt").read_text(encoding="utf-8")
    return text if tokens is None else text[: 16 * tokens]


def read_text(path: Path) -> str:
    """The text file behind ``--data``; ``heldout``, where no such file exists, is the text that the package ships.

    Raises UsageError for one that cannot be read, is no UTF-8 or empty.
    """
    if str(path) == HELDOUT and not path.exists():
        return heldout_text()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--data {path}: expected UTF-8 text, found other bytes at {error.start}") from error
    except OSError as error:
        raise UsageError(f"--data {path}: cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise UsageError(f"--data {path}: the file is empty")
    return text
