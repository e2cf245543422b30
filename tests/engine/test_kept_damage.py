"""A folder of kept blocks that is damaged in any way: answers stay what they are without one, what is not ours stays
where it is, and where blocks are lost, or none can be kept, one line says so."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128

from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.engine.core import EngineCore
from toolkit.engine.load.setup import find
from toolkit.engine.load.start import start
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import UsageError

PROMPT = np.random.default_rng(5).integers(3, 300, 90).tolist()
LONGER = [*PROMPT, *PROMPT[:40]]  # of which some blocks are still to be written
REFUSED = "is not as it was written, and is not used"
YEARS = 10 * 365 * 86400.0


def opened(model: Path, kept: Path | None, **more: Any) -> EngineCore:
    fields: dict[str, Any] = {"dtype": "float32", "session_len": 192, "threads": 1, "device": "cpu"} | more
    fields |= {"kv_cache_dir": None if kept is None else str(kept), "cache_max_entry_count": 40}
    config = TurbomindEngineConfig(cache_block_seq_len=16, **fields)
    return start(find(str(model), config, None), None, lambda line: None)[0]


def ask(core: EngineCore, prompt: list[int], name: str = "r") -> tuple[list[int], list[Any]]:
    core.add(EngineRequest(name, prompt, SamplingParams(8, logprobs=3)))
    tokens, probabilities = [], []
    while core.has_work:
        for output in core.step():
            assert output.error is None
            tokens += output.token_ids
            probabilities += output.logprobs
    return tokens, probabilities


def answer(model: Path, kept: Path | None, prompt: list[int] = LONGER, **more: Any) -> tuple[Any, dict[str, Any]]:
    core = opened(model, kept, **more)
    try:
        found = ask(core, prompt)
        if core.keeper is not None:
            core.keeper.flush()
        return found, core.stats()
    finally:
        core.close()


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> Path:
    return tiny_models("llama")


@pytest.fixture(scope="module")
def cold(model: Path) -> Any:
    return answer(model, None)[0]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory, tiny_models: Any) -> Path:
    """A folder as it should be: of ``model``, and of another one in ``other``."""
    base = tmp_path_factory.mktemp("whole")
    for name, path in (("kv", model), ("other", tiny_models("llama", seed=7))):
        answer(path, base / name, PROMPT)
    return base


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))


@pytest.fixture
def kept(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole / "kv", tmp_path / "kv")


def of_model(kept: Path) -> Path:
    (found,) = (path for path in kept.iterdir() if re.fullmatch("[0-9a-f]{32}", path.name))
    return found


def blocks(kept: Path) -> list[Path]:
    return sorted(of_model(kept).glob("*.0.kv"))


# -- what befalls single files: each is made something else ------------------------------------------


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def damage(kept: Path, whole: Path) -> None:
        for file in blocks(kept):
            file.write_bytes(change(file.read_bytes()))

    return damage


def one_bit(data: bytes, at: int | None = None) -> bytes:
    at = random.Random(len(data)).randrange(len(data)) if at is None else at
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def forged(data: bytes) -> bytes:
    """Another token in it, and the digest that fits."""
    behind = one_bit(data[24:], 32 * 3 + 20)
    return data[:8] + xxh3_128(behind).digest() + behind


def in_place(make: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    def damage(kept: Path, whole: Path) -> None:
        for file in blocks(kept):
            data = file.read_bytes()
            file.unlink()
            mine = kept.parent / "mine" / file.name  # as it was, elsewhere
            mine.parent.mkdir(exist_ok=True)
            mine.write_bytes(data)
            make(file)

    return damage


def exchanged(kept: Path, whole: Path) -> None:
    files = blocks(kept)
    data = [file.read_bytes() for file in files]
    for file, content in zip(files, data[1:] + data[:1], strict=True):
        file.write_bytes(content)


def of_another_model(kept: Path, whole: Path) -> None:
    other = of_model(whole / "other")
    for file in blocks(kept):
        if (other / file.name).exists():  # of the prompt; answers differ
            file.write_bytes((other / file.name).read_bytes())


def huge(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(1 << 40)


def modes(mode: int) -> Callable[[Path, Path], None]:
    return lambda kept, whole: [file.chmod(mode) for file in blocks(kept)] and None


FILES: dict[str, Callable[[Path, Path], None]] = {
    "a bit of each": changed(one_bit),
    "a bit of each digest": changed(lambda data: one_bit(data, 12)),
    "a bit of what says whose it is": changed(lambda data: one_bit(data, 3)),
    "another token, with a digest that fits": changed(forged),
    "cut off": changed(lambda data: data[: len(data) // 2]),
    "longer": changed(lambda data: data + b"\0"),
    "empty": changed(lambda data: b""),
    "zeros": changed(lambda data: bytes(len(data))),
    "exchanged": exchanged,
    "of another model": of_another_model,
    "links": in_place(lambda file: file.symlink_to(file.parents[2] / "mine" / file.name)),
    "links to nothing": in_place(lambda file: file.symlink_to("nowhere")),
    "pipes": in_place(os.mkfifo),
    "sockets": in_place(lambda file: os.mknod(file, 0o600 | 0o140000)),
    "folders": in_place(lambda file: file.mkdir()),
    "a terabyte each": in_place(huge),
    "others may read them": modes(0o644),
    "others may write them": modes(0o602),
}


def guarded(kept: Path) -> dict[Path, bytes]:
    """Files of the user's in and beside the folder, some named nearly as ours."""
    inside = of_model(kept)
    mine = [kept / "notes.txt", kept / ("0" * 64 + ".0.kv"), inside / "notes.txt", inside / ("0" * 64 + ".kv")]
    mine += [inside / "mine.part", kept / "sub" / ".mine.part", kept.parent / ("1" * 64 + ".0.kv")]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(file.name.encode())
    beside = kept.parent / "mine"
    return {file: file.read_bytes() for file in (*mine, *(beside.iterdir() if beside.exists() else ()))}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def check(mine: dict[Path, bytes]) -> None:
    assert {file: file.read_bytes() for file in mine} == mine


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files(
    kind: str, model: Path, cold: Any, kept: Path, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FILES[kind](kept, whole)
    mine = guarded(kept)
    found, stats = answer(model, kept)
    assert found == cold and stats["kept_hit_tokens"] == 0 and stats["kept_refused_files"] > 0
    (line,) = said(caplog)
    assert line.startswith(f"{kept}: ") and line.endswith(REFUSED)
    check(mine)
    if kind != "folders":  # which are the user's
        found, stats = answer(model, kept)
        assert found == cold and stats["kept_hit_tokens"] == 128 and not stats["kept_refused_files"]
        check(mine)


def test_what_stands_before_the_damage_is_counted(model: Path, cold: Any, kept: Path) -> None:
    counts = set()
    for file in blocks(kept):
        whole = file.read_bytes()
        file.write_bytes(one_bit(whole))
        core = opened(model, kept)
        core.add(EngineRequest("r", LONGER, SamplingParams(8)))
        cached = 0
        while core.has_work:
            cached = max(cached, *(output.cached_tokens for output in core.step()), 0)
        assert core.stats()["kept_hit_tokens"] == cached
        counts.add(cached)
        core.close()
        file.write_bytes(whole)
    assert counts == {0, 16, 32, 48, 64, 128}  # 128: the damaged one is of an answer to PROMPT


# -- what befalls the folder -------------------------------------------------------------------------


def parts(kept: Path) -> None:
    """Half-written files of processes that were killed, long ago and just now."""
    for i, age in enumerate((3600, 0)):
        file = of_model(kept) / f".{'2' * 64}.0.kv.{i}-0.part"
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age,) * 2)


def clock(seconds: float) -> Callable[[Path], None]:
    return lambda kept: [os.utime(file, (time.time() + seconds,) * 2) for file in blocks(kept)] and None


def replaced(about: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(kept: Path) -> None:
        file = of_model(kept) / "model.json"
        file.unlink()
        about(file)

    return damage


FOLDERS: dict[str, tuple[Callable[[Path], None], int]] = {  # … and how many tokens are still found
    "parts": (parts, 80),
    "a clock that was put back": (clock(YEARS), 80),
    "a clock that was put forward": (clock(-YEARS), 80),
    "no model.json": (replaced(lambda file: None), 80),
    "nonsense as model.json": (replaced(lambda file: file.write_bytes(b"\xff{")), 80),
    "a link as model.json": (replaced(lambda file: file.symlink_to("/etc/passwd")), 80),
    "half of the files gone": (lambda kept: [file.unlink() for file in blocks(kept)[::2]] and None, -1),
    "all gone": (lambda kept: shutil.rmtree(kept), 0),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_damaged_folders(
    kind: str, model: Path, cold: Any, kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, hit = FOLDERS[kind]
    mine = guarded(kept) if kind != "all gone" else {}
    damage(kept)
    found, stats = answer(model, kept)
    assert found == cold and (hit < 0 or stats["kept_hit_tokens"] == hit)
    assert not stats["kept_refused_files"] and not said(caplog)
    check(mine)
    left = [file.name for file in kept.rglob(".2*.part")]
    assert left == ([f".{'2' * 64}.0.kv.1-0.part"] if kind == "parts" else [])
    found, stats = answer(model, kept)
    assert found == cold and stats["kept_hit_tokens"] == 128


@pytest.fixture
def small_disk(kept: Path) -> Iterator[Path]:
    """``kept`` on a disk of its own, that has no room for more."""
    if os.geteuid() != 0:
        pytest.skip("mounts a small disk, which needs root")
    aside = shutil.copytree(kept, kept.parent / "aside")
    size = sum(file.stat().st_size + 4096 for file in kept.rglob("*")) + (96 << 10)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(kept)], check=True)
    shutil.copytree(aside, kept, dirs_exist_ok=True)
    yield kept
    subprocess.run(["umount", "-l", str(kept)], check=True)


def test_a_full_disk(model: Path, cold: Any, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = guarded(small_disk)
    fill = small_disk / "fill"
    with pytest.raises(OSError), fill.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    mine |= {fill: fill.read_bytes()}
    found, stats = answer(model, small_disk)
    assert found == cold and stats["kept_hit_tokens"] == 80
    assert said(caplog) == [f"{small_disk}: KV blocks cannot be kept there: No space left on device"]
    check(mine)
    fill.unlink()
    assert answer(model, small_disk)[0] == cold
    assert answer(model, small_disk)[1]["kept_hit_tokens"] == 128


def test_a_disk_that_can_only_be_read(
    model: Path, cold: Any, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    found, stats = answer(model, small_disk)
    assert found == cold and stats["kept_hit_tokens"] == 80
    assert said(caplog) == [f"{small_disk}: KV blocks cannot be kept there: Read-only file system"]


def test_a_folder_that_others_may_write_to(model: Path, kept: Path) -> None:
    kept.chmod(0o777)
    with pytest.raises(UsageError, match=r"kv_cache_dir .*: others may write to it \(mode 0777\).*chmod 700"):
        answer(model, kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user, which needs root")
def test_a_folder_of_another_user(model: Path, kept: Path) -> None:
    os.chown(kept, 65534, 65534)
    with pytest.raises(UsageError, match=r"kv_cache_dir .*: it belongs to user 65534"):
        answer(model, kept)


@pytest.mark.parametrize("way", ["a link", "others may write to it", "a file"])
def test_a_model_s_folder_that_is_none(
    way: str, model: Path, cold: Any, kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inside = of_model(kept)
    if way == "others may write to it":
        inside.chmod(0o777)
    else:
        moved = inside.rename(tmp_path / "moved")
        inside.symlink_to(moved) if way == "a link" else inside.write_text("mine")
    before = sorted(file.name for file in kept.parent.rglob("*"))
    found, stats = answer(model, kept)
    assert found == cold and stats["kept_hit_tokens"] == 0
    (line,) = said(caplog)
    assert line.startswith(f"{kept}: KV blocks cannot be kept there: ")
    assert before == sorted(file.name for file in kept.parent.rglob("*") if "home" not in str(file))


# -- what happens under way --------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["folder", "files", "now a file"])
def test_what_is_deleted_under_way(what: str, model: Path, cold: Any, kept: Path) -> None:
    core = opened(model, kept)
    try:
        if what == "files":
            for file in blocks(kept):
                file.unlink()
        else:
            shutil.rmtree(kept)
        if what == "now a file":
            kept.write_text("mine")
        assert ask(core, LONGER) == cold
        assert core.keeper is not None
        core.keeper.flush()
        assert ask(core, LONGER) == cold
    finally:
        core.close()
    assert what != "now a file" or kept.read_text() == "mine"


def test_files_that_go_while_they_are_read(model: Path, cold: Any, kept: Path) -> None:
    whole = {file: file.read_bytes() for file in blocks(kept)}
    ended = threading.Event()

    def blink() -> None:
        draw = random.Random(1)
        while not ended.is_set():
            for file, data in whole.items():
                file.unlink(missing_ok=True) if draw.random() < 0.5 else file.write_bytes(
                    data[: draw.choice((9, None))]
                )

    thread = threading.Thread(target=blink)
    thread.start()
    try:
        for _ in range(5):
            assert answer(model, kept)[0] == cold
    finally:
        ended.set()
        thread.join()


def test_two_engines_at_once(model: Path, cold: Any, tmp_path: Path) -> None:
    """Both write the same blocks, and each finds what the other has written."""
    cores = [opened(model, tmp_path / "kv") for _ in range(2)]
    try:
        assert [ask(core, LONGER) for core in cores] == [cold, cold]
        for core in cores:
            assert core.keeper is not None
            core.keeper.flush()
        other = LONGER[::-1]
        expected = ask(cores[0], other)
        cores[0].keeper.flush()  # type: ignore[union-attr]
        assert ask(cores[1], other) == expected
        assert cores[1].stats()["kept_hit_tokens"] >= 128 and not cores[1].stats()["kept_refused_files"]
    finally:
        for core in cores:
            core.close()
    assert not list((tmp_path / "kv").rglob("*.part"))


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_kept_damage as test
core = test.opened(Path(sys.argv[2]), Path(sys.argv[3]))
print(flush=True)
for n in range(1000):
    test.ask(core, [(t + n) % 300 + 3 for t in test.LONGER], str(n))
    core.keeper.flush()
"""


def test_one_that_is_killed_while_it_writes(model: Path, cold: Any, kept: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(model), str(kept)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        end = time.monotonic() + 60
        while not list(kept.rglob("*.part")) and time.monotonic() < end:
            pass
        child.send_signal(signal.SIGKILL)
    for n in range(3):
        prompt = [(t + n) % 300 + 3 for t in LONGER]
        found, stats = answer(model, kept, prompt)
        assert found == answer(model, None, prompt)[0] and not stats["kept_refused_files"]
