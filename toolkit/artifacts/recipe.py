"""How the model in a directory has its pictures prepared."""

from __future__ import annotations

from pathlib import Path

from toolkit.artifacts.json_file import read_json_object
from toolkit.models.pictures import Recipe
from toolkit.models.registry import build_recipe


def open_recipe(directory: Path) -> Recipe | None:
    """By the model's family and its own preprocessor config; None where it reads text alone."""
    path = directory / "config.json"
    if not path.is_file():
        return None
    name, values = "preprocessor_config.json", {}
    if (directory / name).is_file():
        values = read_json_object(directory / name)
    elif (directory / (name := "processor_config.json")).is_file():
        inner = read_json_object(directory / name).get("image_processor")
        values = inner if isinstance(inner, dict) else {}
    return build_recipe(read_json_object(path), values, str(path), str(directory / name))
