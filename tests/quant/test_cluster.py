"""``tool lite --ray``: what workers make is byte for byte what one process makes, and who cannot be spread says so."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import toolkit.base.ray
from tests.support.ray_processes import named
from tests.support.refused import refusing
from toolkit.errors import ToolkitError, UsageError
from toolkit.quant.calibrate import calibrate
from toolkit.quant.lite import auto_awq, auto_gptq, blocked_fp8, mxfp4, search, smooth_quant
from toolkit.quant.methods.kv import kv
from toolkit.quant.options import Common, Search

TOOL = [sys.executable, "-c", "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"]
refused = refusing(UsageError)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (auto_awq, "lite auto_awq"),
        (auto_gptq, "lite auto_gptq"),
        (smooth_quant, "lite smooth_quant"),
        (lambda *args, common: search(*args, Search(bits=4.5), common=common), "lite search"),
        (kv, "lite kv"),
    ],
)
def test_layers_that_need_one_another_are_not_spread(
    method: Callable[..., Any], name: str, tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolkit.base.ray, "why_no_ray", lambda: None)
    told = refused(lambda: method(str(tiny_models("llama")), tmp_path / "out", common=Common(ray=2)))
    assert told == (
        f"--ray: {name} takes what each layer gives to the next; expected calibrate, blocked_fp8, mxfp4, or auto_awq, "
        "auto_gptq or smooth_quant with --calibration DIR"
    )


def test_a_machine_without_the_native_library(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which trellis codes need; here it is looked for before anything else, there it is met."""
    from toolkit.quant import cluster
    from toolkit.runners.native import library

    def made(*given: Any) -> Any:
        library.load(tmp_path / "native.so")

    monkeypatch.setattr(cluster, "saved_state", made)
    place: Any = SimpleNamespace(open=lambda: None)
    told = refused(lambda: cluster._quantize(place, None, 0), ToolkitError)  # type: ignore[arg-type]
    assert told.startswith(f"--ray: on {socket.gethostname()}: {tmp_path / 'native.so'}: cannot open")


def test_options_of_workers_without_any(tiny_models: Any, tmp_path: Path) -> None:
    told = refused(lambda: mxfp4(str(tiny_models("llama")), tmp_path / "out", common=Common(ray_address="auto")))
    assert told == "--ray-address: only with --ray, the number of workers"


@pytest.mark.parametrize("changed", ["gone", "other"])
def test_a_machine_with_other_files(changed: str, tiny_models: Any, tmp_path: Path, copied: Any) -> None:
    from toolkit.quant.cluster import Place
    from toolkit.quant.layers.source import LayerSource

    model = copied(tiny_models("llama"))
    place = Place.of(LayerSource(model))
    config = model / "config.json"
    if changed == "gone":
        model.rename(tmp_path / "elsewhere")
    else:
        config.write_text(config.read_text() + "\n")
    with pytest.raises(ToolkitError) as told:
        place.open()
    expected = "with --ray each machine needs it at the same path" if changed == "gone" else "copy it anew"
    assert str(told.value).startswith(f"{model}: ") and str(told.value).endswith(expected)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    import shutil

    return lambda model: Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture
def common(tmp_path: Path) -> Common:
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return Common(calib_dataset=str(text), calib_samples=7, calib_seqlen=48, eval_tokens=300, batch_size=2)


def content(path: Path) -> dict[str, Any]:
    """Every file's digest; of the manifest all but when it was made."""
    found: dict[str, Any] = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in path.iterdir()}
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["created"]
    return found | {"manifest.json": manifest}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_what_workers_make_is_what_one_process_makes(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    pytest.importorskip("ray")
    model = str(tiny_models("qwen3_moe"))
    for folder, on in (("here", common), ("there", replace(common, ray=2))):
        calibrate(model, tmp_path / folder / "statistics", common=on)
    saved = str(tmp_path / "here" / "statistics")
    runs: dict[str, Callable[[Path, Common], Any]] = {
        "fp8": lambda at, on: blocked_fp8(model, at, common=on),
        "gptq": lambda at, on: auto_gptq(model, at, common=replace(on, calibration=saved, quantize_lm_head=True)),
    }
    for name, run in runs.items():
        run(tmp_path / "here" / name, common)
        run(tmp_path / "there" / name, replace(common, ray=2))
    for name in ("statistics", *runs):
        assert content(tmp_path / "there" / name) == content(tmp_path / "here" / name)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_part_whose_worker_is_killed_is_done_again(tiny_models: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    model, here, there = tiny_models("llama"), tmp_path / "here", tmp_path / "there"
    mxfp4(str(model), here, common=Common(eval_tokens=300))
    command = [*TOOL, "lite", "mxfp4", model, "--work-dir", there, "--eval-tokens", 300, "--ray", 2]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    end, found = time.monotonic() + 300, list[int]()
    while not found:
        assert process.poll() is None and time.monotonic() < end
        found = named(process.pid, "_quantize")
    os.kill(found[0], signal.SIGKILL)
    _, told = process.communicate(timeout=400)
    assert process.returncode == 0, told
    assert content(there) == content(here)
