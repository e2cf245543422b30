"""EAGLE heads (the first of the name) on disk: one Llama layer that makes of a token's embedding and the model's hidden
state before it the next hidden state; embedding and head are the model's.

Two forms are read: that of their authors, ``fc`` and ``layers.0`` without ``input_layernorm``, with a Llama's config,
and that of speculators (``speculators_model_type`` "eagle"), ``fusion_fc`` and ``transformer``.

Source: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024); vLLM's
``EagleLlamaForCausalLM`` for what the layer reads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.drafts.checked import of_path
from toolkit.artifacts.drafts.draft_head import layer_config
from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.weights import check_stored
from toolkit.errors import ToolkitError
from toolkit.models.drafts.mtp import Mtp
from toolkit.models.drafts.of_model import check_size, with_head
from toolkit.models.registry import build
from toolkit.models.spec import DecoderSpec, LayerSpec, LinearSpec, MtpSpec, NormSpec, Part, StoredTensor

# What joins, and the layer; a checkpoint that has an embedding and no head is opened as one below "model."
_FORMS = tuple(
    (f"{at}{join}", f"{at}{begin}")
    for at in ("", "model.")
    for join, begin in (("fc", "layers.0"), ("fusion_fc", "transformer"))
)


def is_eagle(path: Path) -> bool:
    """Whether a directory's config says that it is such a head; the authors' does not."""
    try:
        return read_json_object(path / "config.json").get("speculators_model_type") == "eagle"
    except ToolkitError:
        return False


def open_eagle(path: Path, model: DecoderSpec) -> tuple[Checkpoint, Mtp]:
    """The head in a directory, for a model. Raises ToolkitError, one line that names file and field or tensor, for one
    that is none or of a kind that is not known; UsageError for one of another model."""
    checkpoint = open_checkpoint(path)
    file, config = path / "config.json", checkpoint.config
    form = next((form for form in _FORMS if f"{form[0]}.weight" in checkpoint), None)
    if form is None:
        raise ToolkitError(f"{path}: expected an EAGLE head with a tensor fc.weight or fusion_fc.weight, found none")
    inner = layer_config(config, file, ("llama",))
    if config.get("layernorms"):
        raise ToolkitError(f"{file}: layernorms: expected false, found true; use an EAGLE-3 head")
    as_model: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        **{name: value for name, value in inner.items() if name not in ("architectures", "auto_map")},
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    spec, stored = build(as_model, str(file))
    with of_path(path):
        check_size(spec.hidden_size, spec.vocab_size, model)
    mtp = _described(form, spec, stored, model, bias=f"{form[0]}.bias" in checkpoint)
    check_stored(checkpoint, mtp.stored)
    return checkpoint, mtp


def _described(
    form: tuple[str, str], spec: DecoderSpec, stored: list[StoredTensor], model: DecoderSpec, *, bias: bool
) -> Mtp:
    join, begin = form
    h, ours = model.hidden_size, "model.layers.0."
    attention, mlp = spec.layers[0].sublayers
    assert attention.pre_norm is not None
    layers = (LayerSpec((replace(attention, pre_norm=None), mlp)),)
    last = NormSpec("norm", h, spec.final_norm.eps, weight=False)  # see MtpSpec.bare
    layer = with_head(replace(spec, layers=layers, final_norm=last), model)
    own = [
        replace(item, name=f"{begin}.{item.name.removeprefix(ours)}")
        for item in stored
        if item.name.startswith(ours) and item.parts[0].name != attention.pre_norm.name
    ]
    own.append(StoredTensor(join, "linear", (h, 2 * h), (Part(join),), bias))
    return Mtp(MtpSpec(layer, model.final_norm, None, None, LinearSpec(join, 2 * h, h, bias), bare=True), own)
