"""The kernels a model runs with, chosen once for its device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from toolkit import kernels
from toolkit.artifacts.canonical import ChannelInt8, Fp8
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.runners.tensor.devices.find import kernel_target

Kernel = Callable[..., Any]
Pick = Callable[[kernels.Op, kernels.Target], tuple[Kernel | None, Kernel | None]]


@dataclass(frozen=True)
class Ops:
    """Chosen implementations by op. ``plan_…`` is None where the implementation takes no plan."""

    rms_norm: Kernel
    add_rms_norm: Kernel
    rms_norm_quant: Kernel
    add_rms_norm_quant: Kernel
    layer_norm: Kernel
    rope: Kernel
    act: Kernel
    act_and_mul: Kernel
    act_and_mul_quant: Kernel
    embedding: Kernel
    linear: Kernel
    linear_group_int: Kernel
    linear_int8: Kernel
    linear_fp8: Kernel
    matmul_int8: Kernel
    matmul_fp8: Kernel
    linear_block_fp8: Kernel
    linear_fp4: Kernel
    kv_write: Kernel
    rope_kv_write: Kernel
    latent_write: Kernel
    paged_attention: Kernel
    plan_attention: Kernel | None
    causal_conv: Kernel
    state_scan: Kernel
    delta_rule: Kernel
    lora_shrink: Kernel
    lora_expand: Kernel
    plan_lora: Kernel | None
    moe_route: Kernel
    moe_experts: Kernel
    moe_experts_group_int: Kernel
    moe_experts_int8: Kernel
    moe_experts_fp8: Kernel
    moe_experts_block_fp8: Kernel
    moe_experts_fp4: Kernel
    penalize: Kernel
    apply_bitmask: Kernel
    sample: Kernel


_PLANS = {"paged_attention": "plan_attention", "lora_shrink": "plan_lora"}
_PLANS_BY_ROWS = ("lora_shrink",)  # whose tiles go by the rows of a step unless told otherwise
_FLOAT32 = ("penalize", "apply_bitmask", "sample")
_CACHE = ("kv_write", "rope_kv_write", "latent_write", "paged_attention")  # others' bits are those of weights
# Tried at once: every model needs them, or a plan is made for the implementation that was chosen.
_ALWAYS = ("paged_attention", "lora_shrink", *_FLOAT32)


class _Chosen:
    """An op whose implementation is tried before its first call. Most models need few of all ops; trying a kernel on a
    GPU compiles it, which takes seconds."""

    def __init__(self, op: kernels.Op, target: kernels.Target) -> None:
        self._op, self._target = op, target
        self._run: Kernel | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            self._run = kernels.choose(self._op, self._target, trusted=False).run_on(self._target)
        return self._run(*args, **kwargs)


@dataclass(frozen=True)
class _Absent:
    """An op that a model does not need and that nothing here implements as it asks for; ``why``."""

    why: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise kernels.KernelError(self.why)


def not_needed(forms: Collection[type]) -> frozenset[str]:
    """Of the ops that not every GPU has a kernel for those that a model does without whose linears have these forms."""
    rounds = Fp8 in forms or ChannelInt8 in forms
    found = () if rounds else ("rms_norm_quant", "add_rms_norm_quant", "act_and_mul_quant")
    return frozenset(found if Fp8 in forms else (*found, "moe_experts_fp8"))


def choose_ops(device: torch.device, dtype: torch.dtype, without: Collection[str] = (), **traits: Any) -> Ops:
    """Choose every kernel for ``device`` and activations of ``dtype``; ``traits``: see ``ops_by``. ``without``: ops
    that there need be no kernel for.

    On a GPU or the like a kernel that fails its self-test is left out, with a warning; most are tried before their
    first call, which must not be one that a graph captures.

    Raises UsageError where TOOLKIT_KERNELS asks for one that cannot run, with its reason.
    """
    kind, capability = kernel_target(device)

    def pick(op: kernels.Op, target: kernels.Target) -> tuple[Kernel, Kernel | None]:
        at_once = op.name in _ALWAYS
        try:
            found = kernels.choose(op, target, trusted=device.type == "cpu" or not at_once)
        except kernels.KernelError as error:
            if op.name not in without:
                raise
            return _Absent(str(error)), None
        later = device.type != "cpu" and not at_once and found.family not in kernels.registry.TRUSTED
        return _Chosen(op, target) if later else found.run_on(target), found.plan

    try:
        return ops_by(pick, kind, dtype, capability, **traits)
    except kernels.KernelError as error:
        raise UsageError(str(error)) from None


def ops_by(pick: Pick, device: str, dtype: torch.dtype, capability: int | None, **traits: Any) -> Ops:
    """Every kernel by ``pick`` (its run and plan of an op on a target), for a ``device`` of this compute ``capability``
    and activations of ``dtype``.

    ``traits``: head_dim, bits, cache (float8 dtype) and latent (its rows are keys and values at once) of the KV cache,
    codes ("int8" or "fp8": what W8A8 linears round activations to), alike (a row's numbers do not depend on what else a
    step has, of the ops of which there are such kernels).
    """
    name, wanted = str(dtype).removeprefix("torch."), {f.name for f in fields(Ops)}
    chosen: dict[str, Kernel | None] = {}
    for op in kernels.load().values():
        if op.name in wanted:
            left_out = set() if op.name in _CACHE else {"bits"}
            if all(found.alike is None for found in op.implementations.values()):
                left_out.add("alike")
            own = {k: v for k, v in traits.items() if k not in left_out}
            target = kernels.Target(device, "float32" if op.name in _FLOAT32 else name, capability, own)
            chosen[op.name], plan = pick(op, target)
            if op.name in _PLANS:
                by_rows = op.name in _PLANS_BY_ROWS and own.get("alike")
                chosen[_PLANS[op.name]] = partial(plan, alike=True) if plan is not None and by_rows else plan
    return Ops(**chosen)  # type: ignore[arg-type]
