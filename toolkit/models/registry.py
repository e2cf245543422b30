"""Which family reads which checkpoint: ``architectures`` (or ``model_type``) of ``config.json`` → its file.

Every file of ``families/`` holds one ``FAMILY``. A config names its file by ``model_type``, so that as a rule one file
is imported; only where it does not are all of them looked through. Families come from outside too: from Python files
that the user names, which go before ours, and from installed packages, by entry points.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import importlib.util
import itertools
import os
import pkgutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from toolkit.errors import ToolkitError, UsageError
from toolkit.models import families as folder
from toolkit.models.classifier import classifier_head, reward_head
from toolkit.models.config.fields import Fields, check_dtype, check_token_ids
from toolkit.models.config.rope import LAYER_TYPES
from toolkit.models.decoder import Built
from toolkit.models.encoder import both_ways
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.videos import Video
from toolkit.models.family import Family
from toolkit.models.lacking import LACKING
from toolkit.models.spec import HeadLayer, StoredTensor, TextHead

VARIABLE = "TOOLKIT_CUSTOM_MODULE_MAP"  # of the environment: Python files, one family each, with : between them
# Fields of a config that hold the language model of one that sees.
LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")
REWARD = "ForRewardModel"  # how classes end that say how good an answer is
_SCORING = ("ForSequenceClassification", REWARD)
GROUP = "toolkit.families"  # of entry points: name = "package.module:FAMILY"


class HasConfig(Protocol):
    """What ``load_spec`` needs of a checkpoint."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def generation_config(self) -> dict[str, Any]: ...

    def names(self) -> list[str]: ...

    def info(self, name: str) -> HasShape: ...


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def names() -> list[str]:
    """Of our own families, in alphabetical order; none is imported."""
    return list(_files())


@functools.cache
def _files() -> tuple[str, ...]:
    """What ``names`` says: reading the folder takes a millisecond, which every model that is opened would pay."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folder.__path__)))


def get(name: str) -> Family:
    """The family called so. Raises ToolkitError where there is none: a file of the user's may no longer be named."""
    found = next((family for family in _in_order(name) if family.name == name), None)
    if found is None:
        raise ToolkitError(
            f"model family: found {name!r:.60}, expected one that `tool list models` shows; if it is of your own, name "
            f"its file with --custom-module-map or in {VARIABLE}"
        )
    return found


def families() -> list[Family]:
    """All of them, imported; of several with one name the one that counts."""
    return list({family.name: family for family in reversed(list(_in_order()))}.values())[::-1]


def from_files(paths: Iterable[str]) -> list[Family]:
    """The ``FAMILY`` of each Python file. A file is run, so it must be one that the user named. Raises UsageError."""
    found = []
    for path in paths:
        spec = importlib.util.spec_from_file_location(f"toolkit_family_{Path(path).stem}", path)
        if spec is None or spec.loader is None:
            raise UsageError(f"custom_module_map: found {path}, expected a Python file (.py) that holds a FAMILY")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise UsageError(f"custom_module_map: {path}: {type(error).__name__}: {error}") from error
        found.append(_checked(getattr(module, "FAMILY", None), f"custom_module_map: {path}: FAMILY"))
    return found


def _checked(value: object, where: str) -> Family:
    if isinstance(value, Family):
        return value
    kind = "nothing" if value is None else type(value).__name__
    raise UsageError(f"{where}: found {kind}, expected a toolkit.models.family.Family (docs/add-a-model.md)")


def _in_order(name: str | None = None) -> Iterator[Family]:
    """The families in the order in which they are asked, ours called ``name`` before our others."""
    yield from from_files(path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path)
    own = names()
    for each in sorted(own, key=lambda x: (x != name, x)):
        family: Family = importlib.import_module(f"{folder.__name__}.{each}").FAMILY
        assert family.name == each, each
        yield family
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        where = f"entry point {entry.name} of {entry.dist and entry.dist.name}"
        try:
            found = entry.load()
        except Exception as error:
            told = " ".join(str(error).split())
            raise UsageError(f"{where}: {type(error).__name__}: {told}; mend or remove the package") from error
        yield _checked(found, where)


def find_family(config: dict[str, Any], source: str = "config.json", own: Iterable[Family] = ()) -> Family:
    """The family of a config, of ``own`` before all others. Raises ToolkitError that names those spelled nearly so."""
    model_type, architecture = config.get("model_type"), _architecture(config)
    spelled = {architecture} if isinstance(architecture, str) else set()
    for end in ("TextModel", "Model", "ForSequenceClassification"):  # saved without its head, or with another
        spelled |= {name.removesuffix(end) + "ForCausalLM" for name in spelled if name.endswith(end)}
    rewards = {name.removesuffix(REWARD) + "ForCausalLM" for name in spelled if name.endswith(REWARD)}
    for family in itertools.chain(own, _in_order(model_type if isinstance(model_type, str) else None)):
        asked = spelled if family.reward is None else spelled | rewards
        if asked.intersection(family.architectures) or (not architecture and model_type == family.name):
            other = next((name for sign, name in family.others.items() if config.get(sign)), None)
            if family.blind and not config.get("vision_config"):
                other = family.blind
            return family if other is None else get(other)
    _unknown(config, source, architecture or model_type)


def _architecture(config: dict[str, Any]) -> Any:
    """The first one that a config names, a string in a sound file."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named else named


def _unknown(config: dict[str, Any], source: str, found: object) -> NoReturn:
    if isinstance(found, str) and found in LACKING:
        raise ToolkitError(f"{source}: architectures: {found} needs {LACKING[found]}, which no runner here computes")
    known = [a for family in families() for a in family.architectures]
    near = difflib.get_close_matches(str(found)[:100], known, 3, 0.75) or ["LlamaForCausalLM"]
    shown = f"one that `tool list models` shows, such as {', '.join(near)}"
    own = "one of your own: --custom-module-map FILE (docs/add-a-model.md)"
    Fields(config, source).fail("architectures", found, f"{shown}, or {own}")


def build(config: dict[str, Any], source: str = "config.json", own: Iterable[Family] = ()) -> Built:
    """The spec of a model and the tensors its checkpoint must hold.

    ``config``: a parsed ``config.json``; ``quantization_config`` in it is left to the weight readers. ``source`` is
    named in error messages. ``own``: families of the caller's, asked first. Raises ToolkitError for an unknown
    architecture or a value that cannot be.
    """
    if not isinstance(config, dict):
        raise ToolkitError(f"{source}: found {type(config).__name__}, expected a JSON object")
    family = find_family(config, source, own)
    fields = _fields(_with_head(config, family), source, family)
    spec, stored = family.build(fields)
    if not family.encodes and not is_causal(config):
        spec, stored = both_ways(fields, spec), [x for x in stored if x.kind != "head"]
    check_dtype(fields)
    check_token_ids(fields, spec.vocab_size)
    return replace(spec, family=family.name, mute=is_mute(config, family, source)), stored


def is_mute(config: dict[str, Any], family: Family, source: str = "config.json") -> bool:
    """Whether a decoder has nothing that writes texts: it was trained to score them, or saved without a head that was
    not its embedding."""
    if not without_head(config, family):
        return False
    return str(_architecture(config)).endswith(_SCORING) or not family.build(_fields(config, source, family))[0].tied


def language_part(config: Mapping[str, Any]) -> str | None:
    """The field of a config that holds its language model's, None where that stands at the top."""
    return next((name for name in LANGUAGE_PARTS if isinstance(config.get(name), dict)), None)


def language_fields(config: Any) -> Any:
    """The config of its language model: that part of it, or itself."""
    name = language_part(config)
    return config if name is None else config[name]


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether a decoder's tokens see those before them alone: not those of some models for embeddings (gte-Qwen2,
    EmbeddingGemma), by flags that transformers and vLLM go by too."""
    part = language_fields(config)
    return part.get("is_causal") is not False and part.get("use_bidirectional_attention") is not True


def part_alone(config: dict[str, Any], family: Family) -> str | None:
    """The field of a config that holds the language part of a model that sees, where that part alone is known here."""
    part = language_part(config)
    return part if family.recipe is None else None


def without_head(config: dict[str, Any], family: Family) -> bool:
    """Whether a model was saved without the head that its family has: for embeddings (Qwen3Model, MistralModel), or
    with another that scores."""
    name, ends = _architecture(config), ("Model", *_SCORING)
    bare = isinstance(name, str) and name.endswith(ends) and name not in family.architectures
    return bare and not family.encodes


def _with_head(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """A model that was saved without its head has its embedding for one."""
    return {**config, "tie_word_embeddings": True} if without_head(config, family) else config


def _fields(config: dict[str, Any], source: str, family: Family) -> Fields:
    """What the family is built of."""
    part = part_alone(config, family)
    if part is None:
        return Fields(config, source)
    whole = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return Fields({**whole, **config[part]}, source, f"{part}.")


def build_recipe(config: dict[str, Any], preprocessor: dict[str, Any], source: str, beside: str) -> Recipe | None:
    """How a model has its pictures prepared, by its config.json and preprocessor_config.json, which messages call
    ``source`` and ``beside``; None where it reads text alone, or where its family is one that the user has brought."""
    try:
        family = find_family(config, source)
    except ToolkitError:
        return None
    return None if family.recipe is None else family.recipe(Fields(config, source), Fields(preprocessor, beside))


def build_video(
    config: dict[str, Any], preprocessor: dict[str, Any], recipe: Recipe, source: str, beside: str
) -> Video | None:
    """How a model whose pictures are prepared by ``recipe`` is shown videos, None where it is not. ``preprocessor``:
    video_preprocessor_config.json; else as ``build_recipe``."""
    make = find_family(config, source).video
    return None if make is None else make(Fields(config, source), Fields(preprocessor, beside), recipe)


def text_head(config: dict[str, Any], source: str) -> TextHead | None:
    """What a model has that was trained to score texts behind its hidden states; None for any other model."""
    name = _architecture(config)
    if not (isinstance(name, str) and name.endswith(_SCORING)):
        return None
    family, fields = find_family(config, source), Fields(config, source)
    if name.endswith(REWARD):
        return None if family.reward is None else reward_head(fields, *family.reward)
    if family.classifier is not None:
        return family.classifier(fields)
    if family.encodes:
        return None
    return classifier_head(fields, "last", HeadLayer("score"))


def load_spec(checkpoint: HasConfig, config: dict[str, Any] | None = None, own: Iterable[Family] = ()) -> Built:
    """``build`` for an open checkpoint, of ``config`` instead of its own where given.

    Token ids in its generation_config.json are checked too. A stack of experts or a fused module that the checkpoint
    has as single linears, under their canonical names or as the family spells those, is listed so, and a stack that
    stands the other way round than its family's likewise (transformers 5 writes Qwen3-VL's straight).
    """
    source = f"{checkpoint.path}: config.json"
    names = checkpoint.names()
    config = with_own_head(checkpoint.config if config is None else config, names)
    spec, stored = build(config, source, own)
    check_token_ids(Fields(checkpoint.generation_config, f"{checkpoint.path}: generation_config.json"), spec.vocab_size)
    modules = {name.rpartition(".")[0] for name in names}
    found: list[StoredTensor] = []
    begins = _begins(find_family(config, source, own).spellings, names)
    for item in stored:
        spelled = [(part.name, _respelled(part.name, begins)) for part in item.parts]
        single = [names for names in zip(*spelled, strict=True) if len(item.parts) > 1 and modules.issuperset(names)]
        if single:
            found += [replace(one, name=name) for one, name in zip(item.alone(), single[-1], strict=True)]
        else:
            found.append(replace(item, name=_respelled(item.name, begins)))
    return spec, _as_they_stand(found, checkpoint, frozenset(names))


def _as_they_stand(stored: list[StoredTensor], checkpoint: HasConfig, names: Container[str]) -> list[StoredTensor]:
    """``stored`` with stacks straight where one of them is, which a square one does not tell by itself."""
    turned = [x for x in stored if x.stacked and x.transposed and not x.flat and x.weight_name in names]
    shapes = {x.name: checkpoint.info(x.weight_name).shape for x in turned}
    if not any(shapes[x.name] == x.straight != x.shape for x in turned):
        return stored
    return [replace(x, shape=x.straight, transposed=False) if shapes.get(x.name) == x.straight else x for x in stored]


def with_own_head(config: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Where the whole says that embedding and head are one and its language model that they are not, the weights tell:
    transformers 5 writes its class's default so over Mistral 3's and InternVL's own heads."""
    part = config.get("text_config")
    torn = isinstance(part, dict) and part.get("tie_word_embeddings") is False
    if torn and config.get("tie_word_embeddings") is True and any("lm_head" in name.split(".") for name in names):
        return {**config, "tie_word_embeddings": False}
    return config


def _begins(spellings: Sequence[tuple[str, ...]], names: Sequence[str]) -> dict[str, str]:
    """How names begin that a family spells, and how those of the checkpoint do; of several that fit the longest."""
    chosen = {}
    for ours, *others in spellings:
        longest = sorted((ours, *others), key=len, reverse=True)
        chosen[ours] = next((begin for begin in longest if any(n.startswith(begin) for n in names)), ours)
    return chosen


def _respelled(name: str, begins: Mapping[str, str]) -> str:
    begin = next((begin for begin in begins if name.startswith(begin)), "")
    return begins.get(begin, "") + name.removeprefix(begin)


def apply_overrides(
    config: dict[str, Any], hf_overrides: dict[str, Any] | None = None, rope_scaling_factor: float = 0.0
) -> dict[str, Any]:
    """A copy of ``config`` with the user's changes.

    ``hf_overrides`` replaces fields; objects are merged key by key. ``rope_scaling_factor`` above 0 switches to dynamic
    NTK rope with that factor, of the language model inside where there is one; where layers that slide have their own
    rope, that one stays. Raises UsageError for arguments that cannot be.
    """
    if hf_overrides is not None and not isinstance(hf_overrides, dict):
        raise UsageError(f"hf_overrides: found {type(hf_overrides).__name__}, expected a dict of config fields")
    if isinstance(rope_scaling_factor, bool) or not isinstance(rope_scaling_factor, (int, float)):
        raise UsageError(f"rope_scaling_factor: found {rope_scaling_factor!r:.40}, expected a number")
    if rope_scaling_factor and not 1 <= rope_scaling_factor <= 1e6:
        raise UsageError(f"rope_scaling_factor: found {rope_scaling_factor}, expected 0 (off) or a number from 1 up")
    result = copy.deepcopy(config)
    for key, value in (hf_overrides or {}).items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else copy.deepcopy(value)
    scaling, rope = (hf_overrides or {}).get("rope_scaling"), result.get("rope_parameters")
    if isinstance(scaling, dict) and isinstance(rope, dict) and "rope_scaling" not in config:
        # the config spells it as transformers 5 does: what turns it beside the scaling, as its base, stays
        result.pop("rope_scaling")
        flat = not any(kind in rope for kind in LAYER_TYPES)
        full = rope if flat else rope.get("full_attention") or {}
        kept = {key: full[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section") if key in full}
        made = {**kept, **copy.deepcopy(scaling)}
        result["rope_parameters"] = made if flat else {**rope, "full_attention": made}
    if rope_scaling_factor:
        text = language_fields(result)
        name = "rope_parameters" if text.get("rope_parameters") and not text.get("rope_scaling") else "rope_scaling"
        text[name] = _dynamic(text.get(name), float(rope_scaling_factor))
    return result


def _dynamic(rope: Any, factor: float) -> dict[str, Any]:
    """A config's rope, flat or by layer type, with dynamic scaling in place of what scales it."""
    old = rope if isinstance(rope, dict) else {}
    if any(kind in old for kind in LAYER_TYPES):
        return {**old, "full_attention": _dynamic(old.get("full_attention"), factor)}
    if "proportional" in (old.get("rope_type"), old.get("type")):  # dynamic rope would turn other pairs of numbers
        raise UsageError("rope_scaling_factor: this model turns a part of its frequencies (proportional); leave it out")
    kept = {key: old[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section") if key in old}
    return {**kept, "rope_type": "dynamic", "factor": factor}
