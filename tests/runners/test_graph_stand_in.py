"""The stand-in for captured graphs lets through what a GPU can do, and fails on what it cannot."""

from __future__ import annotations

import gc

import pytest
import torch

from toolkit.runners.tensor.devices.cuda_device import CudaDevice


@pytest.fixture
def device(support):
    return support("graphs").CpuDevice()


@pytest.fixture
def refusal(support):
    return support("graphs").NotOnAGraph


def test_a_replay_computes_anew_at_the_same_addresses(device):
    x, out = torch.ones(4), torch.zeros(4)
    kept = []

    def run():
        y = (x * 2).view(2, 2) + 1
        kept.append(y)
        out.copy_(y.flatten())

    replay = device.capture(run)
    assert out.tolist() == [0] * 4, "what is captured is not done"
    address = out.data_ptr()
    for value in (3.0, 5.0):
        x.fill_(value)
        replay()
        assert out.tolist() == [2 * value + 1] * 4 and out.data_ptr() == address
    other = device.capture(lambda: out.add_(x * 2))
    other()
    assert kept[0].flatten().tolist() != [11.0] * 4, "what another graph left in the pool is overwritten"


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x + torch.from_numpy(x.numpy()),
    ],
    ids=["item", "nonzero", "truth values", "unique", "numbers of the host", "an array of the host"],
)
def test_a_capture_refuses_what_needs_the_host(run, device, refusal):
    with pytest.raises(refusal):
        device.capture(lambda: run(torch.ones(3)))


def test_a_capture_refuses_pinned_memory(device, refusal):
    with pytest.raises(refusal, match="memory of the host"):
        device.capture(lambda: device.pinned(8))


def test_a_replay_notices_memory_that_went(device, refusal):
    held, out = [torch.ones(4)], torch.zeros(4)
    replay = device.capture(lambda: out.copy_(held[0] * 2))
    replay()
    held.clear()
    with pytest.raises(refusal, match="given back"):
        replay()


def test_a_replay_notices_memory_that_moved(device, refusal):
    x, out = torch.ones(4), torch.zeros(4)
    replay = device.capture(lambda: out.copy_(x * 2))
    x.untyped_storage().resize_(1 << 22)
    with pytest.raises(refusal, match="moved"):
        replay()


@pytest.mark.parametrize(
    "submit",
    [lambda x, d: x.sum().item(), lambda x, d: x.tolist(), lambda x, d: x.cpu(), lambda x, d: d.mark().synchronize()],
    ids=["item", "tolist", "cpu", "waiting"],
)
def test_a_step_must_not_wait_while_it_is_submitted(submit, device, refusal):
    class Runner:
        def submit(self, batch):
            return submit(torch.ones(3), device)

    with pytest.raises(refusal):
        device.watch(Runner()).submit(None)


def test_a_pool_whose_graphs_are_gone_is_refused(device):
    out = torch.zeros(1)
    pool = device.pool()
    first = device.capture(lambda: out.add_(1), pool)
    device.capture(lambda: out.add_(1), pool)
    del first
    with pytest.raises(RuntimeError, match="gone"):
        device.capture(lambda: out.add_(1), pool)
    device.capture(lambda: out.add_(1), device.pool())


def test_nothing_is_collected_while_torch_captures(monkeypatch):
    """What garbage gives back to CUDA would break the capture; after it, also a failed one, all is as it was."""
    collecting, pools = [], []

    class Graph:
        replay = None

        def capture_begin(self, pool, capture_error_mode):
            pools.append(pool)
            collecting.append(gc.isenabled())

        def capture_end(self):
            collecting.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("synchronize", "get_device_capability", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: (9, 0))
    handles = iter([(0, 1), (0, 2)])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    on = CudaDevice(torch.device("cuda", 0))
    on.capture(lambda: collecting.append(gc.isenabled()), on.pool())

    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        on.capture(fails, on.pool())
    assert collecting == [False] * 5 and gc.isenabled() and pools == [(0, 1), (0, 2)]
