"""Mapped files that are moved to huge pages: the same bytes at the same addresses, whoever reads them meanwhile."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.weight_files import huge_pages
from toolkit.artifacts.weight_files.huge_pages import HUGE, Mover, forget_pages, map_file, move

SIZE = 40 * HUGE + 12345
PLENTY = 1 << 40
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system has no huge pages"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, SIZE, np.uint8).tobytes())
    return path


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if the system kept files in small pages alone: what was asked first was whether they are in huge ones."""
    real = huge_pages._in_huge_pages
    asked: list[int] = []

    def found(first: int, last: int) -> int:
        asked.append(first)
        return 0 if len(asked) == 1 else real(first, last)

    monkeypatch.setattr(huge_pages, "_in_huge_pages", found)
    monkeypatch.setattr(huge_pages, "_PATIENCE", 0.0)
    return asked


def mapping(array: Any) -> mmap.mmap:
    (found,) = huge_pages._mappings([array])
    return found


def test_bytes_are_the_same_at_the_same_addresses_while_others_read(file: Path) -> None:
    array = map_file(file)
    part, whole = array[HUGE + 5 : 3 * HUGE], array.copy()
    at, ended, wrong = array.ctypes.data, threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            wrong.extend([1] if not np.array_equal(array, whole) else [])

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    moved = move(mapping(array), lambda: PLENTY, threading.Event())
    ended.set()
    for reader in readers:
        reader.join()
    assert moved >= SIZE - 2 * HUGE and not wrong
    assert array.ctypes.data == at and np.array_equal(array, whole) and np.array_equal(part, whole[HUGE + 5 : 3 * HUGE])
    assert huge_pages._in_huge_pages(at, at + SIZE) > SIZE // 2


def test_what_is_forgotten_is_read_from_the_file_again(file: Path) -> None:
    array = map_file(file)
    whole = array.copy()
    assert move(mapping(array), lambda: PLENTY, threading.Event())
    forget_pages([array[5:9]])
    at = array.ctypes.data
    assert huge_pages._in_huge_pages(at, at + SIZE) == 0
    assert np.array_equal(array, whole)


def test_copies_of_a_file_that_was_replaced_stay(file: Path) -> None:
    array = map_file(file)
    whole = array.copy()
    assert move(mapping(array), lambda: PLENTY, threading.Event())
    other = file.with_name("other")
    other.write_bytes(bytes(SIZE))
    other.replace(file)
    forget_pages([array])
    assert np.array_equal(array, whole)


def test_copies_go_with_their_mapping(file: Path, asked: list[int]) -> None:
    for _ in range(3):
        asked.clear()
        array = map_file(file)
        assert move(mapping(array), lambda: PLENTY, threading.Event())
        at = array.ctypes.data
        del array
        assert huge_pages._in_huge_pages(at, at + SIZE) == 0
    assert not huge_pages._moved


def test_without_room_nothing_is_moved(file: Path) -> None:
    array = map_file(file)
    assert move(mapping(array), lambda: SIZE - 1, threading.Event()) == 0
    assert mapping(array) not in huge_pages._moved


MOST = [(SIZE, "1", True), (SIZE // 2, "1", False), (SIZE, "0", False)]


@pytest.mark.parametrize(("most", "variable", "moves"), MOST)
def test_a_mover_moves_what_is_needed(
    file: Path, monkeypatch: pytest.MonkeyPatch, most: int, variable: str, moves: bool
) -> None:
    monkeypatch.setenv(huge_pages.VARIABLE, variable)
    array = map_file(file)
    whole = array.copy()
    wanted = threading.Event()

    def room() -> int:
        wanted.set()
        return PLENTY

    mover = Mover([array[:9], array[HUGE:]], most, room)
    assert wanted.wait(60 if moves else 0.2) == moves
    mover.close()
    mover.close()
    assert np.array_equal(array, whole)
