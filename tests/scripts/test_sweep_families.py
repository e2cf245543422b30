"""The sweep over the families, one of them."""

import json
import os
import signal
import time

import pytest


@pytest.fixture(scope="module")
def sweep(script):
    return script("testing/sweep_families")


@pytest.mark.slow
def test_one_family_goes_through_every_stage(sweep, tmp_path):
    assert sweep.main(["qwen3", "--json", str(tmp_path / "sweep.json")]) == 0
    cells = json.loads((tmp_path / "sweep.json").read_text())["qwen3"]
    assert list(cells) == list(sweep.COLUMNS)
    assert not any("failed" in cell or "refused" in cell for cell in cells.values())
    assert cells["chat"]["note"] in ("native", "tensor")


def test_what_fails_is_said_and_what_takes_its_result_is_not_tried(sweep, tmp_path, monkeypatch):
    def broken(self):
        raise ValueError("no such\nmodel")

    def refused(self):
        raise sweep.Refused("not written so")

    for name in sweep.COLUMNS:
        monkeypatch.setattr(sweep.Sweep, name, lambda self: "")
    monkeypatch.setattr(sweep.Sweep, "auto_awq", broken)
    monkeypatch.setattr(sweep.Sweep, "gguf", refused)
    cells = sweep.sweep("qwen3", tmp_path)
    assert cells["auto_awq"]["failed"] == "ValueError: no such"
    not_tried = [name for name, cell in cells.items() if cell.get("failed", "").startswith("not tried: ")]
    assert not_tried == ["convert", "chat", "serve"]
    assert cells["gguf"]["refused"] == "not written so"
    assert "failed" not in cells["auto_gptq"]


@pytest.mark.parametrize(
    ("work", "limit", "says"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 60.0, "status -9"),
        (lambda: time.sleep(60), 1.0, "longer than 1 seconds"),
    ],
)
def test_a_family_that_crashes_or_hangs_is_one_failure(sweep, tmp_path, monkeypatch, work, limit, says):
    monkeypatch.setattr(sweep, "sweep", lambda family, root: work())
    found = dict(sweep.apart(["qwen3", "llama", "gemma"], tmp_path, jobs=2, limit=limit))
    assert sorted(found) == ["gemma", "llama", "qwen3"]
    for cells in found.values():
        assert list(cells) == list(sweep.COLUMNS) and all(says in cell["failed"] for cell in cells.values())


def test_an_unknown_family_is_refused(sweep, capsys):
    with pytest.raises(SystemExit) as exit_:
        sweep.main(["qwen33"])
    assert exit_.value.code == 2
    assert "found qwen33" in capsys.readouterr().err
