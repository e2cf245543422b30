"""Files of figures: an earlier result is replaced whole, a stranger's file never."""

from __future__ import annotations

import csv
import json
import os
import tempfile
from pathlib import Path

import pytest

from toolkit.artifacts.output.result_file import append_csv, check_csv, check_json, check_plot, save_plot, write_text
from toolkit.artifacts.output.stage import open_stage
from toolkit.errors import ToolkitError, UsageError

KEYS = ("perplexity", "tokens")


@pytest.mark.parametrize(
    "content",
    ["my thesis", "{}", "[]", "[1]", '{"tokens": 3}', "[[]]", '"perplexity"', "nan", "[" * 5000, '{"a": "\\ud800"}'],
)
def test_json_that_is_no_earlier_result_stays(tmp_path: Path, content: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=r"--json .*file\.json: never replaced"):
        check_json("--json", file, KEYS)
    assert file.read_text() == content


def test_json_of_the_same_command_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    for found in ({"perplexity": 1.0, "tokens": 2}, [{"perplexity": 1.0, "tokens": 2, "new": None}], None):
        check_json("--json", file, KEYS)
        write_text("--json", file, "" if found is None else json.dumps(found))
    check_json("--json", str(file), KEYS)
    assert os.listdir(tmp_path) == ["file.json"]
    for fine in (None, "-", "/dev/null", "/dev/stdout"):
        check_json("--json", fine, KEYS)
    write_text("--json", Path("/dev/null"), "x")
    assert Path("/dev/null").is_char_device()


def test_a_plain_file_below_dev_is_no_device(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile("w", dir="/dev/shm", suffix=".txt") as notes:
        notes.write("my thesis")
        notes.flush()
        with pytest.raises(UsageError, match="never replaced"):
            check_json("--json", notes.name, KEYS)
    with (tmp_path / "notes").open("w") as notes:  # an open file, by whatever name, is written to as it is
        for name in (f"/dev/fd/{notes.fileno()}", f"/proc/self/fd/{notes.fileno()}"):
            check_json("--json", name, KEYS)
            write_text("--json", Path(name), "figures")
        assert os.fstat(notes.fileno()).st_ino == (tmp_path / "notes").stat().st_ino
    assert (tmp_path / "notes").read_text() == "figures"


def test_links_folders_and_files_of_an_artifact_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text('{"perplexity": 1, "tokens": 2}')
    (tmp_path / "link.json").symlink_to(tmp_path / "thesis")
    (tmp_path / "nowhere.json").symlink_to(tmp_path / "missing")
    parent = {"path": None, "digest": ""}
    with open_stage(tmp_path / "model", kind="checkpoint", stage="t", parent=parent, options={}) as stage:
        (stage.dir / "config.json").write_text('{"perplexity": 1, "tokens": 2}')
        stage.finish()
    for name, words in {
        "link.json": "symbolic link",
        "nowhere.json": "symbolic link",
        "model": "expected a file",
        "model/config.json": "is a file of the artifact",
        "model/manifest.json": "is a file of the artifact",
        "missing/x.json": "expected a file in a directory that exists",
        "x" * 300: "cannot be written",
    }.items():
        with pytest.raises(UsageError, match=words):
            check_json("--json", tmp_path / name, KEYS)
    check_json("--json", tmp_path / "model" / "figures.json", KEYS)


def test_a_table_grows_and_no_other_file_does(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    for i in range(2):
        check_csv("--csv", file, ["model", "speed"])
        append_csv("--csv", file, {"model": 'a,"b', "speed": i})
    assert list(csv.reader(file.open())) == [["model", "speed"], ['a,"b', "0"], ['a,"b', "1"]]
    for content in (b"my thesis\n", b"model,speed,more\n", b"speed,model\n", b"\xff\xfe\n", b"\n"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="never replaced"):
            check_csv("--csv", file, ["model", "speed"])


def test_rows_go_below_a_line_that_an_editor_left_open_and_into_pipes(tmp_path: Path) -> None:
    rows, head = [{"model": "a", "speed": 1}, {"model": "b", "speed": 2}], ["model", "speed"]
    (tmp_path / "a.csv").write_text("model,speed\nz,0")
    reading, writing = os.pipe()
    with open(reading, newline="") as pipe:
        for file in (tmp_path / "a.csv", Path(f"/dev/fd/{writing}")):
            check_csv("--csv", file, head)
            append_csv("--csv", file, *rows)
        os.close(writing)
        table = [head, ["a", "1"], ["b", "2"]]
        assert list(csv.reader(pipe)) == table
    assert list(csv.reader((tmp_path / "a.csv").open(newline=""))) == [head, ["z", "0"], *table[1:]]


def test_a_picture_replaces_a_picture_of_ours_alone(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    figure, file = Figure(), tmp_path / "a.png"
    for _ in range(2):
        check_plot("--plot", file)
        save_plot("--plot", figure, file, dpi=30)
    assert file.read_bytes()[:4] == b"\x89PNG" and os.listdir(tmp_path) == ["a.png"]
    figure.savefig(file)
    with pytest.raises(UsageError, match="never replaced"):
        check_plot("--plot", file)
    with pytest.raises(UsageError, match=r"ends in \.png"):
        check_plot("--plot", tmp_path / "a.pdf")


def test_a_full_disk_keeps_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.json"
    write_text("--json", file, "earlier")

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ToolkitError, match="disk full"):
        write_text("--json", file, "later")
    assert file.read_text() == "earlier" and os.listdir(tmp_path) == ["file.json"]
