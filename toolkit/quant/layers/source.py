"""A checkpoint seen layer by layer: weights are read, and made dense, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, Weight
from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.formats.gguf_types import BLOCK_TYPES
from toolkit.artifacts.formats.gguf_types import METHOD as GGUF
from toolkit.artifacts.weights import check_whole, is_present, iter_canonical, load_part, validate_checkpoint
from toolkit.errors import ToolkitError
from toolkit.models.registry import load_spec
from toolkit.models.sites import layer_sites, modules
from toolkit.models.spec import DecoderSpec, LayerSpec, LinearSpec, StoredTensor
from toolkit.quant.layers.along import Along, along
from toolkit.quant.layers.forward import Added, Given, added_by, all_finite, embed
from toolkit.quant.layers.heap import give_back
from toolkit.quant.layers.lazy import KEEP, Lazy

GAPS = 64 << 20  # bytes that a process may grow by while weights are read, before it gives back what it does not use


class LayerSource:
    """An unquantized checkpoint, opened and validated. ``stored[i]``: the modules of layer i; ``outer``: the others, of
    which layers share ``shared``. ``rows``: of pictures in the text that goes through it, see ``embed``."""

    def __init__(self, path: Path) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(path)
        self.spec: DecoderSpec
        self.spec, stored = load_spec(self.checkpoint)
        self.rows: Tensor | None = None
        _refuse_quantized(self.checkpoint, stored)
        validate_checkpoint(self.checkpoint, stored)
        check_whole(self.checkpoint)
        layers = enumerate(self.spec.layers)
        layer_of = {name: i for i, x in layers for name in (*(m.name for m in x.linears()), *x.vectors())}
        self.stored: list[list[StoredTensor]] = [[] for _ in self.spec.layers]
        self.outer: list[StoredTensor] = []
        for item in stored:
            place = layer_of.get(item.parts[0].name)
            (self.outer if place is None else self.stored[place]).append(item)
        common = self.spec.common()
        self.shared = [item for item in self.outer if item.parts[0].name in common]

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def present(self) -> list[StoredTensor]:
        """The modules that the checkpoint has, those outside of layers first."""
        items = chain(self.outer, *self.stored)
        return [x for x in items if not x.optional or is_present(self.checkpoint, x)]

    def check_tokens(self, ids: Tensor) -> None:
        """Raise ToolkitError for ids that the model does not know."""
        if (last := int(ids.max())) >= self.spec.vocab_size:
            raise ToolkitError(
                f"{self.path}: the tokenizer gives token id {last}, but the model has {self.spec.vocab_size} tokens; "
                "tokenizer and weights disagree"
            )

    def quantizable(self) -> list[LinearSpec]:
        """Every linear that may be quantized: all inside the layers but routers and shared-expert gates."""
        return [x for layer in self.spec.layers for site in layer_sites(layer) for x in site.linears]

    def layer(self, index: int, device: torch.device) -> Mapping[str, Tensor]:
        """Layer ``index`` as float32 tensors by canonical name (``X``, ``X.bias``), each read when it is asked for."""
        places = {
            name: (item, part)
            for item in (*self.stored[index], *self.shared)
            if not item.optional or is_present(self.checkpoint, item)
            for part in item.parts
            for name in ((part.name, f"{part.name}.bias") if item.bias else (part.name,))
        }

        def read(name: str) -> Tensor:
            found = dict(load_part(self.checkpoint, *places[name]))[name]
            value = plain(found).to(device).to(torch.float32).contiguous()
            self.checkpoint.release()
            give_back(beyond=GAPS)  # experts are read one after another, and leave gaps where they were
            return value

        return Lazy(places, read, KEEP)

    def outer_weights(self, device: torch.device) -> dict[str, Tensor]:
        """Embedding, final norm and head in the type that they are stored in; a tied head is the embedding's tensor."""
        apart = None if self.spec.per_layer is None else self.spec.per_layer.embed  # the largest of all: see given
        found = dict(self._dense([x for x in self.outer if x.parts[0].name != apart], device))
        self.checkpoint.release()
        if self.spec.tied:
            found[self.spec.head] = found[self.spec.embed]
        return found

    @cached_property
    def added(self) -> Added | None:
        """See ``forward.added_by``."""
        encoder = self.spec.encoder
        if encoder is None:
            return None
        names = {encoder.positions, encoder.types, None if encoder.norm is None else encoder.norm.name}
        mine = [item for item in self.outer if item.parts[0].name in names]
        return added_by(self.spec, dict(self._dense(mine, torch.device("cpu"))))

    @cached_property
    def given(self) -> Given | None:
        """What layers are given of tokens; rows of the table are read when they are asked for."""
        table = self.spec.per_layer
        if table is None:
            return None
        names = {table.projection.name, table.norm.name}
        own = dict(self._dense([x for x in self.outer if x.parts[0].name in names], torch.device("cpu")))
        stored = next(x for x in self.outer if x.parts[0].name == table.embed)

        def rows(token_ids: Tensor) -> Tensor:
            found = self.checkpoint.tensor(stored.weight_name)[token_ids.cpu()]
            self.checkpoint.release()
            return found

        return Given(table, rows, own)

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """See ``forward.embed``; ``table``: the embedding."""
        return embed(self.spec, table, token_ids, self.rows, self.added, self.given)

    def along(self, index: int) -> Along | None:
        """See there."""
        return along(self.spec, index)

    def check_finite(self) -> None:
        """Raise ToolkitError that names file and tensor for the first NaN or infinity among the weights."""
        for item in self.present:
            for name in (item.weight_name, item.bias_name):
                if name in self.checkpoint and not all_finite(self.checkpoint.tensor(name)):
                    raise ToolkitError(
                        f"{self.checkpoint.where(name)}: tensor {name} holds NaN or infinity; nothing can be "
                        "calibrated through it: fetch or train the model again"
                    )
            self.checkpoint.release()

    def _dense(self, items: list[StoredTensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, value in iter_canonical(self.checkpoint, items):
            yield name, plain(value).to(device)


def plain(value: Weight | Tensor) -> Tensor:
    """The numbers of a stored module, in the type that they are stored in where they are floats."""
    match value:
        case Tensor():
            return value
        case Dense():
            return value.weight  # not widened: an embedding can be the largest thing in memory
        case _:
            return value.dequantize()


def _refuse_quantized(checkpoint: Checkpoint, stored: list[StoredTensor]) -> None:
    method = (checkpoint.quantization or {}).get("quant_method")
    if method == GGUF:
        names = (x.weight_name for x in stored if x.kind == "linear")
        kind = next((t for n in names if n in checkpoint and (t := checkpoint.info(n).dtype) in BLOCK_TYPES), None)
        method = f"gguf {kind}" if kind else None
    if method is not None:
        raise ToolkitError(
            f"{checkpoint.path}: already quantized ({method}); give the unquantized model that it was made from"
        )


def module_bytes(layer: LayerSpec) -> int:
    """Bytes of the largest attention block, MLP or expert of a layer in float32."""
    return max(_bytes(block) for block in modules(layer.linears()))


def linear_bytes(layer: LayerSpec) -> int:
    """Bytes of all linears of a layer in float32."""
    return _bytes(layer.linears())


def _bytes(linears: Iterable[LinearSpec]) -> int:
    return sum(4 * x.in_features * x.out_features for x in linears)
