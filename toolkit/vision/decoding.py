"""What is said where a file cannot be decoded in its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.box.box import Cancelled, Crowded, LimitError
from toolkit.errors import BusyError, UsageError

GIVEN_UP = "it was given up"  # nobody waits for the answer any more


@contextmanager
def decoding(shown: str) -> Iterator[None]:
    """Raises BusyError and UsageError, one line, in the place of what a box raises but ValueError; ``shown``: what
    messages call the file."""
    try:
        yield
    except Cancelled as e:
        raise BusyError(f"{shown}: {GIVEN_UP}") from e
    except Crowded as e:
        raise BusyError(f"{shown}: cannot be decoded now: {e}") from e
    except LimitError as e:
        raise UsageError(f"{shown}: cannot be decoded: {e}") from e
