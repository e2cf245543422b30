"""Mamba-2 as the configs of hybrid models state it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.config.fields import Fields
from toolkit.models.spec import ConvSpec, LinearSpec, MambaSpec, NormSpec
from toolkit.models.stored import Fused, joined

_NO_LIMIT = (None, [0, math.inf], [0, {"__float__": "Infinity"}])  # the last as transformers writes it


@dataclass(frozen=True)
class MambaDims:
    """The numbers of all layers."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    bias: bool
    conv_bias: bool
    out_bias: bool

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv(self) -> int:
        return self.inner + 2 * self.groups * self.state_size


def check_unlimited(config: Fields) -> None:
    """Raise ToolkitError for steps that are kept within bounds, as those of no released model are."""
    if (limit := config.values.get("time_step_limit")) not in _NO_LIMIT:
        config.fail("time_step_limit", limit, "none (0 to Infinity)")


def read_mamba(config: Fields, hidden: int, *, inner: int | None = None) -> MambaDims:
    """Under the names that begin with ``mamba_``; ``inner``: numbers of all heads where no expansion states them."""
    heads = config.integer("mamba_n_heads", default=128, high=100_000)
    width = inner or hidden * config.integer("mamba_expand", default=2)
    stated = config.values.get("mamba_d_head")
    head_dim = width // heads if stated in (None, "auto") else config.integer("mamba_d_head", high=65_536)
    if heads * head_dim != width:
        config.fail("mamba_n_heads", heads, f"heads of {head_dim} that are {width} wide in all")
    groups = read_state_groups(config, heads, "mamba_n_groups", default=1)
    bias = config.flag("mamba_proj_bias", False)
    check_unlimited(config)
    return MambaDims(
        heads,
        head_dim,
        groups,
        config.integer("mamba_d_state", default=256, high=65_536),
        config.integer("mamba_d_conv", default=4, low=2, high=64),
        bias,
        config.flag("mamba_conv_bias", True),
        bias,
    )


def read_state_groups(config: Fields, heads: int, *names: str, default: int) -> int:
    """How many groups of heads share b and c."""
    groups: int = config.integer(*names, default=default, high=heads)
    if heads % groups:
        config.fail(names[0], groups, f"a divisor of the {heads} heads")
    return groups


def mamba_layers(dims: MambaDims, hidden: int, norm: float | None, **more: Any) -> Callable[[str], MambaSpec]:
    """What makes a layer's mixer by its prefix. ``norm``: the eps of its norm, None: it has none; ``more``: further
    fields."""

    def mixer(prefix: str) -> MambaSpec:
        return MambaSpec(
            z=LinearSpec(f"{prefix}.z_proj", hidden, dims.inner, dims.bias, "column"),
            inner=LinearSpec(f"{prefix}.x_proj", hidden, dims.conv, dims.bias, "column"),
            dt=LinearSpec(f"{prefix}.dt_proj", hidden, dims.heads, dims.bias, "column"),
            conv=ConvSpec(
                f"{prefix}.conv1d.weight", f"{prefix}.conv1d.bias" if dims.conv_bias else None, dims.conv, dims.kernel
            ),
            a_log=f"{prefix}.A_log",
            dt_bias=f"{prefix}.dt_bias",
            skip=f"{prefix}.D",
            norm=None if norm is None else NormSpec(f"{prefix}.norm", dims.inner, norm),
            out=LinearSpec(f"{prefix}.out_proj", dims.inner, hidden, dims.out_bias, "row"),
            heads=dims.heads,
            head_dim=dims.head_dim,
            groups=dims.groups,
            state_size=dims.state_size,
            **more,
        )

    return mixer


def fused_entry(dims: MambaDims, prefix: str) -> Fused:
    """The rows of z, then of what is convolved, then of dt, in ``in_proj``."""
    sizes = {"z_proj": dims.inner, "x_proj": dims.conv, "dt_proj": dims.heads}
    return joined(f"{prefix}.in_proj", {f"{prefix}.{name}": size for name, size in sizes.items()})
