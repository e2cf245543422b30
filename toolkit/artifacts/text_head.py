"""What a folder says of the vectors and scores that are made of a text: its sentence-transformers modules, or the head
of a classifier. In an artifact it is ``text_head.json`` with the layers' numbers beside it."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.json_file import read_json, read_json_object, write_json_object
from toolkit.artifacts.weight_files.safetensors_file import map_arrays, widened
from toolkit.base.record import plain, read
from toolkit.errors import ToolkitError
from toolkit.models.registry import find_family, is_causal, is_mute, text_head
from toolkit.models.spec import HeadActivation, HeadLayer, Pooling, TextHead

if TYPE_CHECKING:
    from toolkit.artifacts.checkpoint import Checkpoint

# Of sentence-transformers: how texts are read, and what is written before them.
TEXTS, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
# What its "chat_template" may say and is no variable of a template: how long rows of ids are.
_SIZES = {"restore_suffix", "padding", "truncation", "max_length", "return_tensors"}
HEAD, NUMBERS, MODULES = "text_head.json", "text_head.safetensors", "modules.json"
# What sentence-transformers keeps in a folder of its own; the first that is there counts.
POOLING_CONFIGS = ("pooling_config.json", "1_Pooling/config.json")
_MODES: dict[str, Pooling] = {
    "cls_token": "cls",
    "cls": "cls",
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
}
_ACTIVATIONS: dict[str, HeadActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_WITHOUT_EFFECT = ("Transformer", "Pooling", "Normalize", "Dropout")
Arrays = dict[str, NDArray[np.float32]]


def find_head(directory: Path, pooling: Pooling | None = None) -> TextHead | None:
    """What the folder says of its vectors or scores; None where it says nothing. ``pooling``: what embeddings are made
    by, whatever the folder says. Raises ToolkitError for what cannot be computed here."""
    if (file := directory / HEAD).is_file():
        try:
            return read(TextHead, read_json_object(file))
        except ValueError as error:
            raise ToolkitError(f"{file}: {error}; convert the model again") from error
    config = directory / "config.json"
    if config.is_file() and (head := text_head(read_json_object(config), str(config))) is not None:
        return head
    layers = tuple(_dense(directory, entry) for entry in _modules(directory, "Dense"))
    pooling = pooling or _pooling(directory)
    return None if pooling is None and not layers else TextHead(pooling or default_pooling(directory), layers)


def default_pooling(directory: Path) -> Pooling:
    """Where a folder says nothing: a reader's first token, a writer's last one."""
    return "cls" if _told(directory)[0] else "last"


def reads_alone(directory: Path) -> bool:
    """Whether the model in the folder writes no texts."""
    return any(_told(directory))


def asks_nobody(directory: Path) -> bool:
    """Whether it cannot answer a question either: it has no head that writes."""
    config = directory / "config.json"
    try:
        values = read_json_object(config)
        return reads_alone(directory) or is_mute(values, find_family(values, str(config)))
    except ToolkitError:
        return False


def _told(directory: Path) -> tuple[bool, bool]:
    """(whether it is an encoder, whether it is a decoder whose tokens see each other both ways)."""
    config = directory / "config.json"
    try:
        values = read_json_object(config)
        return find_family(values, str(config)).encodes, not is_causal(values)
    except ToolkitError:
        return False, False


def chat_options(directory: Path) -> dict[str, Any] | None:
    """What a chat template is told where sentence-transformers puts texts through it; None where it reads them as they
    are. Raises ToolkitError for a template that is not the tokenizer's own."""
    file = directory / TEXTS
    values = read_json_object(file) if file.is_file() else {}
    kinds, kwargs = values.get("modality_config") or {}, values.get("processing_kwargs") or {}
    options = kwargs.get("chat_template") or {} if isinstance(kwargs, dict) else None
    if not isinstance(kinds, dict) or not isinstance(options, dict):
        raise ToolkitError(f"{file}: expected objects as modality_config and processing_kwargs; fetch the model again")
    if "message" not in kinds:
        return None
    if "chat_template" in options:
        raise ToolkitError(
            f"{file}: processing_kwargs names a chat template of its own; write it into chat_template.jinja"
        )
    return {name: value for name, value in options.items() if name not in _SIZES}


def default_prompt(directory: Path) -> str:
    """What sentence-transformers writes before a text where nobody asks for another prompt; "": nothing. Raises
    ToolkitError for one that is not there, and where its tokens are to be left out of the vector."""
    file = directory / PROMPTS
    values = read_json_object(file) if file.is_file() else {}
    name, prompts = values.get("default_prompt_name"), values.get("prompts") or {}
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise ToolkitError(f"{file}: default_prompt_name: {name!r:.40} is none of its prompts; fetch the model again")
    pooling = pooling_config(directory)
    if prompt and pooling is not None and read_json_object(pooling).get("include_prompt") is False:
        raise ToolkitError(f"{pooling}: include_prompt: found false, expected true beside a default prompt")
    return prompt


def longest_text(directory: Path) -> int | None:
    """Tokens of a text, those around it among them, that sentence-transformers reads no further than; None where the
    folder says nothing of it."""
    if not (file := directory / TEXTS).is_file():
        return None
    most = read_json_object(file).get("max_seq_length")
    if most is not None:
        if type(most) is not int or most < 1:
            raise ToolkitError(f"{file}: max_seq_length: expected a whole number of 1 or more, found {most!r:.40}")
        return most
    beside = directory / "tokenizer_config.json"  # where newer ones keep it; 1e30 where nobody said
    length = read_json_object(beside).get("model_max_length") if beside.is_file() else None
    return length if type(length) is int and 0 < length < 1 << 31 else None


def head_numbers(directory: Path, head: TextHead) -> Arrays:
    """The layers' numbers, float32: "0.weight", "0.bias", "1.weight" … Raises ToolkitError where they are missing."""
    if (file := directory / NUMBERS).is_file():
        return {name: np.array(array, np.float32) for name, array in map_arrays(file).items()}
    found: Arrays = {}
    for i, layer in enumerate(head.layers):
        if layer.file:
            arrays = {name: widened(array) for name, array in map_arrays(directory / layer.file).items()}
        else:
            arrays = _of_model(directory, layer)
        names = [n for n in (layer.name, *layer.others) if f"{n}.weight" in arrays]
        if not names:
            raise ToolkitError(
                f"{directory / layer.file}: tensor {layer.name}.weight is missing; fetch the model again"
            )
        for part in ("weight", "bias"):
            if f"{names[0]}.{part}" in arrays:
                found[f"{i}.{part}"] = arrays[f"{names[0]}.{part}"]
    return found


def own_modules(checkpoint: Checkpoint) -> list[str]:
    """Modules among the weights of a classifier that its head is made of, which no spec names."""
    head = None if checkpoint.gguf is not None else text_head(checkpoint.config, f"{checkpoint.path}: config.json")
    layers = head.layers if head is not None else ()
    spelled = (next((n for n in (x.name, *x.others) if f"{n}.weight" in checkpoint), "") for x in layers)
    return [name for name in spelled if name]


def write_head(source: Path, target: Path, *, apart: bool = True) -> list[str]:
    """Write what ``source`` says to an artifact; returns the files' names. What is said by the pooling alone is left to
    its own file; unless ``apart``, layers that the source does not have so to where they are (``own_modules``,
    ``copy_modules``)."""
    head = find_head(source)
    if head is None or not head.layers:
        return []
    if not apart and not (source / HEAD).is_file():
        return []
    from safetensors.numpy import save_file

    save_file(head_numbers(source, head), target / NUMBERS)
    bare = replace(head, layers=tuple(replace(layer, file="", others=()) for layer in head.layers))
    write_json_object(target / HEAD, plain(bare))
    return [HEAD, NUMBERS]


def copy_modules(source: Path, target: Path) -> None:
    """sentence-transformers' modules, which others look for as they were."""
    if not (source / MODULES).is_file():
        return
    shutil.copyfile(source / MODULES, target / MODULES)
    folders = [entry["path"] for kind in (*_WITHOUT_EFFECT, "Dense") for entry in _modules(source, kind)]
    for folder, name in itertools.product(filter(None, folders), ("config.json", "model.safetensors")):
        if (source / folder / name).is_file():
            (target / folder).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / folder / name, target / folder / name)


def pooling_config(directory: Path) -> Path | None:
    """The file of a model's directory that says how its embeddings are pooled, None where there is none."""
    named = [f"{entry['path']}/config.json" for entry in _modules(directory, "Pooling")]
    return next((file for name in (*POOLING_CONFIGS, *named) if (file := directory / name).is_file()), None)


def _pooling(directory: Path) -> Pooling | None:
    file = pooling_config(directory)
    if file is None:
        return None
    values = read_json_object(file)
    told = values.get("pooling_mode")
    modes = [told] if isinstance(told, str) else told if isinstance(told, list) else None
    if modes is None:
        begin = "pooling_mode_"
        modes = [name.removeprefix(begin) for name, on in values.items() if name.startswith(begin) and on is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(map(str, modes)) or "none"
        raise ToolkitError(f"{file}: pooling_mode: expected cls_token, mean_tokens or lasttoken, found {shown:.80}")
    return _MODES[modes[0]]


def _modules(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The entries of ``modules.json`` of this kind."""
    file = directory / MODULES
    entries = read_json(file) if file.is_file() else []
    found = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("type"), str)
            or not isinstance(entry.get("path"), str)
        ):
            raise ToolkitError(f"{file}: expected a list of modules with type and path, found {entry!r:.60}")
        name = entry["type"].rpartition(".")[2]
        if name not in (*_WITHOUT_EFFECT, "Dense"):
            raise ToolkitError(f"{file}: type: found {name:.60}, expected {', '.join((*_WITHOUT_EFFECT, 'Dense'))}")
        if Path(entry["path"]).is_absolute() or ".." in Path(entry["path"]).parts:
            raise ToolkitError(f"{file}: path: expected a folder inside, found {entry['path']!r:.60}")
        if name == kind:
            found.append(entry)
    return found


def _dense(directory: Path, entry: dict[str, Any]) -> HeadLayer:
    folder = directory / entry["path"]
    config = read_json_object(folder / "config.json")
    told = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if told not in _ACTIVATIONS:
        expected = ", ".join(_ACTIVATIONS)
        raise ToolkitError(f"{folder / 'config.json'}: activation_function: found {told:.60}, expected {expected}")
    if not (folder / "model.safetensors").is_file():
        raise ToolkitError(f"{folder}: expected model.safetensors; write the module in that form")
    return HeadLayer("linear", activation=_ACTIVATIONS[told], file=f"{entry['path']}/model.safetensors")


def _of_model(directory: Path, layer: HeadLayer) -> Arrays:
    """A layer's tensors among the weights of a model."""
    from toolkit.artifacts.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(directory)
    names = [f"{name}.{part}" for name in (layer.name, *layer.others) for part in ("weight", "bias")]
    return {name: checkpoint.tensor(name).float().numpy() for name in names if name in checkpoint}
