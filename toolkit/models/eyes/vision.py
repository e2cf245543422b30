"""How a model sees, as data: the tower that turns pictures into rows, the projector that makes the language model's
input of them. How pictures are prepared for it is in ``pictures.py``.

A family file with ``Family.recipe`` maps ``config.json`` and ``preprocessor_config.json`` to these. Canonical names of
parameters begin with ``vision.``; ``tensors`` lists them all. Every one of them stays as dense as it is stored.
"""

from __future__ import annotations

import math
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later
from toolkit.models.eyes.fine import FineTower, fine_tensors
from toolkit.models.eyes.high import HighTower, high_tensors
from toolkit.models.routed import Routed, routed_tensors

Shapes = dict[str, tuple[int, ...]]
PREFIX = "vision."  # of every canonical name
BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of a linear that is clipped


@dataclass(frozen=True)
class Tower:
    """A vision transformer over the square patches of a picture.

    ``layers``: how many it has, ``taken``: how many are run. ``frames``: a picture counts as so many equal frames.
    ``positions``: "learned" (added), "axial" or "interlaced" (rotary: half of the frequencies turn by the row, half by
    the column; "interlaced" takes them in turn from one list, "axial" gives each axis a list of its own; ``turned``:
    besides learned ones, as "axial", rows and columns counted from 1 and the class token at 0). ``grid``: rows and
    columns of the learned positions; ``stretched``: besides those that turn there are learned ones, resized to the
    picture's patches and added, by lines, the middles of the patches in the corners over one another; ``overlaid``:
    their edges; ``smooth``: by curves, the edges too; ``nearest``: of the learned ones each patch has the one at its
    part of the way across. ``gated``: the MLP has a gate. ``class_token``: one more token stands before the patches; it
    is dropped behind the last layer. ``pre_norm``: norm before the first layer, ``norm_first``: before positions are
    added, ``norm_after``: what a layer adds is normed, not what it reads, ``post_norm``: one behind the last, "stored"
    if it is there and not used. ``scaled``: what a layer adds is weighted by a vector. ``window``: side in patches of
    the windows within which all layers attend but those of ``full``; 0 = none. ``tiles``: a picture is so many tiles at
    most, in one of the ``shapes`` (rows, columns), and each tile attends to all: learned vectors tell where it stands,
    and behind the last norm ``over_all`` more layers follow, what they add weighted by one number; what left the layers
    ``gathered`` stands beside their output, number by number. ``sides``: so many places are learned for columns, and as
    many for rows; of both each patch has its own added. ``patch_norm``: the numbers of a patch are normed before they
    are multiplied. ``by_head``: q and k are normed head by head, all by the same weight, with ``norm_values`` values
    too, by none. ``norm_both``: what a layer adds is normed as well as what it reads. ``scale`` multiplies q·k, 0: 1 /
    √head_dim. ``clipped``: what linears of layers read and give is kept within ``BOUNDS`` that are stored beside each.
    """

    layers: int
    taken: int
    hidden: int
    heads: int
    head_dim: int
    inner: int
    patch: int
    activation: Literal["quick_gelu", "gelu", "gelu_tanh", "silu"]
    norm: Literal["rms", "layer"]
    eps: float
    positions: Literal["learned", "axial", "interlaced"]
    grid: tuple[int, int] = (0, 0)
    theta: float = 10_000.0
    frames: int = 1
    gated: bool = False
    patch_bias: bool = True
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False
    class_token: bool = False
    pre_norm: bool = False
    post_norm: Literal["none", "stored", "used"] = "none"
    scaled: bool = False
    window: int = 0
    full: tuple[int, ...] = ()
    turned: bool = False
    stretched: bool = False
    smooth: bool = False
    norm_first: bool = False
    norm_after: bool = False
    nearest: bool = False
    patch_last: bool = False
    also: tuple[int, ...] = ()
    tiles: int = 0
    shapes: tuple[tuple[int, int], ...] = ()
    over_all: int = 0
    gathered: tuple[int, ...] = ()
    sides: int = later(0)
    by_head: bool = later(False)
    norm_values: bool = later(True)
    overlaid: bool = later(False)
    norm_both: bool = later(False)
    scale: float = later(0.0)
    clipped: bool = later(False)
    patch_norm: bool = later(False)

    @property
    def edges(self) -> bool:
        """Whether the edges of patches lie over one another where places are resized, not their middles."""
        return self.smooth or self.overlaid

    @property
    def outputs(self) -> int:
        """Numbers of a row that leaves it."""
        return self.hidden * (1 + len(self.gathered) + len(self.also))


@dataclass(frozen=True)
class Stage:
    """One step of a projector, from rows to rows.

    "rms", "layer": a norm with ``eps``, ``offset`` added to its weight, without one where it has no name; "linear";
    "matrix": a linear stored [inputs, outputs] under the bare name; "standard": (√inputs · x - bias) · scale; "gated":
    silu(gate_proj(x)) · up_proj(x); "gelu", "gelu_tanh"; "merge": each ``factor`` × ``factor`` rows of the picture's
    grid become one, the numbers of one row after those of another; "merge_turned": so, but column after column;
    "merge_channels": as "merge", each number of a row beside that of its neighbours; "pool": their mean; "lines": the
    rows of all tiles put together, as ``VisionSpec.join`` says; "resample": ``rows`` learned queries attend to all rows
    with ``heads`` heads, keys with the sines of their row and column, norms with ``eps``, behind them a square matrix;
    ``placed``: with learned places instead, those of keys resized by curves and those of queries added too; "beside":
    the linear ``name`` of what the tower ``high`` gives stands before the numbers of each row; "attend": the mean of
    each ``factor`` × ``factor`` rows attends to them with ``heads`` heads; "mine": to each row is added what it finds
    in the cells, of ``rows`` numbers, that the tower ``fine`` gives for its place.
    """

    kind: Literal[
        "rms",
        "layer",
        "linear",
        "matrix",
        "gated",
        "gelu",
        "gelu_tanh",
        "merge",
        "merge_turned",
        "merge_channels",
        "pool",
        "lines",
        "resample",
        "beside",
        "attend",
        "mine",
        "standard",
    ]
    name: str = ""
    inputs: int = 0
    outputs: int = 0
    bias: bool = False
    eps: float = 0.0
    factor: int = 1
    offset: float = 0.0
    rows: int = 0
    heads: int = 0
    placed: bool = False


# How a stage puts [tiles, rows, factor, columns, factor, numbers] in order.
MERGES = {
    "merge": (0, 1, 3, 2, 4, 5),
    "merge_turned": (0, 3, 1, 2, 4, 5),
    "merge_channels": (0, 1, 3, 5, 2, 4),
}


@dataclass(frozen=True)
class Branch:
    """What leaves the tower behind layer ``layer``, and its way to rows."""

    layer: int
    projector: tuple[Stage, ...]


@dataclass(frozen=True)
class VisionSpec:
    """``image_token``: the id whose places in a prompt the rows take, in their order.

    ``join``: the rows of a picture of several tiles are those of the tiles, one after another ("tiles"); or the whole
    picture's, then those of the tiles put together as the picture they make, what pads it cut away, each line ended by
    the vector ``vision.newline`` ("anyres"); ``most_tiles``: above so many tiles (and a little) that picture is shrunk,
    0 = never; or lines of the tiles together and of the whole, all ended by ``vision.newline``, the vector
    ``vision.separator`` between both ("lined"; ``whole_first``: those of the whole before). Where no stage is "lines"
    this comes last. ``ends``: the vectors ``vision.begin`` and ``vision.end`` stand around each picture. ``scale``: all
    that is multiplied by it. ``axes``: a token of a picture has 3 positions, in time, rows and columns. ``shared``:
    those of a picture but the first and the last have one position. ``deep``: more rows of each picture, of which those
    of branch i are added behind layer i of the language model (Meng et al., "DeepStack", 2024); they stand beside the
    others, number after number. ``mutual``: tokens of pictures that stand together see each other, those behind them
    too, but in layers of ``AttentionSpec.strict``; ``most``: so many at most, 0: as many as the tower's grid has.
    ``crossed``: a picture takes one place, and its rows none; cross layers read them for the tokens from there to the
    next picture, of pictures side by side the rows of all. ``high``: a second tower, which reads a larger form of each
    picture, ``fine``: one that does, and that the tokens of the first ask. ``overlap``: tiles share so many tokens
    along each inner side with those beside, ``extra``: vectors of tokens that stand around and between lines.
    ``routed``: linears of the language model that tokens of pictures have otherwise, ``routed_last``: the last one of
    each too. ``language``: the family of the language model inside.
    """

    tower: Tower
    projector: tuple[Stage, ...]
    image_token: int
    join: Literal["tiles", "anyres", "lined"] = "tiles"
    most_tiles: int = 0
    whole_first: bool = True
    ends: bool = False
    scale: float = 1.0
    axes: bool = False
    shared: bool = False
    deep: tuple[Branch, ...] = ()
    mutual: bool = False
    crossed: bool = False
    overlap: int = 0
    extra: int = 0
    high: HighTower | None = None
    fine: FineTower | None = None
    routed: tuple[Routed, ...] = ()
    routed_last: bool = True
    language: str = ""
    most: int = later(0)

    @property
    def together(self) -> int:
        """Tokens that see each other both ways, 0 where none do."""
        if self.most:
            return self.most if self.mutual else 0
        rows, columns = self.tower.grid
        return (rows // self.merge) * (columns // self.merge) if self.mutual else 0

    @property
    def inside(self) -> tuple[Stage, ...]:
        """The stages that read tiles."""
        return self.projector[: self._lines]

    @property
    def behind(self) -> tuple[Stage, ...]:
        """Those that read the rows of a whole picture."""
        return self.projector[self._lines + 1 :]

    @property
    def _lines(self) -> int:
        return next((i for i, stage in enumerate(self.projector) if stage.kind == "lines"), len(self.projector))

    @property
    def merge(self) -> int:
        """Side in patches of what becomes one row."""
        return max((s.factor for s in self.projector), default=1)


def tensors(spec: VisionSpec) -> Shapes:
    """Every parameter by its canonical name, with its shape as the tower works with it."""
    tower = spec.tower
    found: Shapes = {}
    patch = 3 * tower.frames * tower.patch**2
    if tower.patch_norm:
        _norm(found, "vision.patch_norm", tower, patch)
    _linear(found, "vision.patch", patch, tower.hidden, tower.patch_bias)
    if tower.class_token:
        found["vision.class"] = (tower.hidden,)
    if tower.positions == "learned" or tower.stretched:
        found["vision.position"] = (tower.grid[0] * tower.grid[1] + tower.class_token, tower.hidden)
    if tower.sides:
        found["vision.position"] = (2 * tower.sides, tower.hidden)
    if tower.tiles:
        _tiles(found, tower)
    if spec.high is not None:
        found |= high_tensors(spec.high)
    if spec.fine is not None:
        found |= fine_tensors(spec.fine)
    if tower.pre_norm:
        _norm(found, "vision.pre_norm", tower)
    for i in range(tower.layers):
        _layer(found, f"vision.layers.{i}", tower)
    if tower.post_norm != "none":
        _norm(found, "vision.post_norm", tower)
    for stage in (*spec.projector, *(stage for branch in spec.deep for stage in branch.projector)):
        _stage(found, stage)
    if spec.join != "tiles":
        found["vision.newline"] = (_width(spec),)
    if spec.join == "lined":
        found["vision.separator"] = (_width(spec),)
    if spec.overlap:
        found |= {"vision.tokens": (spec.extra, spec.projector[-1].outputs), "vision.pad": (2, tower.outputs)}
    if spec.ends:
        found |= {f"vision.{name}": (spec.projector[-1].outputs,) for name in ("begin", "end")}
    return found | routed_tensors(spec.routed)


def _width(spec: VisionSpec) -> int:
    """Numbers of a row where tiles are put together."""
    width = spec.tower.outputs
    for stage in spec.inside:
        if stage.kind.startswith("merge"):
            width *= stage.factor**2
        elif stage.outputs:
            width = stage.outputs + (width if stage.kind == "beside" else 0)
    return width


def _stage(found: Shapes, stage: Stage) -> None:
    name = stage.name
    if stage.kind in ("linear", "beside"):
        _linear(found, name, stage.inputs, stage.outputs, stage.bias)
    elif stage.kind == "gated":
        for part in ("up_proj", "gate_proj"):
            _linear(found, f"{name}.{part}", stage.inputs, stage.outputs, stage.bias)
    elif stage.kind == "matrix":
        found[name] = (stage.inputs, stage.outputs)
    elif stage.kind == "standard":
        found |= {f"{name}.{part}": (stage.inputs,) for part in ("bias", "scale")}
    elif stage.kind in ("rms", "layer") and name:
        found[f"{name}.weight"] = (stage.inputs,)
        if stage.kind == "layer":
            found[f"{name}.bias"] = (stage.inputs,)
    elif stage.kind == "resample":
        wide = stage.outputs
        found[f"{name}.query"] = (stage.rows, wide)
        if stage.placed:
            found[f"{name}.pos_embed"] = (stage.rows, wide)
        found[f"{name}.kv_proj.weight"] = (wide, stage.inputs)
        for part in ("q", "k", "v", "o"):
            _linear(found, f"{name}.{part}", wide, wide, True)
        for part in ("ln_q", "ln_kv", "ln_post"):
            found |= {f"{name}.{part}.weight": (wide,), f"{name}.{part}.bias": (wide,)}
        found[f"{name}.proj"] = (wide, wide)
    elif stage.kind == "mine":
        for part, width in (("query", stage.inputs), ("aux", stage.rows), ("val", stage.rows)):
            found |= {f"{name}.{part}_norm.{x}": (width,) for x in ("weight", "bias")}
            _linear(found, f"{name}.{part}", width, stage.outputs, True)
    elif stage.kind == "attend":
        for part in ("q", "k", "v", "o"):
            _linear(found, f"{name}.{part}", stage.outputs if part == "o" else stage.inputs, stage.outputs, True)


def _tiles(found: Shapes, tower: Tower) -> None:
    places = tower.grid[0] * tower.grid[1] + tower.class_token
    found["vision.position_gate"] = (1,)
    found["vision.tile_position"] = (len(tower.shapes) + 1, tower.tiles * places * tower.hidden)
    for name in ("vision.tile_before", "vision.tile_after"):
        found[name] = (len(tower.shapes) + 1, tower.tiles * tower.hidden)
        found[f"{name}_gate"] = (1,)
    for i in range(tower.over_all):
        _layer(found, f"vision.over_all.{i}", tower)
        found |= {f"vision.over_all.{i}.gate{k}": (1,) for k in (1, 2)}


def sizes(spec: VisionSpec) -> dict[str, int]:
    """How many numbers each parameter has that the tower cannot do without."""
    unused = "vision.post_norm." if spec.tower.post_norm == "stored" else "-"
    return {name: math.prod(shape) for name, shape in tensors(spec).items() if not name.startswith(unused)}


def _layer(found: Shapes, name: str, tower: Tower) -> None:
    width = tower.heads * tower.head_dim
    _norm(found, f"{name}.norm1", tower)
    for part in ("q", "k", "v"):
        _linear(found, f"{name}.{part}", tower.hidden, width, tower.qkv_bias)
    if tower.qk_norm or tower.by_head:
        size = tower.head_dim if tower.by_head else width
        found |= {f"{name}.{part}_norm.weight": (size,) for part in ("q", "k")}
    _linear(found, f"{name}.o", width, tower.hidden, tower.o_bias)
    _norm(found, f"{name}.norm2", tower)
    mlp = ("gate", "up") if tower.gated else ("up",)
    for part in mlp:
        _linear(found, f"{name}.{part}", tower.hidden, tower.inner, tower.mlp_bias)
    _linear(found, f"{name}.down", tower.inner, tower.hidden, tower.mlp_bias)
    if tower.scaled:
        found |= {f"{name}.scale{k}": (tower.hidden,) for k in (1, 2)}
    for k in (1, 2) if tower.norm_both else ():
        _norm(found, f"{name}.after{k}", tower)
    for part in ("q", "k", "v", "o", *mlp, "down") if tower.clipped else ():
        found |= {f"{name}.{part}_clip.{bound}": (1,) for bound in BOUNDS}


def _linear(found: Shapes, name: str, inputs: int, outputs: int, bias: bool) -> None:
    found[f"{name}.weight"] = (outputs, inputs)
    if bias:
        found[f"{name}.bias"] = (outputs,)


def _norm(found: Shapes, name: str, tower: Tower, size: int = 0) -> None:
    found[f"{name}.weight"] = (size or tower.hidden,)
    if tower.norm == "layer":
        found[f"{name}.bias"] = (size or tower.hidden,)


def patch_numbers(spec: VisionSpec) -> int:
    """Held for each patch at the widest moment of a layer."""
    tower = spec.tower
    inside = max(4 * tower.heads * tower.head_dim, tower.inner * (1 + tower.gated))
    return 3 * tower.frames * tower.patch**2 + 2 * tower.hidden + inside
