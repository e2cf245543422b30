"""What an op is, who implements it, and for what: the records that the registry, the tolerances and kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

FAMILIES = ("reference", "torch", "triton", "cuda", "cpu")


class KernelError(Exception):
    """No implementation can run, or the one asked for cannot; the message says why."""


@dataclass(frozen=True)
class Target:
    """What an implementation would run on: device type, name of the activations' dtype, and what the op adds.

    ``capability``: CUDA compute capability as 80, 90 …; ``traits``: facts an op's implementations ask for (head_dim …).
    """

    device: str
    dtype: str
    capability: int | None = None
    traits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Inputs of an op for tests and the self-test. ``make(dtype, device, generator)`` returns its keyword arguments."""

    label: str
    make: Callable[..., dict[str, Any]]
    traits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Implementation:
    """``run`` has the op's signature. ``devices``: types that it runs on, None: any. ``extra(target)`` returns a reason
    why it cannot run there, or None.

    ``plan``: where the op takes a ``plan`` argument, what makes one that all the layers of a step can share.
    ``prepare(*arguments after x, scratch=…, alike=…)``: where weights are better packed once, what makes the op of x
    alone; ``scratch``: a dict shared by all that run one after another. ``alike``: a ``run`` whose numbers for a row
    depend on nothing but the row, whatever rows come with it; None: there is none. A target's trait of that name asks
    for it.
    """

    family: str
    run: Callable[..., Any]
    devices: tuple[str, ...] | None
    dtypes: tuple[str, ...]
    extra: Callable[[Target], str | None] | None = None
    plan: Callable[..., Any] | None = None
    prepare: Callable[..., Any] | None = None
    alike: Callable[..., Any] | None = None

    def run_on(self, target: Target) -> Callable[..., Any]:
        """``run``, or ``alike`` where ``target`` asks for it."""
        return self.alike if self.alike is not None and target.traits.get("alike") else self.run

    def unsupported(self, target: Target) -> str | None:
        """Why this cannot run on ``target``, or None."""
        if self.alike is None and target.traits.get("alike"):
            return "its numbers depend on what else a step has"
        if self.devices is not None and target.device not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {target.device}"
        if target.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {target.dtype}"
        return self.extra(target) if self.extra is not None else None


def on_request(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with its argument ``alike`` set: what ``register`` is given where a kernel's tiles go by the rows."""
    return partial(run, alike=True)


FLOATS = ("float32", "bfloat16", "float16")


@dataclass
class Op:
    """A declared op. Calling it runs the implementation chosen for the first tensor among the arguments.

    ``choose``: which implementation a call runs. ``mutates``: names of the arguments it writes to. ``dtypes``:
    activations it is defined for. ``gate``: labels of the cases that take different paths through a kernel; one that is
    not ``TRUSTED`` must pass these before it is used, or where there are none the first case. ``verdicts``: what
    ``tested`` found, by family, dtype, capability and forms.
    """

    name: str
    reference: Callable[..., Any]
    cases: Callable[[], Iterable[Case]]
    mutates: tuple[str, ...]
    dtypes: tuple[str, ...]
    choose: Callable[[Op, Target], Implementation]
    implementations: dict[str, Implementation] = field(default_factory=dict)
    gate: tuple[str, ...] = ()
    verdicts: dict[tuple[Any, ...], str | None] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = next(a for a in (*args, *kwargs.values()) if hasattr(a, "device"))
        dtype = str(first.dtype).removeprefix("torch.")
        return self.choose(self, Target(first.device.type, dtype)).run(*args, **kwargs)

    def register(
        self,
        family: str,
        *,
        devices: tuple[str, ...] | None = None,
        dtypes: tuple[str, ...] | None = None,
        unsupported: Callable[[Target], str | None] | None = None,
        plan: Callable[..., Any] | None = None,
        prepare: Callable[..., Any] | None = None,
        alike: bool | Callable[[Callable[..., Any]], Callable[..., Any]] = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: the function implements this op for ``family``: one of ``FAMILIES``, or a device's own name.

        ``alike``: that a row's numbers depend on the row alone in any case (True), or do by ``alike(function)``.
        """
        assert family in (*FAMILIES, *(devices or ())) and family not in self.implementations, (self.name, family)

        def add(run: Callable[..., Any]) -> Callable[..., Any]:
            own = alike(run) if callable(alike) else run if alike else None
            found = Implementation(family, run, devices, dtypes or self.dtypes, unsupported, plan, prepare, own)
            self.implementations[family] = found
            return run

        return add
