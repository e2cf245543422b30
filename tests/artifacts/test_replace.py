"""``--overwrite`` replaces an artifact of ours and nothing else, in every command that writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.manifest import MANIFEST, describe_parent
from toolkit.artifacts.output import stage
from toolkit.artifacts.output.partial import partial_dir
from toolkit.artifacts.output.replace import check_directory_target, check_file_target, foreign, remove_artifact
from toolkit.artifacts.output.stage import open_stage
from toolkit.errors import UsageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def make(target: Path, source: Path, text: str = "old", overwrite: bool = False) -> Path:
    parent = describe_parent(source)
    with open_stage(target, kind="engine", stage="t", parent=parent, options={"x": text}, overwrite=overwrite) as run:
        if not run.already_there:
            (run.dir / "weights").write_text(text)
            (run.dir / "deep").mkdir()
            (run.dir / "deep" / "file").write_text(text)
            run.finish()
    return target


def tree(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): p.read_text() for p in path.rglob("*") if p.is_file() and p.name != MANIFEST}


NEW = {"weights": "new", "deep/file": "new"}


def test_an_artifact_of_ours_is_replaced(tmp_path: Path, source: Path) -> None:
    target = make(tmp_path / "out", source)
    assert foreign(target) == []
    assert tree(make(target, source, "new", overwrite=True)) == NEW
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_the_tool_did_not_make_stays_and_is_named(tmp_path: Path, source: Path, overwrite: bool) -> None:
    target = tmp_path / "thesis"
    (target / "chapters").mkdir(parents=True)
    (target / "chapters" / "1.tex").write_text("years of work")
    (target / "notes.txt").write_text("more")
    for manifest in (None, "{}", '{"name": "a web page"}', "[]", "not JSON"):
        if manifest is not None:
            (target / MANIFEST).write_text(manifest)
        with pytest.raises(UsageError, match=r"never replaced.*chapters/,.*notes\.txt") as caught:
            make(target, source, overwrite=overwrite)
        assert "--overwrite" not in str(caught.value)  # which would not help
        assert (target / "chapters" / "1.tex").read_text() == "years of work"
    assert not partial_dir(target).exists()


def test_a_foreign_file_in_our_artifact_is_named_and_nothing_changes(tmp_path: Path, source: Path) -> None:
    target = make(tmp_path / "out", source)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, put in {
        "notes.txt": lambda p: p.write_text("mine"),
        "deep/notes.txt": lambda p: p.write_text("mine"),
        "empty": lambda p: p.mkdir(),
        "link": lambda p: p.symlink_to(elsewhere),
        "file": lambda p: p.symlink_to(source / "config.json"),
        "pipe": os.mkfifo,
    }.items():
        put(target / name)
        with pytest.raises(UsageError, match=f"not of the artifact: {name}"):
            make(target, source, "new", overwrite=True)
        assert (target / "weights").read_text() == "old" and os.path.lexists(target / name)
        (target / name).rmdir() if name == "empty" else (target / name).unlink()
    assert make(target, source, "old") and tree(make(target, source, "new", overwrite=True)) == NEW


def test_a_listed_file_that_became_a_link_is_not_followed(tmp_path: Path, source: Path) -> None:
    target = make(tmp_path / "out", source)
    (tmp_path / "big-disk").write_text("moved there")
    (target / "weights").unlink()
    (target / "weights").symlink_to(tmp_path / "big-disk")
    with pytest.raises(UsageError, match="weights"):
        make(target, source, "new", overwrite=True)
    assert (tmp_path / "big-disk").read_text() == "moved there"


def test_a_manifest_that_lists_what_is_not_in_the_directory_makes_nothing_ours(tmp_path: Path, source: Path) -> None:
    target = make(tmp_path / "out", source)
    (tmp_path / "thesis").write_text("years of work")
    (target / "deep" / "notes").write_text("mine")
    good = json.loads((target / MANIFEST).read_text())
    for name in (
        "../thesis",
        str(tmp_path / "thesis"),
        "deep/../../thesis",
        "",
        ".",
        "x" * 5000,
        "a/" * 40 + "a",
        "\0",
    ):
        files = [{"name": name, "size": 1, "sha256": ""}, *good["files"]]
        (target / MANIFEST).write_text(json.dumps(good | {"files": files}))
        with pytest.raises(UsageError, match="not of an artifact of this tool"):
            make(target, source, "new", overwrite=True)
        remove_artifact(target)
    assert (tmp_path / "thesis").read_text() == "years of work" and tree(target)["deep/notes"] == "mine"


def test_removing_leaves_what_came_in_between_and_can_be_taken_up_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that arrives in the very moment of the exchange: it is kept, and the next run tells where it is."""
    target = make(tmp_path / "out", source)

    def too_early(*args: Any, **options: Any) -> None:
        (target / "notes.txt").write_text("mine")

    with monkeypatch.context() as late:
        late.setattr(stage, "check_directory_target", too_early)
        assert make(target, source, "new", overwrite=True)
    old = partial_dir(target) / "old"
    assert tree(target) == NEW and tree(old) == {"notes.txt": "mine"}
    with pytest.raises(UsageError, match=r"\.out\.partial/old: holds notes\.txt"):
        make(target, source, "newer", overwrite=True)
    assert tree(target) == NEW and tree(old) == {"notes.txt": "mine"}
    (old / "notes.txt").rename(tmp_path / "notes.txt")
    assert make(target, source, "newer", overwrite=True) and not partial_dir(target).exists()


def test_a_failed_exchange_puts_the_old_artifact_back(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make(tmp_path / "out", source)
    rename, count = os.rename, iter(range(9))

    def second_fails(*args: Any) -> None:
        if next(count) == 1:
            raise OSError(5, "Input/output error")
        rename(*args)

    monkeypatch.setattr(stage.os, "rename", second_fails)
    with pytest.raises(OSError, match="Input/output"):
        make(target, source, "new", overwrite=True)
    assert (target / "weights").read_text() == "old" and not partial_dir(target).exists()


def test_places_that_are_refused(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    here = tmp_path / "here" / "inner"
    for folder in (home, here):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    (tmp_path / "link").symlink_to(home)
    for target, words in {
        "/": "the root",
        str(home): "the home directory",
        str(tmp_path / "link"): "the home directory",
        ".": "the current directory",
        "..": "the current directory",
        "/proc": "a mount point",
        str(source / "out"): "lies inside",
        str(source): "would delete",
        str(tmp_path): "or holds the home",
    }.items():
        with pytest.raises(UsageError, match=words):
            check_directory_target(target, [source], overwrite=True)
    check_directory_target("out", [source])


def test_a_mount_point_is_not_replaced_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, volume = Path.read_text, tmp_path / "ü b"
    lines = f"36 35 98:0 / {tmp_path}/ü\\040b rw - ext3 /dev/root rw\n"  # as Linux writes a name with a blank
    monkeypatch.setattr(Path, "read_text", lambda self, **k: lines if "mountinfo" in str(self) else real(self, **k))
    with pytest.raises(UsageError, match="mount point"):
        check_directory_target(volume)
    check_directory_target(volume / "out")


def test_behind_a_link_nothing_is_replaced_but_a_new_artifact_may_be_made(tmp_path: Path, source: Path) -> None:
    real, link = tmp_path / "big-disk", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    make(link, source)
    assert link.is_symlink() and (real / "weights").read_text() == "old"
    with pytest.raises(UsageError, match="symbolic link"):
        make(link, source, "new", overwrite=True)
    assert (real / "weights").read_text() == "old"


def test_a_strangers_directory_of_our_hidden_name_stays(tmp_path: Path, source: Path) -> None:
    hidden = partial_dir(tmp_path / "out")
    (hidden / "photos").mkdir(parents=True)
    (hidden / "lock").write_text("")
    with pytest.raises(UsageError, match="in the way"):
        make(tmp_path / "out", source)
    (hidden / "photos").rmdir()
    (hidden / "lock").unlink()
    hidden.rmdir()
    (tmp_path / "mine").mkdir()
    hidden.symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="in the way"):
        make(tmp_path / "out", source)
    assert (tmp_path / "mine").is_dir()


def test_a_file_is_replaced_where_it_is_a_gguf_file_of_ours(tmp_path: Path, source: Path, support: Any) -> None:
    target = tmp_path / "m.gguf"
    check_file_target(target, source, False)
    from toolkit.artifacts.gguf.container import TOOL_KEY
    from toolkit.artifacts.gguf.writer import write_gguf

    for content, ours in (
        (b"thesis", False),
        (b"", False),
        ({"general.name": "theirs"}, False),
        ({TOOL_KEY: "1"}, True),
    ):
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            write_gguf(target, content, [], [])
        with pytest.raises(UsageError, match="--overwrite" if ours else "never replaced"):
            check_file_target(target, source, False)
        if ours:
            check_file_target(target, source, True)
        else:
            with pytest.raises(UsageError, match="never replaced"):
                check_file_target(target, source, True)
    (tmp_path / "link.gguf").symlink_to(target)
    for name in ("link.gguf", "."):
        with pytest.raises(UsageError, match=r"symbolic link|directory"):
            check_file_target(tmp_path / name, source, True)
