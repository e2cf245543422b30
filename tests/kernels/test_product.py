"""float32 products by oneDNN where MKL is slow give what ``F.linear`` gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from toolkit.kernels.torch import product as module
from toolkit.kernels.torch.product import product


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prefers_onednn", lambda: request.param)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (5, 24), (2, 3, 24), (70, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_f_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(40, 24)
    b = torch.randn(40) if bias else None
    torch.testing.assert_close(product(x, weight, b), F.linear(x, weight, b))
    across = torch.randn(24, 40).T  # a weight that is not contiguous
    torch.testing.assert_close(product(x, across, b), F.linear(x, across, b))


@pytest.mark.usefixtures("library")
def test_gradients_and_autocast_go_through() -> None:
    x, weight = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True)
    product(x, weight).sum().backward()
    assert weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert product(x, weight).dtype is torch.bfloat16
