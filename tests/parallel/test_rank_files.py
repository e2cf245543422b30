"""Artifacts that are packed for ranks: each maps its own file and gives the bits of one process; others are told."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.engine.artifact import ENGINE_ARRAYS, ENGINE_JSON, rank_file
from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.inspect import inspect
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError
from toolkit.parallel.choose import open_ranks
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.native_runner import NativeRanks
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import changes_of, open_model, open_runner
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.native.share import Parts, Share

PROMPT = np.random.default_rng(3).integers(3, 300, 45).tolist()
OPTIONS = RunnerOptions(dtype="float32", block_size=16, device="cpu", threads=1)


@pytest.fixture
def packed(tiny_models: Any, tmp_path: Path) -> Any:
    """``packed(family, tp, options…)``: an artifact."""

    def make(family: str, tp: int, **fields: Any) -> Path:
        path = tmp_path / f"{family}-{tp}"
        convert(str(tiny_models(family)), path, Packing(target="cpu", tp=tp, **fields))
        return path

    return make


# heads that ranks share; experts, and a shared one; latent rows; more ranks than tiles; and adapters
@pytest.mark.parametrize(("family", "ranks", "fields", "targets", "config"), [
    ("llama", 2, {"load_format": "int4"}, None, {}),
    ("llama", 2, {"load_format": "int4"}, "[qkvo]_proj|down_proj", {}),
    ("llama", 2, {"load_format": "int4"}, "[qkvo]_proj|down_proj", {"use_dora": True}),
    ("qwen2_moe", 2, {}, None, {}),
    ("deepseek_v2", 2, {"load_format": "int8"}, None, {}),
    ("deepseek_v2", 2, {"load_format": "int8"}, "kv_b_proj|o_proj", {}),
    ("deepseek_v2", 2, {}, "kv_b_proj", {"use_dora": True}),
    ("mamba2", 3, {}, None, {}),
])  # fmt: skip
def test_ranks_with_files_give_the_bits_of_one_process(
    family: str, ranks: int, fields: Any, targets: str | None, config: Any,
    packed: Any, tiny_models: Any, support: Any, tmp_path: Path,
) -> None:  # fmt: skip
    steps, memory = support("steps"), os.memfd_create("ranks")
    options, use = OPTIONS, {}
    if targets is not None:
        made = support("adapters").write_adapter(tmp_path / "a", tiny_models(family), targets, **config)
        options, use = replace(OPTIONS, adapters=(("a", str(made)),)), {"adapter": np.array([0], np.int32)}
    runner, _ = open_runner(packed(family, 1, **fields), backend="turbomind", options=options)
    path = packed(family, ranks, **fields)
    opened = [open_model(path, rank=(rank, ranks)) for rank in range(ranks)]
    together = support("native_together").Together(
        [
            NativeRunner(model.spec, model.weights, options, None, Share(rank, ranks, memory), changes_of(model))
            for rank, model in enumerate(opened)
        ]
    )
    one, several = steps.Driver(runner), steps.Driver(together)
    a, b = one.add(), several.add()
    for start, stop in ((0, 20), (20, 22), (22, 45)):
        expected, found = (d.step({n: PROMPT[start:stop]}, "all", **use) for d, n in ((one, a), (several, b)))
        assert found.logits.tobytes() == expected.logits.tobytes()
        assert found.hidden.tobytes() == expected.hidden.tobytes()
    together.close()
    runner.close()
    os.close(memory)


def test_a_rank_has_its_own_file_and_needs_no_other(packed: Any) -> None:
    path, whole = packed("llama", 2), packed("llama", 1)
    assert not (path / ENGINE_ARRAYS).exists()
    sizes = [(path / rank_file(rank, 2)).stat().st_size for rank in range(2)]
    assert sizes[1] < sizes[0] < (whole / ENGINE_ARRAYS).stat().st_size
    for rank in range(2):
        opened = open_model(path, rank=(rank, 2))
        weights, share = opened.weights(), Share(rank, 2)
        parts = Parts(opened.spec, open_model(whole).weights(), share)
        for name, tensor in open_model(whole).weights().items():
            whole_here = rank == 0 and name == opened.spec.head  # a draft head borrows it
            tiles, size = None if whole_here else parts.tiles.get(name), tensor.meta.tile_bytes
            own = tensor.data if tiles is None else tensor.data[tiles.first * size : tiles.last * size]
            assert weights[name].data.tobytes() == own.tobytes()
    (path / rank_file(1, 2)).unlink()
    open_model(path, rank=(0, 2))
    with pytest.raises(ToolkitError, match=r"rank-1-of-2\.safetensors"):
        open_model(path, rank=(1, 2))


def test_what_reads_pictures_is_in_the_first_file(packed: Any) -> None:
    path = packed("qwen2_vl", 2)
    first, second = (open_model(path, rank=(rank, 2)).weights() for rank in range(2))
    assert set(second) < set(first) and any(name.startswith("vision.") for name in first)


def test_another_number_of_ranks_is_told_what_to_do(packed: Any) -> None:
    path = packed("llama", 2)
    with pytest.raises(UsageError, match=r"packed in files for --tp 2, found --tp 3; give --tp 2"):
        open_ranks(Model(str(path), OPTIONS, {}), Layout(tp=3), None)
    with pytest.raises(UsageError, match=r"start it with --tp 2"):
        open_runner(path, backend=None, options=OPTIONS)
    with pytest.raises(UsageError, match=r"start it with --tp 2"):
        open_ranks(Model(str(path), OPTIONS, {}), Layout(pp=2), "pytorch")
    assert ("ranks", "2, a file each") in [(name, told.partition(" (")[0]) for name, told in inspect(path).facts]


def test_files_that_were_changed_are_told(packed: Any) -> None:
    path = packed("llama", 2)
    file, other = path / rank_file(1, 2), path / rank_file(0, 2)
    kept = file.read_bytes()
    file.write_bytes(other.read_bytes())
    with pytest.raises(ToolkitError, match=r"rank-1-of-2\.safetensors: "):
        open_model(path, rank=(1, 2))
    file.write_bytes(kept[:-4096])
    with pytest.raises(ToolkitError, match=r"rank-1-of-2\.safetensors: "):
        open_model(path, rank=(1, 2))
    file.write_bytes(kept)
    told = json.loads((path / ENGINE_JSON).read_text())
    told["ranks"][1] = {name: [first, end + 1] for name, (first, end) in told["ranks"][1].items()}
    (path / ENGINE_JSON).write_text(json.dumps(told))
    with pytest.raises(ToolkitError, match="was changed"):
        open_engine(path, (1, 2))


def test_what_cannot_be_cut_is_refused(tiny_models: Any, tmp_path: Path) -> None:
    for family, options, told in (
        ("falcon", Packing(target="cpu", tp=3), r"--tp 3: layer 0: 2 heads are fewer than 3 ranks; up to 2 would do"),
        ("llama", Packing(target="torch", tp=2), r"--tp: files of ranks are for target cpu, this is torch"),
        ("llama", Packing(tp=0), r"--tp: expected a number of ranks from 1 up, found 0"),
    ):
        with pytest.raises(UsageError, match=told):
            convert(str(tiny_models(family)), tmp_path / "new", options)
    assert not list(tmp_path.iterdir())


def test_processes_whose_weights_come_and_go(packed: Any, support: Any) -> None:
    several = NativeRanks(Model(str(packed("llama", 2)), OPTIONS, {}), 2)
    with closing(several):
        found = []
        driver = support("steps").Driver(several)
        for _ in range(2):
            found.append(driver.step({driver.add(): PROMPT}, "all").logits.tobytes())
            several.release_weights()
            driver = support("steps").Driver(several)
        assert found[0] == found[1]
