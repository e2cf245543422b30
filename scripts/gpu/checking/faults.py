"""What goes wrong on a device, and whether it still works after."""

from __future__ import annotations


def said(error: Exception) -> str:
    """What an exception says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def answers(device: str) -> bool:
    """Whether anything can still be run in this process: an illegal access ends its CUDA context."""
    import torch

    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception:  # torch.AcceleratorError, RuntimeError
        return False
    return True
