"""Blocks that are kept in a folder: a run goes on as one that computes all afresh, whatever has become of the files."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.engine.cache.kept import folder, shelf
from toolkit.engine.cache.kept.block import Block, Cipher, Digest, Seal, read_secret
from toolkit.engine.core import EngineCore
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import RunnerError

MODEL = bytes(range(32))
WINDOWS = [(None,), (None, 6), (None, "state"), (None, 6, "state"), (6,), ((6, 5),)]
SIZE = 4  # of blocks
KEY = bytes(32)
SEALED = bytes([5]) * 32  # another model


def open_files(
    root: Path, windows: tuple[Any, ...] = (None,), *, model: bytes = MODEL, seal: Seal | None = None, **limits: Any
) -> shelf.Files:
    sizes = [16 if w == "state" else 16 * SIZE for w in windows]
    kept = folder.Folder("kv_cache_dir", root, model.hex()[:32], {"model": "fake"})
    return shelf.Files(kept, model, seal or Digest(), sizes, **({"most": 1 << 30, "seconds": 1e6} | limits))


def make(fake: Any, root: Path | None, windows: tuple[Any, ...] = (None,), **more: Any) -> EngineCore:
    found: EngineCore = fake.make_core(windows, shelf=root and open_files(root, windows), **more)
    return found


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(61), k=length)


def answers(fake: Any, core: EngineCore, prompts: list[list[int]], n: int = 6) -> list[list[int]]:
    for i, tokens in enumerate(prompts):
        core.add(EngineRequest(str(i), tokens, SamplingParams(n)))
    found = fake.run(core)
    return [fake.tokens_of(found[str(i)]) for i, _ in enumerate(prompts)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("windows", WINDOWS)
def test_a_restarted_engine_goes_on_from_the_folder(
    fake: Any, tmp_path: Path, windows: tuple[Any, ...], asynchronous: bool
) -> None:
    prompts = [prompt(41), prompt(41) + prompt(9, 1), prompt(30, 2)]
    expected = answers(fake, make(fake, None, windows), prompts)
    first = make(fake, tmp_path / "kv", windows, asynchronous=asynchronous)
    assert answers(fake, first, prompts) == expected
    first.close()
    again = make(fake, tmp_path / "kv", windows, asynchronous=asynchronous)
    computed = again.runner.tokens_computed
    assert answers(fake, again, prompts) == expected
    stats = again.stats()
    assert again.runner.tokens_computed - computed < 41 + 3 * 6 + 9
    assert stats["kept_hit_tokens"] >= 40 + 28 and stats["kept_read_bytes"] and not stats["kept_refused_files"]
    again.close()
    assert {f.stat().st_mode & 0o777 for f in tmp_path.rglob("*.*")} == {0o600}
    assert {f.stat().st_mode & 0o777 for f in tmp_path.rglob("*") if f.is_dir()} == {0o700}


@settings(max_examples=25)
@given(
    windows=st.sampled_from(WINDOWS),
    runs=st.lists(
        st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=4), min_size=2, max_size=4
    ),
    blocks=st.integers(24, 60),
    asynchronous=st.booleans(),
    sealed=st.booleans(),
)
def test_whatever_runs_and_restarts(
    fake: Any,
    tmp_path_factory: pytest.TempPathFactory,
    windows: Any,
    runs: Any,
    blocks: int,
    asynchronous: bool,
    sealed: bool,
) -> None:
    root = tmp_path_factory.mktemp("kv")
    for run in runs:
        prompts = [prompt(length, seed) for length, seed in run]
        files = open_files(root, windows, seal=Cipher(KEY) if sealed else None)
        core = fake.make_core(
            windows, shelf=files, blocks=blocks, asynchronous=asynchronous, session_len=70, max_batch_size=4
        )
        assert answers(fake, core, prompts) == answers(fake, make(fake, None, windows), prompts)
        core.close()
        assert not files.counts.refused and not files.counts.failures


# -- files that are not as they were written --------------------------------------------------------


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(8 * len(data))
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def splice(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:a] + rng.randbytes(b - a) + data[b:]


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    splice,
    lambda data, rng: data[: rng.randrange(len(data))],
    lambda data, rng: data + rng.randbytes(rng.randrange(1, 64)),
    lambda data, rng: rng.randbytes(len(data)),
    lambda data, rng: bytes(len(data)),
    lambda data, rng: b"",
    lambda data, rng: data[::-1],
    lambda data, rng: data[:40] + rng.randbytes(len(data) - 40),
    lambda data, rng: rng.randbytes(40) + data[40:],
]


def damage(file: Path, whole: dict[Path, bytes], rng: random.Random) -> None:
    """Make anything else of one of our files, of which ``whole`` has the content."""
    way = rng.randrange(len(DAMAGES) + 5)
    data = file.read_bytes()
    if way < len(DAMAGES):
        changed = DAMAGES[way](data, rng)
        if changed != data:
            file.write_bytes(changed)
            return
        way = len(DAMAGES)
    if way == len(DAMAGES):  # renamed
        file.write_bytes(whole[rng.choice([o for o in sorted(whole) if o != file])])
    elif way == len(DAMAGES) + 1:
        moved = file.with_suffix(".moved")
        file.rename(moved)
        file.symlink_to(moved)
    elif way == len(DAMAGES) + 2:
        file.unlink()
        os.mkfifo(file)
    elif way == len(DAMAGES) + 3:
        file.unlink()
        file.mkdir()
    else:
        file.chmod(0o644)


def restore(root: Path, whole: dict[Path, bytes]) -> None:
    for model in root.iterdir():
        for file in model.iterdir():
            if file.is_dir():
                file.rmdir()
            elif file not in whole:
                file.unlink()
    for file, data in whole.items():
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_bytes(data)


def mutate(
    fake: Any,
    root: Path,
    windows: tuple[Any, ...],
    seal: Seal | None,
    rounds: int,
    each: int,
    seed: int,
    run_every: int = 1,
) -> int:
    """Folders of which up to ``each`` files were damaged: none of these is read, and in every so many rounds answers
    are those of a run without any. Returns how many files were damaged."""
    rng, count, refused = random.Random(seed), 0, 0
    prompts = [prompt(38), prompt(20) + prompt(12, 1)]
    expected = answers(fake, make(fake, None, windows), prompts, 3)
    files, blocks = open_files(root, windows, seal=seal), {}
    write = files.write
    files.write = lambda found: blocks.update({files._name(b): b for b, _ in found}) or write(found)  # type: ignore
    first = fake.make_core(windows, shelf=files)
    assert answers(fake, first, prompts, 3) == expected
    first.close()
    (model,) = root.iterdir()
    whole = {file: file.read_bytes() for file in model.iterdir() if file.suffix == ".kv"}
    for i in range(rounds):
        for file in (chosen := rng.sample(sorted(whole), rng.randint(1, min(each, len(whole))))):
            damage(file, whole, rng)
            count += 1
        files = open_files(root, windows, seal=seal)
        assert [files.read(blocks[file.name]) for file in chosen] == [None] * len(chosen)
        assert files.counts.refused == len(chosen)
        if i % run_every == 0:
            files = open_files(root, windows, seal=seal)
            core = fake.make_core(windows, shelf=files, check=False)
            assert answers(fake, core, prompts, 3) == expected
            core.close()
            refused += files.counts.refused
        restore(root, whole)
    assert refused > rounds / run_every / 2
    return count


@pytest.mark.parametrize("seal", [None, Cipher(KEY)], ids=["plain", "encrypted"])
@pytest.mark.parametrize("windows", [(None,), (None, 6, "state")])
def test_damaged_files_change_no_answer(fake: Any, tmp_path: Path, windows: tuple[Any, ...], seal: Seal | None) -> None:
    assert mutate(fake, tmp_path, windows, seal, rounds=15, each=6, seed=1) >= 15


@pytest.mark.parametrize("windows", [(None,), (None, "state")])
def test_one_start_mends_what_stands_behind_a_missing_file(fake: Any, tmp_path: Path, windows: tuple[Any, ...]) -> None:
    """Nobody reads what is behind a gap: it is written again with what fills that, for it may be damaged too."""
    files, blocks = open_files(tmp_path, windows), {}
    write = files.write
    files.write = lambda found: blocks.update({files._name(b): b for b, _ in found}) or write(found)  # type: ignore
    first = fake.make_core(windows, shelf=files)
    expected = answers(fake, first, [prompt(41)], 3)
    first.close()
    parts = np.array(prompt(41)[:40], np.int32).reshape(10, SIZE)
    of_tokens = {block.tokens: block for block in blocks.values() if block.group == 0}
    in_order = [of_tokens[part.tobytes()] for part in parts]
    (model,) = tmp_path.iterdir()
    (model / files._name(in_order[2])).unlink()
    bad = model / files._name(in_order[5])
    bad.write_bytes(bytes(bad.stat().st_size))
    second = make(fake, tmp_path, windows)
    assert answers(fake, second, [prompt(41)], 3) == expected
    assert not second.stats()["kept_refused_files"]
    second.close()
    files = open_files(tmp_path, windows)
    assert all(files.read(block) for block in in_order)
    third = make(fake, tmp_path, windows)
    assert answers(fake, third, [prompt(41)], 3) == expected
    assert third.stats()["kept_hit_tokens"] == 40
    third.close()


def test_blocks_that_were_read_are_not_written_again(fake: Any, tmp_path: Path) -> None:
    first = make(fake, tmp_path)
    answers(fake, first, [prompt(41)], 3)  # no block of the answer becomes full: nobody would read it
    first.close()
    files = open_files(tmp_path)
    again = fake.make_core(shelf=files)
    answers(fake, again, [prompt(41)], 3)
    again.close()
    assert files.counts.read_bytes > 0 == files.counts.written_bytes


PARTS = 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hundred_thousand_damages(part: int, fake: Any, tmp_path: Path) -> None:
    """So many in all parts together; in one of them blocks and seal are of one kind, with seeds of its own."""
    windows: tuple[Any, ...] = (None, 6, "state") if part % 2 else (None,)
    seal = Cipher(KEY) if part % 4 >= 2 else None
    count = 0
    for seed in range(part, 100 * PARTS, PARTS):
        count += mutate(fake, tmp_path / str(seed), windows, seal, rounds=100, each=99, seed=seed, run_every=10)
        if count >= 100_000 // PARTS:
            return
    raise AssertionError(f"only {count}")


@given(data=st.binary(max_size=400))
def test_any_bytes_are_refused(data: bytes) -> None:
    block = Block(0, bytes(32), bytes(32), bytes(16), b"")
    head = block.head(MODEL, 64)
    for seal in (Digest(), Cipher(KEY)):
        assert seal.open(memoryview(data), head) is None
        whole = b"".join(bytes(part) for part in seal.close(head, bytes(64)))
        assert len(whole) == seal.extra + block.head_size() + 64
        opened = seal.open(memoryview(whole), head)
        assert opened is not None and bytes(opened) == bytes(64)
        for other in (Block(1, bytes(32), bytes(32), bytes(16), b""), Block(0, bytes(32), bytes(32), b"a" * 16, b"")):
            assert seal.open(memoryview(whole), other.head(MODEL, 64)) is None
        assert seal.open(memoryview(whole), block.head(bytes(32), 64)) is None


def test_other_models_and_keys_find_nothing(fake: Any, tmp_path: Path) -> None:
    first = make(fake, tmp_path)
    answers(fake, first, [prompt(40)])
    first.close()
    for files in (
        open_files(tmp_path, model=bytes(32)),
        open_files(tmp_path, model=SEALED, seal=Cipher(KEY)),
        open_files(tmp_path, model=SEALED, seal=Cipher(bytes([1]) * 32)),
        open_files(tmp_path, seal=Cipher(KEY)),
    ):
        core = fake.make_core(shelf=files)
        answers(fake, core, [prompt(40)])
        assert core.stats()["kept_hit_tokens"] == 0
        core.close()
    words = np.array(prompt(40)[:SIZE], np.int32).tobytes()
    plain, sealed = ([f.read_bytes() for f in tmp_path.rglob(f"{m.hex()[:32]}/*.kv")] for m in (MODEL, SEALED))
    assert any(words in data for data in plain)
    assert len(sealed) == 2 * 11 and len(plain) == 2 * 11 and not any(words in data for data in sealed)


# -- disks that fail --------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "fdatasync", "rename", "open", "mkdir"])
def test_a_disk_that_fails_costs_time_alone(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    expected = answers(fake, make(fake, None), [prompt(40)])
    core = make(fake, tmp_path / "kv")
    real = getattr(os, call)

    def full(*args: Any, **more: Any) -> Any:
        if "dir_fd" in more or "src_dir_fd" in more or call in ("write", "fdatasync"):
            raise OSError(28, "No space left on device")
        return real(*args, **more)

    monkeypatch.setattr(folder.os, call, full)
    assert answers(fake, core, [prompt(40)]) == expected
    core.close()
    monkeypatch.undo()
    stats = core.stats() if core.keeper else {}
    assert not stats and not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.kv"))


def test_a_folder_that_vanishes_and_comes_back(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shelf, "PAUSE_SECONDS", 0.0)
    root, prompts = tmp_path / "kv", [prompt(40, seed) for seed in range(4)]
    expected = [answers(fake, make(fake, None), [p]) for p in prompts]
    core = make(fake, root)
    assert answers(fake, core, prompts[:1]) == expected[0]
    core.keeper.flush()
    shutil.rmtree(root)
    assert answers(fake, core, prompts[1:2]) == expected[1]
    core.keeper.flush()
    assert answers(fake, core, prompts[2:3]) == expected[2]
    core.close()
    again = make(fake, root)
    assert answers(fake, again, prompts[2:3]) == expected[2]
    assert again.stats()["kept_hit_tokens"] == 36
    again.close()


def test_of_more_than_may_lie_there_the_first_is_kept(tmp_path: Path) -> None:
    files = open_files(tmp_path, most=1000)
    blocks = [Block(0, bytes([i]) * 32, bytes(32), bytes(16), b"") for i in range(12)]
    assert not files.write([(block, bytes(64)) for block in blocks])
    there = [files.has(block) for block in blocks]
    assert there[0] and there == sorted(there, reverse=True) and not there[-1]
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.kv")) <= 1000
    assert not open_files(tmp_path, most=10).write([(blocks[-1], bytes(64))])
    assert files.has(blocks[0])  # it has not gone for one that there is no room for anyway


def test_it_takes_no_more_than_allowed(fake: Any, tmp_path: Path) -> None:
    files = open_files(tmp_path, most=4000, seconds=1e6)
    blocks = [Block(0, i.to_bytes(32, "big"), bytes(32), bytes(16), b"") for i in range(100)]
    for i, block in enumerate(blocks):
        assert files.write([(block, bytes(64))])
        for file in tmp_path.rglob("*.kv"):
            if file.name.startswith(block.key.hex()):
                os.utime(file, (i, i))
        assert sum(f.stat().st_size for f in tmp_path.rglob("*.kv")) <= 4000
    assert files.has(blocks[-1]) and not files.has(blocks[0])
    assert folder.sweep(tmp_path, 1e9, 1e12) > 0
    for file in tmp_path.rglob("*.kv"):
        os.utime(file)
    old, *_ = tmp_path.rglob("*.kv")
    os.utime(old, (time.time() - 1000,) * 2)
    folder.sweep(tmp_path, 1e9, 500)
    assert not old.exists() and list(tmp_path.rglob("*.kv"))


def test_nothing_of_others_is_deleted(fake: Any, tmp_path: Path) -> None:
    core = make(fake, tmp_path)
    answers(fake, core, [prompt(40)])
    core.close()
    (model,) = tmp_path.iterdir()
    kept = [
        tmp_path / "mine.kv",
        model / "notes.txt",
        tmp_path / "sub" / ("0" * 64 + ".0.kv"),
        model / ("0" * 64 + ".kv"),
    ]
    (tmp_path / "sub").mkdir()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    kept.append(outside / ("0" * 64 + ".0.kv"))
    (tmp_path / ("0" * 32)).symlink_to(outside)
    for file in kept:
        file.write_text("mine")
    entry, *more = folder.entries("kv_cache_dir", tmp_path)
    assert not more and entry.files == 11 and entry.about == {"model": "fake"}
    assert folder.clear("kv_cache_dir", tmp_path, entry.model) == entry.size
    folder.sweep(tmp_path, 0, 0)
    assert all(file.read_text() == "mine" for file in kept)
    assert folder.entries("kv_cache_dir", tmp_path)[0].files == 0 and not list(model.glob("*.0.kv"))


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(UsageError, match=f"mode 0{mode:o}.*chmod 700"):
        open_files(tmp_path / "kv")


def test_folders_of_others_and_no_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="expected a folder"):
        open_files(tmp_path / "file")
    with pytest.raises(UsageError, match="expected a folder"):
        open_files(tmp_path / "file" / "kv")
    monkeypatch.setattr(folder.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match="belongs to user"):
        open_files(tmp_path / "kv")


@pytest.mark.parametrize(
    "content, mode, found",
    [
        (bytes(32), 0o600, bytes(32)),
        (b"ab" * 32 + b"\n", 0o600, bytes([0xAB]) * 32),
        (bytes(31), 0o600, "expected 32 bytes"),
        (b"xy" * 32, 0o600, "expected 32 bytes"),
        (bytes(32), 0o640, "others may read it"),
        (None, 0, "cannot be read"),
    ],
)
def test_key_files(tmp_path: Path, content: bytes | None, mode: int, found: bytes | str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    if isinstance(found, bytes):
        assert read_secret("kv_cache_key", file) == found
    else:
        with pytest.raises(UsageError, match=f"{file}: {found}.*openssl rand"):
            read_secret("kv_cache_key", file)


# -- several processes, and their end ---------------------------------------------------------------

CHILD = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from conftest import load_support
fake = load_support("fake_runner")
test = load_support("test_kept", "engine")
while True:
    core = test.make(fake, Path({root!r}))
    for seed in range(40):
        test.answers(fake, core, [test.prompt(60, seed)])
        core.keeper.flush()
        print(seed, flush=True)
    core.close()
    import shutil; shutil.rmtree({root!r})
"""


def test_killed_at_any_moment_it_leaves_what_loads(fake: Any, tmp_path: Path) -> None:
    root, rng = tmp_path / "kv", random.Random(3)
    code = CHILD.format(tests=str(Path(__file__).parent.parent), root=str(root))
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline()
            time.sleep(rng.random() * 0.05)
            child.send_signal(signal.SIGKILL)
        prompts = [prompt(60, seed) for seed in range(8)]
        core = make(fake, root)
        assert answers(fake, core, prompts) == answers(fake, make(fake, None), prompts)
        assert not core.stats()["kept_refused_files"]
        core.close()


def test_what_a_killed_process_of_the_same_number_left_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers each start has the same number."""
    block = Block(0, bytes(32), bytes(32), bytes(16), b"")
    with monkeypatch.context() as killed:
        killed.setattr(os, "rename", lambda *names, **at: os.stat("/nosuch"))
        killed.setattr(os, "unlink", lambda *names, **at: None)
        assert not open_files(tmp_path / "kv").write([(block, bytes(64))])
    assert len(list(tmp_path.rglob("*.part"))) == 2
    assert open_files(tmp_path / "kv").write([(block, bytes(64))])


def test_two_engines_share_a_folder(fake: Any, tmp_path: Path) -> None:
    one, two = make(fake, tmp_path), make(fake, tmp_path)
    expected = answers(fake, make(fake, None), [prompt(50)])
    assert answers(fake, one, [prompt(50)]) == expected
    one.keeper.flush()
    assert answers(fake, two, [prompt(50)]) == expected
    assert two.stats()["kept_hit_tokens"] == 48
    one.close()
    two.close()


def test_sleep_keeps_and_new_weights_do_not(fake: Any, tmp_path: Path) -> None:
    core = make(fake, tmp_path)
    expected = answers(fake, core, [prompt(50)])
    core.sleep()
    core.wake("weights", "kv_cache")
    assert answers(fake, core, [prompt(50)]) == expected
    assert core.stats()["kept_hit_tokens"] == 48
    core.update_weights("elsewhere", keep=False)
    assert core.keeper is None and answers(fake, core, [prompt(50)]) == expected


@pytest.mark.parametrize("fails", ["use_weights", "load_weights"])
def test_new_weights_that_cannot_be_loaded_leave_the_cache_kept(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    core = make(fake, tmp_path)
    expected = answers(fake, core, [prompt(50)])
    whole = getattr(core.runner, fails)

    def fail(*arguments: Any) -> None:
        monkeypatch.setattr(core.runner, fails, whole)
        raise RunnerError("no such weights")

    monkeypatch.setattr(core.runner, fails, fail)
    with pytest.raises(ToolkitError, match="no such weights"):
        core.update_weights("elsewhere", keep=False)
    core.sleep()
    core.wake("weights", "kv_cache")
    assert answers(fake, core, [prompt(50)]) == expected
    assert core.stats()["kept_hit_tokens"] == 48
    core.close()


def test_an_aborted_request_leaves_nothing_held(fake: Any, tmp_path: Path) -> None:
    first = make(fake, tmp_path)
    answers(fake, first, [prompt(50)])
    first.close()
    core = make(fake, tmp_path)
    core.add(EngineRequest("a", prompt(50), SamplingParams(4)))
    core.step()
    assert core.keeper.reading
    core.abort("a")
    fake.run(core)
    core.step()
    assert not core.keeper.reading and core.blocks.usage() == 0
    core.check_integrity()
    core.close()
