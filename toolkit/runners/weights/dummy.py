"""Weights of a model's shapes that nobody trained: random, finite, made where they are used (``--load-format dummy``).

They are for measuring speed and memory of a model that was not fetched: its directory needs config.json alone (and a
tokenizer, where text goes in or out). Each tensor's seed is its name's checksum, so a model is the same at every load.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Dense, Fp8, GroupInt, Weight
from toolkit.artifacts.json_file import read_json_object
from toolkit.base.named import Named
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import DecoderSpec, StoredTensor
from toolkit.runners.weights.dummy_scheme import head_settings, settings_of

DTYPES = ("float32", "float16", "bfloat16")  # of dense weights; a config that names another gets bfloat16


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model directory without weights. Raises ToolkitError or UsageError, one line."""
    if not path.is_dir() or not (path / "config.json").is_file():
        raise UsageError(f"{path}: expected a directory with config.json, which is all that is read of it")
    return read_json_object(path / "config.json")


class DummyWeights(Named[Weight | Tensor]):
    """Canonical weights of ``spec`` by name, made anew at every look-up on ``device``.

    ``config``: config.json, for the dtype of dense weights and ``quantization_config``, which ``check_quantization``
    has found good; what it leaves out, routers and the embedding are dense, and so is the head unless ``lm_head`` is
    true. ``stored``: the tensors of a checkpoint, whose names quantization_config may use.
    """

    def __init__(
        self, spec: DecoderSpec, stored: Sequence[StoredTensor], config: Mapping[str, Any], device: torch.device
    ) -> None:
        self._device, self._model = device, (spec, stored, config)
        self._outlines: DummyWeights | None = None
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        self._dtype: torch.dtype = getattr(torch, name if name in DTYPES else "bfloat16")
        self._quantization: dict[str, Any] = config.get("quantization_config") or {}
        self._make: dict[str, Callable[[str], Weight | Tensor]] = {}
        super().__init__(self._make)
        self._list(spec, {part.name: item.name for item in stored for part in item.parts})

    def _list(self, spec: DecoderSpec, stored: Mapping[str, str]) -> None:
        routers = spec.routers()
        for x in spec.linears():
            names = (x.name, stored.get(x.name, x.name))
            settings = None if x.name in routers else settings_of(self._quantization, names)
            self._add(x.name, self._linear, (x.out_features, x.in_features), settings)
        for name, size in spec.vectors().items():
            self._add(name, self._vector, (size,))
        for norm in spec.norms():
            self._add(norm.name, self._ones, (norm.heads * norm.size,), 1.0 - norm.weight_offset)
        for name, shape in {spec.embed: (spec.vocab_size, spec.hidden_size), **spec.tables()}.items():
            self._add(name, self._dense, shape)
        of_head = head_settings(self._quantization, spec.head)
        if not spec.tied or of_head is not None:
            self._add(spec.head, self._linear, (spec.head_size, spec.hidden_size), of_head)

    def _add(self, name: str, make: Callable[..., Weight | Tensor], *arguments: Any) -> None:
        self._make[name] = lambda name: make(name, *arguments)

    def __getitem__(self, name: str) -> Weight | Tensor:
        return self._make[name](name)

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` without memory."""
        if self._outlines is None:
            self._outlines = DummyWeights(*self._model, torch.device("meta"))
        return self._outlines[name]

    # -- tensors

    def _generator(self, name: str) -> torch.Generator | None:
        if self._device.type == "meta":
            return None
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))

    def _normal(self, name: str, shape: tuple[int, ...], deviation: float, dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=self._device)
        # without memory there is nothing to draw, and torch would load its compiler to say so
        return x if x.is_meta else x.normal_(0.0, deviation, generator=self._generator(name))

    def _integers(self, name: str, shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, dtype=dtype, device=self._device, generator=self._generator(name))

    def _vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._normal(name, shape, 0.02, self._dtype)

    def _ones(self, name: str, shape: tuple[int, ...], value: float) -> Tensor:
        return torch.full(shape, value, dtype=self._dtype, device=self._device)

    def _dense(self, name: str, shape: tuple[int, int]) -> Weight:
        return Dense(self._normal(name, shape, shape[1] ** -0.5, self._dtype))

    def _linear(self, name: str, shape: tuple[int, int], settings: Mapping[str, Any] | None) -> Weight:
        method = None if settings is None else settings.get("quant_method")
        if settings is None or method is None:
            return self._dense(name, shape)
        if method in ("awq", "gptq"):
            return self._groups(name, shape, settings)
        return self._float8(name, shape, settings) if method == "fp8" else self._int8(name, shape)

    def _groups(self, name: str, shape: tuple[int, int], settings: Mapping[str, Any]) -> Weight:
        bits = int(settings.get("bits", settings.get("w_bit", 4)))
        size = int(settings.get("group_size", settings.get("q_group_size", 128)))
        size = shape[1] if size == -1 else size
        if shape[1] % size:
            raise ToolkitError(f"{name}: quantization_config.group_size: {size} does not divide {shape[1]} inputs")
        groups = (shape[0], shape[1] // size)
        codes = self._integers(name, shape, 1, 1 << bits, torch.uint8)  # as many below the zero as above, or sums drift
        deviation = shape[1] ** -0.5 / (((1 << bits) - 1) * 0.29)  # of codes spread evenly
        scales = torch.full(groups, deviation, dtype=torch.float16, device=self._device)
        zeros = torch.full(groups, 1 << (bits - 1), dtype=torch.uint8, device=self._device)
        return GroupInt(codes, scales, zeros, bits, size)

    def _float8(self, name: str, shape: tuple[int, int], settings: Mapping[str, Any]) -> Weight:
        weight = self._normal(name, shape, 1.0, torch.bfloat16).to(torch.float8_e4m3fn)
        block = settings.get("weight_block_size")
        tiles = (shape[0],) if block is None else (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        scales = torch.full(tiles, shape[1] ** -0.5, dtype=torch.float32, device=self._device)
        return Fp8(weight, scales) if block is None else BlockFp8(weight, scales, tuple(block))

    def _int8(self, name: str, shape: tuple[int, int]) -> Weight:
        scales = torch.full(shape[:1], shape[1] ** -0.5 / 73, dtype=torch.float32, device=self._device)
        return ChannelInt8(self._integers(name, shape, -127, 128, torch.int8), scales)
