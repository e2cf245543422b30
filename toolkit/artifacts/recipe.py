"""How the model in a directory has its pictures and videos prepared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.artifacts.json_file import read_json_object
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.registry import build_recipe, build_video


def open_recipe(directory: Path) -> Recipe | None:
    """By the model's family and its own preprocessor config; None where it reads text alone."""
    path = directory / "config.json"
    if not path.is_file():
        return None
    name, values = _processor(directory, "preprocessor_config.json", "image_processor")
    beside, shown = _processor(directory, "video_preprocessor_config.json", "video_processor")
    config = read_json_object(path)
    recipe = build_recipe(config, values, str(path), str(directory / name))
    if recipe is None:
        return None
    return replace(recipe, video=build_video(config, shown, recipe, str(path), str(directory / beside)))


def _processor(directory: Path, name: str, part: str) -> tuple[str, dict[str, Any]]:
    """(the file's name, its object): a part of the whole processor's, else one of its own. Transformers 5 looks for
    them in this order, and where it has saved a processor the older file may still lie beside."""
    if (directory / (whole := "processor_config.json")).is_file():
        inner = read_json_object(directory / whole).get(part)
        if isinstance(inner, dict):
            return whole, inner
    return name, read_json_object(directory / name) if (directory / name).is_file() else {}
