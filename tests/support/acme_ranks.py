"""A package for the device "acme" (``torch_stand_in.py``) whose ranks speak as those on GPUs do; and what drives them.

Its messages take tensors on the device alone, and behave as NCCL's: who waits for one whose other end is gone waits for
ever, and after ``abort`` goes on with whatever lies in the tensor. Each process writes which devices it has spoken on
to the folder ``ACME_SEEN``. Run as a program it prints what ranks give, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch_acme
from torch.utils import _pytree as tree

from toolkit.parallel.links import GLOO
from toolkit.runners.tensor.devices.accelerator import DeviceKind, Link

FOR_EVER = 3600.0


class Messages:
    """Some of what torch calls a ``Backend``."""

    def __init__(self, gloo: Any) -> None:
        self._gloo, self._ended = gloo, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: Sent(self._ended, getattr(self._gloo, name), tree.tree_map(_raw, list(arguments)))

    def abort(self) -> None:
        self._ended.set()
        self._gloo.abort()


class Sent:
    def __init__(self, ended: threading.Event, begin: Any, arguments: Any) -> None:
        if ended.is_set():
            raise RuntimeError("the communicator was aborted")
        self._ended, self._over = ended, threading.Event()
        threading.Thread(target=self._run, args=(begin(*arguments),), daemon=True).start()

    def _run(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError:
            self._ended.wait()
        self._over.set()

    def wait(self) -> None:
        while not self._over.wait(0.0005):
            if self._ended.is_set():
                return


def _raw(value: Any) -> Any:
    if isinstance(value, torch_acme.Held):
        if (folder := os.environ.get("ACME_SEEN")) is not None:
            (Path(folder) / f"{os.getpid()}-{value.number}").touch()
        return value.raw
    if hasattr(value, "device"):
        raise AssertionError("a message between devices has a tensor of the host")
    return value


def messages(store: Any, host: str, rank: int, world: int, seconds: float) -> Messages:
    return Messages(GLOO.open(store, host, rank, world, FOR_EVER))


DEVICE = DeviceKind("Acme's NPU", ranks=Link("acmeccl", messages, queued=True))


def die_beside(pid: int) -> None:
    print(json.dumps({"pid": pid}), flush=True)
    os.kill(pid, signal.SIGCONT)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def main(path: str, layout: dict[str, Any], what: str) -> None:
    import numpy as np
    from steps import Driver  # type: ignore[import-not-found]

    from toolkit.errors import ToolkitError, UsageError
    from toolkit.parallel.layout import Layout
    from toolkit.parallel.model import Model
    from toolkit.parallel.nodes import Nodes, serve
    from toolkit.parallel.runner import RankedRunner
    from toolkit.runners.base import RunnerLost, RunnerOptions
    from toolkit.runners.choose import open_runner

    prompt = np.random.default_rng(3).integers(3, 300, 30).tolist()
    options = {"dtype": "float32", "block_size": 16, "threads": 1}
    devices = tuple(int(x) for x in os.environ.get("ACME_USED", "").split(",") if x)
    told: dict[str, Any] = {}
    model, sizes = Model(path, RunnerOptions(**options, device="acme"), {}, devices=devices), Layout(**layout)
    nodes = Nodes.of(1, 0, None, sizes)  # torchrun's variables
    if nodes is not None and nodes.rank:
        return serve(model, sizes, nodes, print)
    try:
        several = RankedRunner(model, sizes, nodes)
    except (ToolkitError, UsageError) as error:
        print(json.dumps({"refused": str(error)}))
        return
    driver, group = Driver(several), several._group
    if what == "compare":
        one = Driver(open_runner(Path(path), backend="pytorch", options=RunnerOptions(**options, device="cpu"))[0])
        a, b = one.add(), driver.add()
        before = group.sums, group.gathers, group.handed, group.exchanges
        torch_acme.to_host.clear()
        found = driver.step({b: prompt})
        told["to_host"] = torch_acme.to_host[:]
        told["messages"] = [
            now - then
            for now, then in zip((group.sums, group.gathers, group.handed, group.exchanges), before, strict=True)
        ]
        told["same"] = bool((found.tokens == one.step({a: prompt}).tokens).all())
        told["tokens"] = [driver.generate(prompt, 8), one.generate(prompt, 8)]
        told["layers"], told["hidden"] = len(several.spec.layers), several.spec.hidden_size
        told["free"] = several.memory().free
        told["notes"], told["device"] = several.notes, several.device
        told["pids"] = [os.getpid(), *several.pids]
    else:
        driver.generate(prompt, 3)
        (pid,) = several.pids
        os.kill(pid, signal.SIGSTOP)
        if what == "killed":
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        if what == "alone":  # the first one ends in the midst of a step that the other waits in
            several._local.run = lambda *_: die_beside(pid)
        try:
            driver.generate(prompt, 3)
        except RunnerLost as error:
            told["lost"] = str(error)
    several.close()
    print(json.dumps(told), flush=True)
    os._exit(0)  # without gloo, which ends badly beside a rank that it has lost


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
