"""On which device each rank is: one of its own, of those that its machine has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.errors import UsageError
from toolkit.parallel.layout import number_of
from toolkit.parallel.links import link_of
from toolkit.runners.choose import gpu_is_likely
from toolkit.runners.tensor.devices.find import find_device, visible


def kind_of_ranks(asked: str) -> str:
    """The type of device that all ranks are on, as torch names it. Raises UsageError for one that is not here, or that
    ranks cannot speak on."""
    if ":" in asked:
        raise UsageError(
            f"device: found {asked!r}, expected {asked.partition(':')[0]}: each rank takes a device of its own; "
            "devices, or CUDA_VISIBLE_DEVICES, says which"
        )
    if asked == "auto" and not gpu_is_likely():
        return "cpu"
    kind = find_device(asked).type
    link_of(kind)
    return kind


def place_of(rank: int, here: int, launched: bool) -> tuple[int, int]:
    """(which of its machine's ranks this is, how many those are). ``launched``: torchrun or Ray has started its
    process, and says both in the environment."""
    return (number_of("LOCAL_RANK", 0), number_of("LOCAL_WORLD_SIZE", 1)) if launched else (rank % here, here)


def own_device(kind: str, devices: Sequence[int], place: tuple[int, int]) -> str:
    """What the rank at ``place`` runs on; ``devices``: numbers of its machine's, a rank each, none: the first. Raises
    UsageError where there are too few."""
    if kind == "cpu":
        return kind
    at, here = place
    count = torch.get_device_module(kind).device_count()
    if devices and (len(devices) != here or len(set(devices)) != here):
        raise UsageError(f"devices: found {list(devices)}, expected {here} different numbers, one for each rank here")
    if devices and (missing := [number for number in devices if number >= count]):
        raise UsageError(f"devices: found {missing[0]}, there are {count} of {kind}, counted from 0{visible(kind)}")
    if here > count:
        raise UsageError(
            f"device {kind}: {here} ranks on this machine need one each, and there are {count}{visible(kind)}; "
            "use fewer ranks, or device cpu"
        )
    return f"{kind}:{devices[at] if devices else at}"
