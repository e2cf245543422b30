"""How the model in a directory has its pictures prepared."""

from __future__ import annotations

from pathlib import Path

from toolkit.artifacts.json_file import read_json_object
from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.registry import find_family
from toolkit.models.vision import Recipe


def open_recipe(directory: Path) -> Recipe | None:
    """By the model's family and its own preprocessor config; None where it reads text alone."""
    path = directory / "config.json"
    if not path.is_file():
        return None
    config = read_json_object(path)
    try:
        family = find_family(config, str(path))
    except ToolkitError:  # one that the user has brought along
        return None
    if family.recipe is None:
        return None
    name, values = "preprocessor_config.json", {}
    if (directory / name).is_file():
        values = read_json_object(directory / name)
    elif (directory / (name := "processor_config.json")).is_file():
        inner = read_json_object(directory / name).get("image_processor")
        values = inner if isinstance(inner, dict) else {}
    return family.recipe(Fields(config, str(path)), Fields(values, str(directory / name)))
