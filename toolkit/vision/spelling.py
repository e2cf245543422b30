"""How a picture is spelled in a prompt, by its model's ``Recipe``."""

from __future__ import annotations

from toolkit.models.eyes.pictures import Picture, Recipe


def spelled(recipe: Recipe, picture: Picture, number: int) -> str:
    """The tokens of a picture, the ``number``-th of its conversation from 0 on, and what stands around them."""
    if recipe.spelled == "plain":
        return recipe.before.replace("{}", str(number + 1)) + recipe.token * picture.tokens + recipe.after
    if recipe.spelled == "scan":
        one = recipe.before + recipe.token * recipe.per_tile + recipe.after
        parts = [one] * (len(picture.pixels) - 1)
        said = f"Here is the original image {one} and here are some crops to help you see better "
        return said + " ".join(parts) if parts else one
    if recipe.spelled == "named":
        tile = recipe.token * recipe.per_tile
        names = [f"TILE_{i}" for i in range(1, len(picture.pixels))]
        return recipe.before + "".join(name + tile for name in (*names, "TILE_GLOBAL")) + recipe.after
    rows, columns = picture.grid
    if recipe.spelled == "slices":
        return _sliced(recipe, rows, columns, f"<image_id>{number}</image_id>" if picture.numbered else "")
    if recipe.spelled == "parted":
        across, below = recipe.inner
        tile = recipe.token * recipe.per_tile
        grid = (across.join([tile] * columns) + below) * rows if rows * columns > 1 else ""
        return recipe.before + grid + recipe.mark + tile + recipe.after
    if recipe.spelled == "lines":
        return recipe.before.join([recipe.token * columns] * rows) + recipe.after
    tile = recipe.token * recipe.per_tile
    lines = [
        "".join(f"{recipe.before}<row_{r + 1}_col_{c + 1}>{tile}" for c in range(columns)) + "\n" for r in range(rows)
    ]
    return "".join(lines) + ("\n" if lines else "") + f"{recipe.before}{recipe.after}{tile}{recipe.before}"


def _sliced(recipe: Recipe, rows: int, columns: int, name: str) -> str:
    tile = recipe.token * recipe.per_tile
    whole, (begin, end) = recipe.before + tile + recipe.after, recipe.inner
    if not rows:
        return name + whole
    lines = "\n".join([(whole if recipe.around else begin + tile + end) * columns] * rows)
    return name + whole + (begin + lines + end if recipe.around else lines)
