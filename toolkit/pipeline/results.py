"""Responses on their way to the user of the Python API."""

from __future__ import annotations

from toolkit.errors import UsageError
from toolkit.messages import Response


def failed(so_far: Response, error: Exception) -> Response:
    """The response of a request that ended in an error. ``error_code`` is HTTP's: whose fault it was."""
    so_far.finish_reason = "error"
    so_far.error_code = 400 if isinstance(error, UsageError) else 500
    so_far.error_message = str(error) or type(error).__name__
    return so_far


def with_tensors(response: Response) -> Response:
    """Logits and hidden states as torch tensors; torch is imported for those who asked for them only."""
    for name in ("logits", "last_hidden_state"):
        value = getattr(response, name)
        if value is not None and type(value).__module__ == "numpy":
            import torch

            setattr(response, name, torch.from_numpy(value.copy()))
    return response
