"""A CPU in the place of a GPU for the runner in ``toolkit/runners/tensor``, which forbids what a GPU cannot do.

While a step is submitted nothing may wait for the device or look at a tensor's values. ``capture`` records the calls of
torch's operators and of Triton's kernels (which the interpreter runs); a replay does them again on the same storages,
and fails where memory that the graph reads has gone or has moved, where a result has another shape than it had, and
where a call would need the host. Between replays what a graph computed is overwritten, as in a pool that graphs share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

HOST_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal", "_unique2")


class NotOnAGraph(AssertionError):
    """Something that a GPU does not do while work is only submitted, captured or replayed."""


@dataclass
class Outside:
    """A tensor that a graph did not make: its storage, which must live on, and where it lies in it."""

    storage: StorageWeakRef
    address: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(t: Tensor) -> Outside:
        where = (t.storage_offset(), tuple(t.size()), tuple(t.stride()), t.dtype)
        return Outside(StorageWeakRef(t.untyped_storage()), t.data_ptr(), *where)

    def tensor(self) -> Tensor:
        if self.storage.expired():
            raise NotOnAGraph("the graph reads or writes memory that was given back")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        t = torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)
        if t.data_ptr() != self.address:
            raise NotOnAGraph("memory that the graph reads or writes has moved")
        return t


@dataclass
class Call:
    """One operator or kernel. ``out``: what it made at capture, None where it only looks at memory or writes to it."""

    run: Callable[..., Any]
    args: Any
    kwargs: Any
    out: Any


@dataclass
class Recorder(TorchDispatchMode):
    """Records what is called inside, and does it; afterwards memory from outside is as it was."""

    calls: list[Call] = field(default_factory=list)
    made: dict[int, Tensor] = field(default_factory=dict)  # by storage: it stays, as in a graph's pool
    before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    numbers: HostNumbers = field(default_factory=lambda: HostNumbers())

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "aten::lift_fresh" and args[0].dim():
            raise NotOnAGraph("numbers of the host are copied to the device")
        self.numbers.check(func, args)
        writes = [a for a, s in zip(args, func._schema.arguments, strict=False) if _written(s)]
        writes += [kwargs[s.name] for s in func._schema.arguments if s.name in kwargs and _written(s)]
        for t in writes:
            self._keep_before(t)
        out = self.numbers.keep(func, func(*args, **kwargs))
        self._note(func, args, kwargs, None if writes or _looks(out, (args, kwargs)) else out)
        return out

    def kernel(self, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        for t in args:
            if isinstance(t, Tensor):
                self._keep_before(t)
        run(*args, **kwargs)
        self._note(run, args, kwargs, None)

    def _keep_before(self, t: Tensor) -> None:
        key = t.untyped_storage().data_ptr()
        if key not in self.made and key not in self.before and t.numel():
            whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
            self.before[key] = (whole, whole.clone())

    def _note(self, run: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        for t in tree_flatten(out)[0]:
            if isinstance(t, Tensor):
                self.made[t.untyped_storage().data_ptr()] = t
        frozen = tree_map_only(Tensor, self._freeze, (args, kwargs))
        if out is not None or _does_something(run):
            self.calls.append(Call(run, *frozen, out))

    def _freeze(self, t: Tensor) -> Tensor | Outside:
        inside = t.untyped_storage().data_ptr() in self.made or t.numel() == 0
        number = t.dim() == 0 and t.untyped_storage().nbytes() == t.element_size()  # the host's: it goes by value
        return t if inside or number else Outside.of(t)

    def restore(self) -> None:
        for whole, copy in self.before.values():
            whole.copy_(copy)


def _looks(out: Any, given: Any) -> bool:
    """Whether ``out`` is memory that was ``given``."""
    storages = [
        {t.untyped_storage().data_ptr() for t in tree_flatten(x)[0] if isinstance(t, Tensor)} for x in (out, given)
    ]
    return bool(storages[0] & storages[1])


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _does_something(run: Any) -> bool:
    """Not a mere view."""
    schema = getattr(run, "_schema", None)
    return schema is None or any(_written(a) for a in schema.arguments)


def _forbid(name: str, args: Any) -> None:
    if name in WAITS:
        raise NotOnAGraph(f"{name} waits for the device")
    if name in ("index", "index_put", "index_put_"):
        if any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1] if i is not None):
            raise NotOnAGraph("an index by truth values waits for the device")


def _refused(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotOnAGraph(f"{what} looks at memory of the device")

    return refuse


class HostNumbers:
    """Numbers that ``torch.tensor`` made: they are the host's, and may be read."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def __contains__(self, t: Tensor) -> bool:
        return t.data_ptr() in self.kept

    def check(self, func: Any, args: Any) -> None:
        """Refuse an operator that waits for the device."""
        name = func._schema.name.split("::")[1]
        if not (name == "_local_scalar_dense" and args[0] in self):
            _forbid(name, args)

    def keep(self, func: Any, out: Any) -> Any:
        """``out``, remembered if it is such a number."""
        if func._schema.name == "aten::lift_fresh" and out.dim() == 0:
            self.kept[out.data_ptr()] = out
        return out


class Watch(TorchDispatchMode):
    """Forbids waiting while a step is submitted."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = HostNumbers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.numbers.check(func, args)
        return self.numbers.keep(func, func(*args, **(kwargs or {})))

    def reading(self, name: str) -> Any:
        """What stands in place of ``Tensor.<name>``."""
        method = getattr(Tensor, name)

        def read(t: Tensor, *args: Any, **kwargs: Any) -> Any:
            if t not in self.numbers:
                raise NotOnAGraph(f"{name} looks at memory of the device")
            return method(t, *args, **kwargs)

        return mock.patch.object(Tensor, name, read)


@dataclass
class Reached:
    """A mark: reached at once, but not to be waited for while a step is submitted."""

    device: CpuDevice

    def synchronize(self) -> None:
        if self.device.submitting:
            raise NotOnAGraph("submit waits for the device")


class OutOfMemory(RuntimeError):
    """What ``fail_step`` and ``fail_captures`` make happen."""


@dataclass
class Pool:
    """Of graphs. torch refuses a capture into one that had some and has none any more."""

    captures: int = 0
    graphs: WeakSet[Callable[[], None]] = field(default_factory=WeakSet)


class CpuDevice:
    """See the module. ``replays``, ``captures``: how many there were; ``fail_step``: the next allocation of pinned
    memory fails; ``fail_captures``: so many captures do.
    """

    torch = torch.device("cpu")
    reserved, dense = 512 << 20, False

    def __init__(self) -> None:
        self.submitting = False
        self.replays = self.captures = 0
        self.fail_step, self.fail_captures = False, 0
        self._recorder: Recorder | None = None
        self._recorders: list[Recorder] = []

    def working(self) -> Any:
        return nullcontext()

    def watch(self, runner: Any) -> Any:
        """``runner``, whose ``submit`` is not to wait from now on."""
        submit = runner.submit

        def watched(batch: Any) -> Any:
            with self._submitting():
                return submit(batch)

        runner.submit = watched
        return runner

    @contextmanager
    def _submitting(self) -> Iterator[None]:
        with ExitStack() as stack:
            self.submitting = True
            stack.callback(self._done)
            watch = stack.enter_context(Watch())
            stack.enter_context(self._kernels())
            for name in HOST_READS:
                stack.enter_context(watch.reading(name))
            yield

    def _done(self) -> None:
        self.submitting = False

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Triton's kernels run outside of all this, and are recorded while something is captured."""
        from triton.runtime.interpreter import InterpretedFunction

        plain, names = InterpretedFunction.run, {n: getattr(Tensor, n) for n in HOST_READS}

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            def alone(*args: Any, **kwargs: Any) -> None:
                with _disable_current_modes(), ExitStack() as stack:
                    for name, method in names.items():
                        stack.enter_context(mock.patch.object(Tensor, name, method))
                    plain(kernel, *args, **kwargs)

            if self._recorder is not None:
                self._recorder.kernel(alone, args, kwargs)
            else:
                alone(*args, **kwargs)

        with mock.patch.object(InterpretedFunction, "run", run):
            yield

    def pinned(self, size: int) -> tuple[Tensor, np.ndarray]:
        if self._recorder is not None:
            raise NotOnAGraph("memory of the host is asked for while a graph is captured")
        if self.fail_step:
            self.fail_step = False
            raise OutOfMemory("no more")
        raw = np.full(size, 0xA5, np.uint8)
        return torch.from_numpy(raw), raw

    def put(self, arrays: Any) -> dict[str, Tensor]:
        from toolkit.runners.tensor.step import staging

        return staging.put(arrays, self)

    def fetch(self, tensors: Any) -> Any:
        from toolkit.runners.tensor.step import staging

        return staging.fetch(tensors, self)

    def mark(self) -> Reached:
        return Reached(self)

    def pool(self) -> Pool:
        return Pool()

    def capture(self, run: Callable[[], None], pool: Pool | None = None) -> Callable[[], None]:
        pool = pool or Pool()
        if self.fail_captures:
            self.fail_captures -= 1
            raise OutOfMemory("no more")
        if pool.captures and not pool.graphs:
            raise RuntimeError("the graphs of this pool are gone, and it with them")
        recorder = self._recorder = Recorder()
        try:
            apart = nullcontext() if self.submitting else self._kernels()
            with apart, recorder, mock.patch.object(torch, "from_numpy", _refused("from_numpy")):
                run()
        finally:
            self._recorder = None
        recorder.restore()
        self._recorders.append(recorder)
        self.captures += 1

        def replay() -> None:
            self._replay(recorder)

        pool.captures += 1
        pool.graphs.add(replay)
        return replay

    def _replay(self, recorder: Recorder) -> None:
        with _disable_current_modes():
            for other in self._recorders:
                for t in other.made.values():
                    _spoil(t)
            for call in recorder.calls:
                args, kwargs = tree_map_only(Outside, Outside.tensor, (call.args, call.kwargs))
                out = call.run(*args, **kwargs)
                for old, new in zip(tree_flatten(call.out)[0], tree_flatten(out)[0], strict=call.out is not None):
                    if call.out is not None and isinstance(old, Tensor):
                        if old.shape != new.shape or old.dtype != new.dtype:
                            raise NotOnAGraph(
                                f"{call.run}: {tuple(new.shape)} at replay, {tuple(old.shape)} at capture"
                            )
                        old.copy_(new)
        self.replays += 1

    def memory(self) -> tuple[int, int]:
        return 8 << 30, 16 << 30

    def trim(self) -> None:
        self._recorders.clear()

    def trouble(self) -> type[Exception]:
        return OutOfMemory


def _spoil(t: Tensor) -> None:
    whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
    whole.fill_(0x7F)  # floats become huge or no numbers, integers point nowhere


def interpreted_ops(*triton: str, **traits: Any) -> Any:
    """Kernels as a GPU gets them, of Triton in its interpreter: attention, mixtures of experts and the ops named in
    ``triton``, where they take a model of these ``traits``. It is slow, so for the others torch's operators stand in,
    of the implementation that waits for nothing.
    """
    from dataclasses import fields

    from toolkit import kernels
    from toolkit.runners.tensor.ops import Ops

    interpreted = ("paged_attention", "moe_route", "moe_experts", *triton)
    chosen: dict[str, Any] = {}
    gpu = kernels.Target("cuda", "float32", 90, traits)
    for name, op in kernels.load().items():
        plain = ("reference",) if name == "sample" else ("torch", "reference")
        families = ("triton", *plain) if name in interpreted else plain
        there = (op.implementations[f] for f in families if f in op.implementations)
        implementation = next(i for i in there if i.family != "triton" or i.unsupported(gpu) is None)
        chosen[name] = implementation.run_on(gpu)
        if name == "paged_attention":
            chosen["plan_attention"] = implementation.plan
        if name == "lora_shrink":
            chosen["plan_lora"] = implementation.plan
    return Ops(**{f.name: chosen[f.name] for f in fields(Ops)})
