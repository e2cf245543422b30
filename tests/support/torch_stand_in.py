"""A device "acme" for torch, in the manner of an NPU's extension: importing this module registers it.

Its memory is the host's, and every op is computed by the CPU. It is as strict as hardware: an op that finds a tensor of
the CPU beside one of its own fails, and what is on it comes to numpy by a copy alone; ``to_host`` has the shapes of all
that has. There is one such device, or as many as ``ACME_DEVICES`` says.
"""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

MEMORY = 6 << 30
to_host: list[tuple[int, ...]] = []


class Held(Tensor):
    """A tensor on the device ``number``; ``raw``: its memory, which views share."""

    raw: Tensor
    number: int

    @staticmethod
    def __new__(cls, raw: Tensor, number: int = 0) -> Held:
        made: Held = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("acme", number),
        )
        made.raw, made.number = raw, number
        return made

    def tolist(self) -> Any:
        """By a copy; torch refuses it for tensors that are made in Python."""
        to_host.append(tuple(self.shape))
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, *args, **(kwargs or {}))


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """``op`` on the host's memory; what it makes is on the device."""
    name = op.name()
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        made = op.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    if name == "aten::_to_copy":
        moved = op(_raw(args[0]), *args[1:], **{**kwargs, "device": "cpu"})
        where = kwargs.get("device") or args[0].device
        if where.type == "acme":
            return Held(moved, where.index or 0)
        to_host.append(tuple(moved.shape))
        return moved
    if name == "aten::copy_":
        if isinstance(args[1], Held) and not isinstance(args[0], Held):
            to_host.append(tuple(args[1].shape))
        op(*map(_raw, args), **kwargs)
        return args[0]
    leaves, shape = tree.tree_flatten((args, kwargs))
    own = {id(x.raw): x for x in leaves if isinstance(x, Held)}
    if any(isinstance(x, Tensor) and not isinstance(x, Held) and x.dim() for x in leaves):
        raise RuntimeError(f"{name}: expected all tensors to be on one device, found acme:0 and cpu")
    asked = kwargs.get("device")
    numbers = {x.number for x in own.values()} | ({asked.index or 0} if asked is not None else set())
    if len(numbers) > 1:
        raise RuntimeError(f"{name}: expected all tensors to be on one device, found {sorted(numbers)} of acme")
    number = min(numbers, default=0)
    host_args, host_kwargs = tree.tree_unflatten([_raw(x) for x in leaves], shape)
    made = op(*host_args, **host_kwargs)
    return tree.tree_map_only(Tensor, lambda raw: own[id(raw)] if id(raw) in own else Held(raw, number), made)


def _raw(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.raw if isinstance(value, Held) else value


_setup_privateuseone_for_python_backend(
    "acme",
    SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        device_count=lambda: int(os.environ.get("ACME_DEVICES", "1")),
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        mem_get_info=lambda device=None: (device << 30 if device else MEMORY // 2, MEMORY),  # they are not alike
    ),
)
_every, _aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_every.fallback(run, "PrivateUse1")  # for what makes tensors of none
for made_by in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.copy_.default):
    _aten.impl(made_by.name(), partial(run, made_by), "PrivateUse1")  # torch.tensor() asks for these by name
