"""From stored tensors to canonical weights, whatever the format on disk."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.formats import STACK_FORMATS, WeightFormat, format_of
from toolkit.artifacts.formats.gguf_types import BLOCK_TYPES
from toolkit.artifacts.formats.layout import FLOATS, Expected, dense
from toolkit.errors import ToolkitError
from toolkit.models.drafts.mtp import FURTHER
from toolkit.models.registry import find_family, is_causal, part_alone

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight
    from toolkit.models.drafts.mtp import Mtp
    from toolkit.models.spec import Part, StoredTensor

_COUNTED = re.compile(r"\.[0-9]{1,9}(?=\.)")
_HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
_STRAY = ("inv_freq", "masked_bias")  # what old releases of transformers saved beside the weights
_MATRICES = ("linear", "router", "embed", "head")
# How names end of what activations are divided by (AutoAWQ, in a plain MLP) or multiplied by (Model Optimizer).
_SCALED = (".act.scales", ".pre_quant_scale")
CACHE_SCALES = (".k_scale", ".v_scale")  # how names of a float8 KV cache's scales end


def validate_checkpoint(checkpoint: Checkpoint, stored: Iterable[StoredTensor], writes: bool = True) -> None:
    """Check from headers alone that every tensor is there, of the right shape and dtype, that group sizes divide, that
    no layer, expert, head or scale is left over, and that a checkpoint which says that it is quantized is. ``writes``:
    whether the model is asked for a head, by what the user changes in config.json.

    Raises ToolkitError, one line that names file and tensor, what was expected and what was found.
    """
    form = format_of(checkpoint)
    stored = list(stored)
    check_stored(checkpoint, stored)
    _check_left_over(checkpoint, stored)
    if writes and is_causal(checkpoint.config):
        _check_tied(checkpoint, stored)
    _check_activations(checkpoint)
    kv_alone = (checkpoint.quantization or {}).get("config_groups") == {}  # scales of the KV cache, dense weights
    if form is not None and not kv_alone:
        _check_quantized(checkpoint, form, stored)


def check_stored(checkpoint: Checkpoint, stored: Iterable[StoredTensor]) -> None:
    """Check from headers alone that every tensor is there, of the right shape and dtype. Raises ToolkitError."""
    form = format_of(checkpoint)
    for item in stored:
        for want in _expected(checkpoint, form, item):
            _check(checkpoint, want, item.optional)


def check_whole(checkpoint: Checkpoint) -> None:
    """Raise ToolkitError for a model that sees and is read as text alone: a checkpoint without its other part would be
    none that others open."""
    if checkpoint.gguf is None and part_alone(checkpoint.config, find_family(checkpoint.config)) is not None:
        raise ToolkitError(
            f"{checkpoint.path}: what the model sees with is not read here and would be lost; it runs as it is, and "
            "tool convert makes an engine or, with --to gguf, a GGUF file of its language model"
        )


# Of encoders and classifiers: what stands behind the hidden states, and places counted from 0.
_BEHIND = {"pooler", "cls", "classifier", "pre_classifier", "score", "v_head", "position_ids"}
_BEHIND |= {"vocab_transform", "vocab_layer_norm", "vocab_projector"}  # DistilBERT's guesses of words
_BEHIND |= {"discriminator_predictions", "generator_predictions", "generator_lm_head"}  # ELECTRA's


def left_out(checkpoint: Checkpoint, stored: Iterable[StoredTensor], mtp: Mtp | None = None) -> str:
    """One line on tensors that belong to no module of the model or of its layer for multi-token prediction, as those of
    a tower of a model that is read as text: "" where there are none. A tied model's head is none of them: it is a
    copy. Nor are scales of a KV cache, which are looked for by their names."""
    stored = [*stored, *(mtp.stored if mtp is not None else ())]
    modules = {item.name for item in stored} | {"lm_head", "language_model.lm_head", *(mtp.copies if mtp else ())}
    bare = {item.name for item in stored if item.bare}
    counts: Counter[str] = Counter()
    for name in checkpoint.names() if checkpoint.gguf is None else ():
        parts = name.split(".")
        taken = modules.intersection(itertools.accumulate(parts, "{}.{}".format)) or name.rpartition("_")[0] in bare
        head = bool(_BEHIND.intersection(parts)) or parts[0] in ("head", "decoder")
        if not taken and not head and parts[-1] not in _STRAY and not name.endswith(CACHE_SCALES):
            counts[".".join(itertools.takewhile(lambda part: not part.isdigit(), parts[:2]))] += 1
    if not counts:
        return ""
    listed = ", ".join(f"{begin}.… ({count})" for begin, count in counts.most_common(4))
    return f"{checkpoint.path.name}: left out, as nothing here computes them: {counts.total()} tensors, {listed}"


def _check_left_over(checkpoint: Checkpoint, stored: list[StoredTensor]) -> None:
    """A layer or expert that config.json does not count would be dropped, and the rest make another model. Layers that
    predict further tokens (``FURTHER``) are none of the model's; they stand behind its own."""
    further = checkpoint.config.get(FURTHER)
    further = further if isinstance(further, int) else 0
    known = {item.name[: m.end()] for item in stored for m in _COUNTED.finditer(item.name)}
    lists = {name.rpartition(".")[0] for name in known}
    for name in checkpoint.names():
        for m in _COUNTED.finditer(name):
            place = name[: m.end()]
            parent = place.rpartition(".")[0]
            if place not in known and parent in lists:
                count = sum(k.rpartition(".")[0] == parent for k in known)
                if not parent.endswith("experts") and count <= int(place.rpartition(".")[2]) < count + further:
                    continue
                kind = "experts" if parent.endswith("experts") else "layers"
                raise ToolkitError(
                    f"{checkpoint.where(name)}: found tensor {name}, but by config.json expected {count} "
                    f"{kind} in {parent}; config.json and weights disagree"
                )


def _check_tied(checkpoint: Checkpoint, stored: list[StoredTensor]) -> None:
    """Without a head of its own a model uses its embedding; a head in the weights must then be a copy of it.

    A head is what is called so, or has the embedding's shape and stands outside the layers.
    """
    embed = next((f"{item.name}.weight" for item in stored if item.kind == "embed"), None)
    if embed is None or embed not in checkpoint or checkpoint.gguf is not None:
        return
    if any(item.kind == "head" for item in stored):
        return
    theirs = checkpoint.info(embed)
    others = (n for n in checkpoint.names() if n != embed and not _COUNTED.search(n))
    head = next((n for n in others if n in _HEADS or checkpoint.info(n).shape == theirs.shape), None)
    if head is None:
        return
    mine = checkpoint.info(head)
    same = mine.shape == theirs.shape
    if same and mine.dtype == theirs.dtype:  # one that was trained apart differs within any few rows
        same = _start(checkpoint, head) == _start(checkpoint, embed)
    if not same:
        raise ToolkitError(
            f"{checkpoint.where(head)}: tensor {head}: found a head that differs from {embed}, expected none or a "
            "copy, for tie_word_embeddings is true in config.json; set it to false"
        )


def _check_activations(checkpoint: Checkpoint) -> None:
    """Where an MLP has no gate (Falcon, StarCoder2, MPT) AutoAWQ has what stands before its second matrix divided, and
    Model Optimizer's AWQ scales inputs that no norm is before; without that it is another model."""
    name = next((name for name in checkpoint.names() if name.endswith(_SCALED)), None)
    if name is not None:
        raise ToolkitError(
            f"{checkpoint.where(name)}: tensor {name}: found what activations are to be scaled by as the model runs, "
            "which is not computed here; give the unquantized model, which tool lite auto_awq quantizes without"
        )


def _start(checkpoint: Checkpoint, name: str) -> bytes:
    """The first bytes of a tensor."""
    info, most = checkpoint.info(name), 1 << 16
    if info.view is not None or name in checkpoint.splits:
        import torch

        raw = checkpoint.tensor(name).reshape(-1).view(torch.uint8)
        return bytes(raw[:most].numpy().tobytes())
    with checkpoint.files[name].open("rb") as file:
        file.seek(info.start)
        return file.read(min(info.nbytes, most))


def _check_quantized(checkpoint: Checkpoint, form: WeightFormat, stored: list[StoredTensor]) -> None:
    linears = [item for item in stored if item.kind in ("linear", "head")]
    if linears and not any(_is_quantized(checkpoint, form, item) for item in linears):
        raise ToolkitError(
            f"{checkpoint.path / 'config.json'}: quantization_config.quant_method: found {form.METHOD!r}, but every "
            f"linear of the weights is dense ({linears[0].weight_name} …), expected {form.METHOD} tensors; "
            "remove quantization_config, or fetch the quantized weights"
        )


def _expected(checkpoint: Checkpoint, form: WeightFormat | None, item: StoredTensor) -> list[Expected]:
    bias = [Expected(item.bias_name, item.bias_shape, FLOATS)] if item.bias else []
    if form is not None and _is_quantized(checkpoint, form, item):
        try:
            return _tensors_of(checkpoint.quantization or {}, form, item) + bias
        except ToolkitError as error:
            raise ToolkitError(f"{checkpoint.path}: {error}") from None
    return [dense(item.weight_name, item.disk_shape), *bias]


def _tensors_of(quantization: dict[str, Any], form: WeightFormat, item: StoredTensor) -> list[Expected]:
    if not item.stacked:
        return form.expected(quantization, item.name, item.straight)
    return STACK_FORMATS[form.METHOD].expected_stack(quantization, item.name, item.straight, item.transposed)


def _is_quantized(checkpoint: Checkpoint, form: WeightFormat, item: StoredTensor) -> bool:
    stacks = not item.stacked or form.METHOD in STACK_FORMATS
    return item.kind in _MATRICES and stacks and form.is_quantized(checkpoint, item.name)


def _check(checkpoint: Checkpoint, want: Expected, optional: bool) -> None:
    if want.name not in checkpoint:
        if optional or want.optional:
            return
        raise ToolkitError(
            f"{checkpoint.path}: tensor {want.name} is missing, expected {_dtypes(want)} {list(want.shape)}; "
            "fetch or convert the model again, or correct config.json"
        )
    info = checkpoint.info(want.name)
    if info.shape != want.shape and info.shape not in want.also:
        raise ToolkitError(
            f"{checkpoint.where(want.name)}: tensor {want.name}: expected shape {list(want.shape)}, "
            f"found {list(info.shape)}; config.json and weights disagree"
        )
    if info.dtype not in want.dtypes:
        raise ToolkitError(
            f"{checkpoint.where(want.name)}: tensor {want.name}: expected {_dtypes(want)}, found {info.dtype}"
        )


def _dtypes(want: Expected) -> str:
    return " or ".join(want.dtypes)


def load_stored(checkpoint: Checkpoint, item: StoredTensor) -> tuple[Weight | Tensor, Tensor | None]:
    """One stored module, as ``StoredTensor.matrix`` has it: (canonical weight, or the plain flat tensor of a norm or
    vector; flat bias or None).
    """
    from toolkit.artifacts.canonical import Dense

    form = format_of(checkpoint)
    weight: Weight
    if form is not None and _is_quantized(checkpoint, form, item):
        weight = (
            STACK_FORMATS[form.METHOD].read_stack(checkpoint, item.name, item.straight, item.transposed)
            if item.stacked
            else form.read_linear(checkpoint, item.name, item.straight)
        )
        return weight, _bias(checkpoint, item)
    found = checkpoint.tensor(item.weight_name)
    if len(item.matrix) == 1:
        return found.reshape(-1), checkpoint.tensor(item.bias_name).reshape(-1) if item.bias else None
    found = found.reshape(item.shape).transpose(-1, -2) if item.transposed else found
    found = found.reshape(item.matrix).contiguous()
    if item.unit_rows:
        found = (found / found.float().norm(dim=-1, keepdim=True).clamp(min=1e-12)).to(found.dtype)
    return Dense(found), _bias(checkpoint, item)


def load_part(checkpoint: Checkpoint, item: StoredTensor, part: Part) -> Iterator[tuple[str, Weight | Tensor]]:
    """One parameter of a stored module, and its bias, as ``split_parts`` gives them; of a dense stack of experts only
    the matrix is read that it is in."""
    one = replace(item, parts=(part,))
    form = format_of(checkpoint)
    if not item.stacked or (form is not None and _is_quantized(checkpoint, form, item)):
        yield from split_parts(one, *load_stored(checkpoint, item))
        return
    from toolkit.artifacts.canonical import Dense

    size = item.straight[-2]
    start = item.rows_of(part)[0] // size * size
    inside = tuple((r[0] - start, r[1] - start, *r[2:]) for r in part.rows or ())
    matrix = checkpoint.tensor(item.weight_name).reshape(-1, *item.shape[-2:])[start // size]
    bias = checkpoint.tensor(item.bias_name).reshape(-1)[start : start + size] if item.bias else None
    one = replace(item, parts=(replace(part, rows=inside),))
    yield from split_parts(one, Dense(matrix.T if item.transposed else matrix), bias)


def as_stored(item: StoredTensor, value: Tensor, bias: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors of a module by their names on disk: the inverse of ``load_stored``."""
    shaped = value.reshape(item.straight)
    shaped = shaped.transpose(-1, -2).contiguous() if item.transposed else shaped
    yield item.weight_name, shaped.reshape(item.disk_shape)
    if bias is not None:
        yield item.bias_name, bias.reshape(item.bias_shape)


def _bias(checkpoint: Checkpoint, item: StoredTensor) -> Tensor | None:
    name = item.bias_name
    if item.bias:
        return checkpoint.tensor(name).reshape(-1)
    # Some GPTQ exporters store biases of zeros everywhere; one that is not zero would be lost in silence.
    if name in checkpoint and bool(checkpoint.tensor(name).any()):
        raise ToolkitError(
            f"{checkpoint.where(name)}: tensor {name} is there, but by config.json the layer has no bias"
        )
    return None


def split_parts(
    item: StoredTensor, value: Weight | Tensor, bias: Tensor | None = None
) -> Iterator[tuple[str, Weight | Tensor]]:
    """The canonical parameters inside a stored module: ``name`` → weight, ``name.bias`` → tensor.

    A part that is one range of rows is a view, others are copies.
    """
    import torch

    for part in item.parts:
        rows = _rows(part)
        if rows is None:
            taken = value
        elif isinstance(value, torch.Tensor):
            taken = value[rows]
        else:
            taken = value.take_rows(rows)
        yield part.name, taken
        if bias is not None:
            yield f"{part.name}.bias", bias if rows is None else bias[rows]


def _rows(part: Part) -> Tensor | slice | None:
    import torch

    if part.rows is None:
        return None
    if len(part.rows) == 1:
        return slice(*part.rows[0])
    return torch.cat([torch.arange(*rows) for rows in part.rows])


def cache_scale_names(stored: Iterable[StoredTensor]) -> dict[str, str]:
    """How scales of a float8 KV cache would be spelled in a checkpoint, beside a linear of an attention or under it, by
    what they are called in canonical names.
    """
    found: dict[str, str] = {}
    for item in stored:
        if item.kind == "linear":
            for part, end in itertools.product(item.parts, CACHE_SCALES):
                beside = part.name.rpartition(".")[0] + end
                found.setdefault(beside, item.name.rpartition(".")[0] + end)
                found[part.name + end] = item.name + end
    return found


def cache_scales(checkpoint: Checkpoint, stored: Iterable[StoredTensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The scales of a float8 KV cache, which no spec names, float32 and flat: as they are spelled in the checkpoint, or
    where its ``stored`` modules are given by canonical names.
    """
    names = {} if stored is None else {disk: name for name, disk in cache_scale_names(stored).items()}
    for name in checkpoint.names():
        if name.endswith(CACHE_SCALES):
            yield names.get(name, name), checkpoint.tensor(name).float().reshape(-1)


def iter_canonical(checkpoint: Checkpoint, stored: Iterable[StoredTensor]) -> Iterator[tuple[str, Weight | Tensor]]:
    """Canonical parameters one stored module after another, so that memory holds one at a time."""
    for item in stored:
        if item.optional and not is_present(checkpoint, item):
            continue
        value, bias = load_stored(checkpoint, item)
        yield from split_parts(item, value, bias)


def tensor_names(checkpoint: Checkpoint, stored: Iterable[StoredTensor]) -> Iterator[str]:
    """The tensors that ``iter_canonical`` reads, in its order; some need not be there."""
    form = format_of(checkpoint)
    return (want.name for item in stored for want in _expected(checkpoint, form, item))


def is_present(checkpoint: Checkpoint, item: StoredTensor) -> bool:
    """Whether an optional module is in the checkpoint."""
    form = format_of(checkpoint)
    return (form is not None and _is_quantized(checkpoint, form, item)) or item.weight_name in checkpoint


def any_quantized(checkpoint: Checkpoint, stored: Iterable[StoredTensor]) -> bool:
    """Whether a linear or the head is quantized, from headers alone; not so where only the KV cache has scales, nor in
    a GGUF file of float types."""
    form = format_of(checkpoint)
    linears = [item for item in stored if item.kind in ("linear", "head") and is_present(checkpoint, item)]
    if form is None or checkpoint.gguf is None:
        return form is not None and any(_is_quantized(checkpoint, form, item) for item in linears)
    return any(checkpoint.info(item.weight_name).dtype in BLOCK_TYPES for item in linears)


def canonical_weights(checkpoint: Checkpoint, stored: Iterable[StoredTensor]) -> dict[str, Weight | Tensor]:
    """All canonical parameters by name: ``name`` → Weight (linear, embedding, head) or Tensor (norm, vector),
    ``name.bias`` → Tensor. Dense ones are views of the mapped file. Call ``validate_checkpoint`` first.
    """
    return dict(iter_canonical(checkpoint, stored))
