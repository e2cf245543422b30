"""Triton's interpreter with products in float64: it multiplies tiles by numpy, whose library sums a row otherwise at
another place in a tile on some processors (AVX2). In float64 that does not show; how kernels cut their sums does, for
those are float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def exact_products(put: Any = setattr) -> None:
    """``put``: monkeypatch.setattr, where it is to end."""
    put(interpreter.InterpreterBuilder, "create_dot", _dot)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product = np.matmul(_wide(a), _wide(b)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _wide(handle: Any) -> Any:
    data = handle.data
    if handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating():
        data = interpreter._convert_float(data, handle.dtype, tl.float16, None).view(np.float16)
    return data.astype(np.float64)
