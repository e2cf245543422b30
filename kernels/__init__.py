"""Ops: one signature each, several implementations. Importing this package imports neither torch nor triton.

``load()`` imports every op's declaration and implementations and returns them by name; the functions of
``registry`` choose among them. Kernels take plain tensors and know no model, request or config object.
"""

from __future__ import annotations

from .op import KernelError, Op, Target
from .registry import choose, describe, load, self_test

__all__ = ["KernelError", "Op", "Target", "choose", "describe", "load", "self_test"]
