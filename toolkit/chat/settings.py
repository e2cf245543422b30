"""How tokens are drawn where nobody says: as the model's own generation_config.json asks, else greedily.

The same for chat, the Python API and the server. Flags, requests and ``/set`` change it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from toolkit.artifacts.json_file import read_json_object
from toolkit.configs.generation import PARAMETERS, TYPED, GenerationConfig
from toolkit.errors import ToolkitError, UsageError

GREEDY = GenerationConfig(temperature=1.0)  # the temperature that holds once sampling is asked for
_OF_MODEL = tuple(p.name for p in PARAMETERS.values() if p.of_model)
_DRAWS = (*(p.name for p in TYPED.values() if p.draws), "seed")
_SWITCH = dict.fromkeys(("true", "on", "yes", "1"), True) | dict.fromkeys(("false", "off", "no", "0"), False)


def of_model(directory: Path) -> GenerationConfig:
    """What the generation_config.json of a model's directory asks for; greedy where there is none. See ``of_file``."""
    file = directory / "generation_config.json"
    return of_file(file) if file.is_file() else GREEDY


def of_file(file: Path) -> GenerationConfig:
    """What a generation_config.json asks for; greedy where it does not say ``do_sample``.

    Numbers it leaves out are transformers' defaults. Raises ToolkitError for values that cannot be.
    """
    data = read_json_object(file)
    given = {name: data[name] for name in _OF_MODEL if data.get(name) is not None}
    if not isinstance(given.get("do_sample", False), bool):
        raise ToolkitError(f"{file}: do_sample: expected true or false, found {given['do_sample']!r}")
    if not given.get("do_sample"):
        given = {name: given[name] for name in given if name == "repetition_penalty"}
    try:
        return dataclasses.replace(GREEDY, **given)
    except UsageError as e:
        raise ToolkitError(f"{file}: {e}") from e


def change(config: GenerationConfig, **values: Any) -> GenerationConfig:
    """A copy with other values, by the names of ``TYPED``; None means unchanged.

    Setting a seed or what changes how tokens are drawn turns sampling on, a temperature of 0 turns it off, unless
    ``do_sample`` itself is given. Raises UsageError for values out of range.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if TYPED[name].type is bool and not isinstance(value, bool):
            raise UsageError(f"{name}: expected true or false, found {value!r:.40}")
    if "do_sample" not in given and any(name in given for name in _DRAWS):
        given["do_sample"] = given.get("temperature", 1.0) != 0
    return dataclasses.replace(config, **{TYPED[name].name: value for name, value in given.items()})


def is_open(config: GenerationConfig) -> bool:
    """Whether nobody has said anything of sampling since ``GREEDY``: a server then does as its own model asks."""
    return all(getattr(config, name) == getattr(GREEDY, name) for name in (*_OF_MODEL, "random_seed"))


def describe(config: GenerationConfig, where_open: str = "greedy") -> str:
    """How tokens are drawn, in a few words; ``where_open``: said where ``is_open``."""
    if is_open(config):
        return where_open
    if config.greedy:
        return "greedy"
    drawn = {p: getattr(config, p.name) for p in PARAMETERS.values() if p.draws and p.name != "temperature"}
    more = [f"{p.name} {value:g}" for p, value in drawn.items() if value != p.neutral]
    return ", ".join([f"temperature {config.temperature:g}", *more])


def parse(name: str, text: str) -> Any:
    """The value that ``/set NAME TEXT`` means. Raises UsageError."""
    name = name.replace("-", "_")
    if name not in TYPED:
        raise UsageError(f"/set: no setting {name!r}; there are {', '.join(TYPED)}")
    kind = TYPED[name].type
    try:
        if kind is bool:
            return _SWITCH[text.lower()]
        if kind is list:
            return [text.encode().decode("unicode_escape").encode("latin-1").decode()] if text else []
        return kind(text)
    except (KeyError, ValueError) as e:
        what = {bool: "true or false", int: "an integer", float: "a number", list: "a text"}[kind]
        raise UsageError(f"/set {name}: expected {what}, found {text!r}") from e


def show(config: GenerationConfig) -> dict[str, Any]:
    """Setting -> value, as ``/set`` alone prints them."""
    return {name: getattr(config, p.name) for name, p in TYPED.items()}
