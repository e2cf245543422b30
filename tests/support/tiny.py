"""Tiny random checkpoints of every family, made with transformers: the stand-ins for real models in tests.

Test modules cannot import this file (``tests`` is no package); ``tests/conftest.py`` loads it and offers

* ``tiny_models(family, **overrides) -> Path``: a checkpoint directory, cached for the session, never to be modified;
  ``tiny_models.twin(family, **overrides)``: the same weights as transformers knows them, most often the same directory;
* ``tiny_checkpoint(family, path, **overrides) -> Path``: a fresh one under ``path``, yours to break.

``family``: a name in the registry, whose file has the config (``toolkit.models.family.Tiny``). ``overrides``: config
fields of the transformers class, and

* ``shape`` (int, 0): which of the family's tiny models;
* ``seed`` (int, 0): of the weights; ``dtype`` ("float32"): as stored;
* ``tokenizer`` (bool, True): a byte-level BPE tokenizer with ChatML template goes along (needs vocab_size >= 320);
* ``max_shard_size`` (str): to get a sharded checkpoint.

Weights are far larger than a model's initial ones, so that logits differ clearly and mistakes show. A family without a
class in transformers is made from its twin's weights (``Family.twin``).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from toolkit.models.eyes.vision import PREFIX
from toolkit.models.family import Family, Tiny
from toolkit.models.lacking import TRIED
from toolkit.models.registry import LANGUAGE_PARTS, build, get
from toolkit.models.tiny import SIZES

_TEXT = (
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times. "
    "All happy families are alike; every unhappy family is unhappy in its own way. Call me Ishmael."
)

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_checkpoint(family: str, path: Path, **overrides: Any) -> Path:
    """Write a tiny checkpoint of ``family`` to the directory ``path`` and return it."""
    return _make(family, path, overrides)[0]


def _make(family: str, path: Path, overrides: dict[str, Any]) -> tuple[Path, Path]:
    """The checkpoint at ``path``, and its twin beside it or itself."""
    known, overrides = get(family), dict(overrides)
    tiny = known.tiny[overrides.pop("shape", 0)]
    if known.recipe is not None:
        return path, _write_seeing(known, tiny, path, overrides)
    if known.encodes:
        return path, _write_encoder(known, tiny, path, overrides)
    if known.twin is None:
        _write(known.name, path, {**SIZES, **tiny.fields}, overrides)
        return path, path
    twin = path.with_name(f"{path.name}-as-{known.twin}")
    overrides.pop("max_shard_size", None)
    _write(known.twin, twin, {**SIZES, **(tiny.twin or {})}, overrides)
    changes = {key: value for key, value in overrides.items() if key in SIZES}
    respell(twin, known, {**SIZES, **tiny.fields, **changes}, path)
    return path, twin


def _write(
    model_type: str, path: Path, fields: dict[str, Any], overrides: dict[str, Any], tokens: tuple[str, ...] = ()
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if tokens else AutoModelForCausalLM
    _write_as(kind, model_type, path, {**fields, **overrides}, tokens)


def _write_as(kind: Any, model_type: str, path: Path, settings: dict[str, Any], tokens: tuple[str, ...] = ()) -> None:
    """A model of one of transformers' classes by task."""
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    if model_type not in CONFIG_MAPPING and Version(__version__) < Version(TRIED):
        pytest.skip(f"transformers {__version__} has no {model_type} yet")
    assert model_type in CONFIG_MAPPING, (
        f"{model_type}: transformers has no such class, its family no twin: docs/add-a-model.md"
    )
    seed, dtype = settings.pop("seed", 0), settings.pop("dtype", "float32")
    tokenizer = settings.pop("tokenizer", True)
    shard = {"max_shard_size": settings.pop("max_shard_size")} if "max_shard_size" in settings else {}
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):  # a test sees the same numbers whether or not a model was made before
        model = kind.from_config(config).eval()
    _randomize(model, torch.Generator().manual_seed(seed))
    model = model.to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, **shard)
    if tokenizer:
        _tokenizer(settings.get("text_config", settings), tokens).save_pretrained(path)


def _write_encoder(family: Family, tiny: Tiny, path: Path, overrides: dict[str, Any]) -> Path:
    """One that reads texts alone; with ``labels`` so many, one that scores them."""
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification

    if family.name not in CONFIG_MAPPING:
        return _write_unknown(family, tiny, path, overrides)
    labels = overrides.pop("labels", None)
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    settings = {**sizes, **tiny.fields, **overrides}
    if labels is None:
        _write_as(AutoModel, family.name, path, settings)
    else:
        _write_as(AutoModelForSequenceClassification, family.name, path, {**settings, "num_labels": labels})
    return path


def _write_seeing(family: Family, tiny: Tiny, path: Path, overrides: dict[str, Any]) -> Path:
    """One that sees, and its twin: overrides are for its language model, and the files of its processor go along."""
    from transformers import CONFIG_MAPPING

    if (family.twin is None and family.name not in CONFIG_MAPPING) or (family.twin is not None and tiny.twin is None):
        return _write_unknown(family, tiny, path, overrides)
    twin = path if family.twin is None else path.with_name(f"{path.name}-as-{family.twin}")
    changes = {k: overrides.pop(k) for k in SIZES if k in overrides}
    whole = dict((tiny.fields if family.twin is None else tiny.twin) or {})
    whole["text_config"] = {**SIZES, **whole.get("text_config", {}), **changes}
    _write(whole.pop("model_type", family.twin or family.name), twin, whole, overrides, tiny.tokens)
    config = json.loads((twin / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[name] = SIZES[name]
    (twin / "config.json").write_text(json.dumps(config, indent=2))
    if family.twin is not None:
        fields = dict(tiny.fields)
        inner = next((name for name in LANGUAGE_PARTS if name in fields), None)
        if inner is None:
            fields = {**SIZES, **fields, **changes}
        else:
            fields[inner] = {**SIZES, **fields[inner], **changes}
        respell(twin, family, fields, path)
    (path / "preprocessor_config.json").write_text(json.dumps(dict(tiny.preprocessor)))
    return twin


def _write_unknown(family: Family, tiny: Tiny, path: Path, overrides: dict[str, Any]) -> Path:
    """One that transformers has no class for: random tensors by the names that the family gives them."""
    import torch
    from safetensors.torch import save_file

    seed, dtype = overrides.pop("seed", 0), overrides.pop("dtype", "float32")
    fields = {**SIZES, **tiny.fields}
    inner = next((name for name in LANGUAGE_PARTS if name in fields), None)
    if inner is not None:
        fields = {**tiny.fields, inner: {**SIZES, **fields[inner]}}
    config = {**fields, "architectures": [family.architectures[0]], "model_type": family.name, "torch_dtype": dtype}
    config |= overrides
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for item in build(config)[1]:
        for name, shape in ((item.weight_name, item.disk_shape), (item.bias_name, item.bias_shape)):
            if name == item.weight_name or item.bias:
                numbers = _numbers(f"{item.parts[0].name}.{name.rpartition('.')[2]}", item.kind, shape, generator)
                tensors[name] = numbers.to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "preprocessor_config.json").write_text(json.dumps(dict(tiny.preprocessor)))
    _tokenizer(fields if inner is None else fields[inner], tiny.tokens).save_pretrained(path)
    return path


def _numbers(name: str, kind: str, shape: tuple[int, ...], generator: Any) -> Any:
    """Those of one tensor, drawn as ``_randomize`` does."""
    import torch

    noise = torch.randn(shape, generator=generator)
    if name.endswith(".bias"):
        return 0.3 * noise
    if kind == "norm" or "norm" in name or ".ln_" in name:
        return 1 + 0.2 * noise
    return 0.5 * noise if kind == "embed" or len(shape) == 1 else noise * 1.2 / shape[-1] ** 0.5


def respell(twin: Path, family: Family, fields: dict[str, Any], path: Path) -> None:
    """Write the checkpoint ``twin``, whose tensors have canonical names, as ``family`` spells and joins them."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(twin, path, dirs_exist_ok=True)  # after an attempt that failed
    old = json.loads((twin / "config.json").read_text())
    config = {
        **fields,
        "architectures": [family.architectures[0]],
        "model_type": family.name,
        "torch_dtype": old["dtype"],
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    weights = _canonical(twin)
    if family.name == "deepseek":  # has no gate before its shared expert: its twin's always gives sigmoid(0)
        for name in weights:
            weights[name] *= 0.0 if name.endswith("shared_expert_gate.weight") else 1.0
        save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
        for name in weights:
            weights[name] *= 0.5 if name.endswith("shared_expert.down_proj.weight") else 1.0
    tensors: dict[str, torch.Tensor] = {}
    modules = build(config)[1]
    if any(item.unit_rows for item in modules):  # as its twin must have them
        head = weights["lm_head.weight"]
        weights["lm_head.weight"] = head / head.norm(dim=-1, keepdim=True)
        save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
        weights["lm_head.weight"] = head
    for item in modules:
        if item.kind == "vision":
            if item.parts[0].name in weights:
                whole = torch.cat([weights[part.name].flatten() for part in item.parts])
                tensors[item.name] = whole.reshape(item.shape)
            continue
        for suffix in ("weight", "bias") if item.bias else ("weight",):
            stored = torch.empty(
                item.shape if suffix == "weight" else item.shape[:1], dtype=getattr(torch, old["dtype"])
            )
            for part in item.parts:
                given, rows = weights[f"{part.name}.{suffix}"], item.rows_of(part)
                wanted = (len(rows), *stored.shape[1:])
                differ = f"{part.name}.{suffix} is {tuple(given.shape)} in the twin, {wanted} in the family"
                assert given.shape == wanted, f"{differ}: Tiny's twin must say the sizes that its fields say"
                stored[rows] = given
            tensors[f"{item.name}.{suffix}"] = stored
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _canonical(path: Path) -> dict[str, Any]:
    """The tensors of a dense checkpoint by canonical names with ``.weight`` or ``.bias``."""
    import torch

    from toolkit.artifacts.checkpoint import open_checkpoint
    from toolkit.artifacts.weights import canonical_weights
    from toolkit.models.registry import load_spec

    checkpoint = open_checkpoint(path)
    found: dict[str, Any] = {}
    for name, value in canonical_weights(checkpoint, load_spec(checkpoint)[1]).items():
        tensor = value if isinstance(value, torch.Tensor) else value.weight
        whole = name.endswith(".bias") or name.startswith(PREFIX)
        found[name if whole else f"{name}.weight"] = tensor.clone().contiguous()
    return found


class TinyModels:
    """Session-wide cache of tiny checkpoints: ``models(family, **overrides) -> Path``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[str, tuple[Path, Path]] = {}

    def __call__(self, family: str, **overrides: Any) -> Path:
        return self._both(family, overrides)[0]

    def twin(self, family: str, **overrides: Any) -> Path:
        """The same weights as a checkpoint that transformers opens."""
        return self._both(family, overrides)[1]

    def _both(self, family: str, overrides: dict[str, Any]) -> tuple[Path, Path]:
        key = json.dumps([family, overrides], sort_keys=True)
        if key not in self.made:
            self.made[key] = _make(family, self.root / f"{family}-{len(self.made)}", overrides)
        return self.made[key]


def _randomize(model: Any, generator: Any) -> None:
    """Norms near their neutral value, biases and matrices with a spread that keeps activations of order one."""
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            module = name.split(".")[-2].lower()
            if "norm" in module or module.endswith("_ln") or module.startswith("patch_ln"):
                p.copy_(p.mean() + 0.2 * noise)  # 1, or 0 where the model adds the 1
            elif name.endswith("bias"):
                p.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise * 1.2 / p.shape[-1] ** 0.5)
        for name, b in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                b.copy_(0.3 * torch.randn(b.shape, generator=generator))
            if name.endswith(("std_bias", "std_scale")):
                b.copy_(1 + 0.5 * torch.randn(b.shape, generator=generator))
            if name.endswith(("put_min", "put_max")):  # some numbers are beyond
                b.copy_((0.5 + torch.rand(b.shape, generator=generator)) * (-1 if name.endswith("min") else 1))


def _tokenizer(settings: dict[str, Any], tokens: tuple[str, ...] = ()) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=min(SIZES["vocab_size"], settings["vocab_size"]),
        special_tokens=[AddedToken(t, special=True) for t in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator([_TEXT], trainer)
    assert tok.get_vocab_size() <= settings["vocab_size"], "vocab_size is too small for the tiny tokenizer"
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=_CHATML,
        model_max_length=settings["max_position_embeddings"],
    )


def copy_of(model: Path, path: Path) -> Path:
    """A private copy of a cached checkpoint, to be modified."""
    shutil.copytree(model, path)
    return path


def broken_copy(model: Path, path: Path) -> Path:
    """A copy whose weights are numbers, and whose logits are none."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy_of(model, path) / "model.safetensors")
    tensors["model.norm.weight"][:] = 3e38
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def wordy_copy(model: Path, path: Path, word: str) -> Path:
    """A copy whose tokenizer has one token more than the model, ``word``."""
    file = copy_of(model, path) / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
    data["added_tokens"].append({"id": len(data["model"]["vocab"]), "content": word, **flags})
    file.write_text(json.dumps(data), encoding="utf-8")
    return path
