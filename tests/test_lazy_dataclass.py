"""Our ``dataclass`` against the library's, class by class: what both make of the same body behaves the same."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from toolkit.base import lazy_dataclass

T = TypeVar("T")
Decorator = Callable[..., Any]


def plain(dataclass: Decorator) -> type:
    @dataclass
    class Plain:
        """Mutable."""

        a: int
        b: str = "b"
        c: list[int] = field(default_factory=list)

    return Plain


def frozen(dataclass: Decorator) -> type:
    @dataclass(frozen=True)
    class Frozen(Generic[T]):
        kind: ClassVar[str] = "frozen"
        a: int
        b: Any = 2.5
        hidden: int = field(default=1, repr=False, compare=False)
        unhashed: Any = field(default_factory=list, hash=False)
        made: dict[str, int] = field(default_factory=dict, init=False, compare=False)

        @cached_property
        def twice(self) -> int:
            return 2 * self.a

    return Frozen


def derived(dataclass: Decorator) -> type:
    @dataclass(frozen=True)
    class Base:
        a: int
        b: int = 1

    @dataclass(frozen=True)
    class Derived(Base):
        b: int = 7
        c: tuple[int, ...] = ()

    return Derived


def undecorated(dataclass: Decorator) -> type:
    class Below(derived(dataclass)):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)

    return Below


def named(dataclass: Decorator) -> type:
    @dataclass(kw_only=True)
    class Named:
        b: int = 3
        a: int
        c: int = field(default=4, kw_only=False)

    return Named


def after(dataclass: Decorator) -> type:
    @dataclass
    class After:
        a: int
        total: int = field(init=False)

        def __post_init__(self) -> None:
            if self.a == 13:
                raise ValueError("13")
            self.total = self.a + 1

    return After


def by_identity(dataclass: Decorator) -> type:
    @dataclass(frozen=True, eq=False)
    class ByIdentity:
        a: Any = None

    return ByIdentity


def own_methods(dataclass: Decorator) -> type:
    @dataclass(frozen=True)
    class Own:
        a: int = 0

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    return Own


def own_eq(dataclass: Decorator) -> type:
    @dataclass(frozen=True)
    class OwnEq:
        a: int = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self))

    return OwnEq


def own_init(dataclass: Decorator) -> type:
    @dataclass
    class OwnInit:
        a: int = 0

        def __init__(self, *given: int) -> None:
            self.a = sum(given)

    return OwnInit


def empty(dataclass: Decorator) -> type:
    @dataclass(frozen=True)
    class Empty:
        """Nothing."""

    return Empty


MADE = [plain, frozen, derived, undecorated, named, after, by_identity, own_methods, own_eq, own_init, empty]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1, 2), {}),
    ((1, float("nan")), {}),
    ((1, [2], 3), {}),
    ((13,), {}),
    ((1, 2, 3, 4, 5, 6), {}),
    ((), {"a": 1}),
    ((), {"a": 1, "b": 2, "c": [3]}),
    ((1,), {"a": 1}),
    ((1,), {"other": 1}),
]


def told(do: Callable[[], Any]) -> Any:
    """What comes of it, or how it fails, without the names of this file."""
    try:
        found = do()
    except Exception as e:
        return type(e), str(e)
    return repr(found) if dataclasses.is_dataclass(found) and not isinstance(found, type) else found


def behaviour(kind: type) -> Any:
    def of(given: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
        def make() -> Any:
            return kind(*given, **by_name)

        first = told(make)
        if isinstance(first, tuple):
            return first
        one, other = make(), make()
        return [
            first,
            vars(one),
            told(lambda: dataclasses.asdict(one)),
            told(lambda: dataclasses.replace(one, a=9)),
            told(lambda: dataclasses.replace(one, nothing=9)),
            told(lambda: copy.deepcopy(one)),
            (one == one, one == other, one == copy.copy(one), one != other, one == 3, one == object()),
            told(lambda: hash(one) == hash(other)),
            told(lambda: setattr(one, "a", 4)),
            told(lambda: setattr(one, "z", 4)),
            told(lambda: delattr(one, "a")),
            told(lambda: delattr(one, "z")),
            told(lambda: one.twice),
            vars(one),
        ]

    return [
        str(inspect.signature(kind)),
        [(f.name, f.init, f.kw_only) for f in dataclasses.fields(kind)],
        kind.__match_args__,  # type: ignore[attr-defined]
        [of(*call) for call in CALLS],
        kind.__init__.__qualname__,
        kind.__hash__ is None,
    ]


@pytest.mark.parametrize("made", MADE)
def test_it_makes_what_the_library_makes(made: Callable[[Decorator], type]) -> None:
    assert repr(behaviour(made(lazy_dataclass.dataclass))) == repr(behaviour(made(dataclasses.dataclass)))


def test_no_method_is_compiled_before_it_is_called() -> None:
    """Which counts what ``exec`` is given, in a process of its own: ``plain`` with each decorator, then an object."""
    code = """
import builtins, dataclasses, sys
from dataclasses import field
from toolkit.base import lazy_dataclass
counted, run = [], builtins.exec
def counting(*given):
    counted.append(1)
    return run(*given)
builtins.exec = counting
def body(dataclass):
    @dataclass(frozen=True)
    class Plain:
        a: int
        b: list = field(default_factory=list)
    return Plain
kind = body(lazy_dataclass.dataclass)
made = len(counted)
kind(1), kind(2), kind(1) == kind(2), repr(kind(1))
print(made, len(counted))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.split() == ["0", "1"]


def test_one_that_holds_itself_is_shown() -> None:
    kind = plain(lazy_dataclass.dataclass)
    one = kind(1)
    one.c.append(one)
    assert "..." in repr(one)


def test_threads_may_make_the_first_objects_together() -> None:
    for _ in range(50):
        kind, found = frozen(lazy_dataclass.dataclass), []
        start = threading.Barrier(4)

        def make(kind: Any = kind, found: list[Any] = found, start: threading.Barrier = start) -> None:
            start.wait(60)
            found.append(kind(1))

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [kind(1)] * 4


@lazy_dataclass.dataclass(frozen=True)
class Kept:
    a: int
    b: tuple[int, ...] = (1, 2)


def test_it_is_pickled_and_matched() -> None:
    one = pickle.loads(pickle.dumps(Kept(3)))
    assert one == Kept(3)
    match one:
        case Kept(a, (first, _)):
            assert (a, first) == (3, 1)
        case _:
            pytest.fail("not matched")


def deriving(dataclass: Decorator, derives: Decorator, frozen_too: bool) -> Any:
    """What comes of one that is frozen where another, frozen or not, is derived from it by ``derives``."""

    @dataclass(frozen=True)
    class Base:
        a: int

    def derive() -> Any:
        @derives(frozen=frozen_too)
        class Derived(Base):
            b: int = 2

        return Derived(1), told(lambda: setattr(Derived(1), "a", 2)), told(lambda: delattr(Derived(1), "b"))

    return told(derive)


@pytest.mark.parametrize("frozen_too", [True, False])
@pytest.mark.parametrize("derives", [lazy_dataclass.dataclass, dataclasses.dataclass])
def test_users_may_derive_from_it_as_from_the_librarys(derives: Decorator, frozen_too: bool) -> None:
    expected = repr(deriving(dataclasses.dataclass, dataclasses.dataclass, frozen_too))
    assert repr(deriving(lazy_dataclass.dataclass, derives, frozen_too)) == expected


def test_what_it_says_of_itself_is_what_the_librarys_says() -> None:
    for made in MADE:
        ours, theirs = (
            made(d).__dict__.get("__dataclass_params__") for d in (lazy_dataclass.dataclass, dataclasses.dataclass)
        )
        assert str(ours) == str(theirs)


def test_an_object_that_is_called_has_the_signature_of_its_call() -> None:
    @lazy_dataclass.dataclass
    class Scaled:
        by: int

        def __call__(self, x: float) -> float:
            return self.by * x

    assert [*inspect.signature(Scaled).parameters] == ["by"]
    assert [*inspect.signature(Scaled(2)).parameters] == ["x"]


def test_a_mutable_default_is_refused_as_the_librarys() -> None:
    with pytest.raises(ValueError, match="mutable default"):

        @lazy_dataclass.dataclass
        class Wrong:
            a: list[int] = []  # noqa: RUF012
