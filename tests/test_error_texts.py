"""The catalogue of what users are told where something is wrong: every ``raise`` of an error that is theirs to read,
its text read from the source with ``{}`` for what is filled in, and the form that all of them have."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
READ = {"ToolkitError": 0, "UsageError": 0, "BusyError": 0, "HopelessError": 0, "ApiError": 1}  # which argument is text
MOST = 16  # texts of one place that are looked at
LONGEST = 400  # characters, without what is filled in
HELPS = ("expected", ";", "give", "use ", "leave", "start", "choose", "not with", "try")  # what to do instead
Names = dict[str, list[ast.expr]]


class Told(NamedTuple):
    """Where a text is raised, and what it may be; none where the source does not say."""

    where: str
    error: str
    texts: list[str]


def texts_of(node: ast.expr, names: Names, depth: int = 0) -> list[str]:
    """What an expression may be, ``{}`` where that is not known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if depth > 4:
        return ["{}"]
    if isinstance(node, ast.JoinedStr):
        parts = [texts_of(part, names, depth) for part in node.values]
        return ["".join(texts) for texts, _ in zip(product(*parts), range(MOST), strict=False)]
    if isinstance(node, ast.FormattedValue):
        return texts_of(node.value, names, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = product(texts_of(node.left, names, depth + 1), texts_of(node.right, names, depth + 1))
        return ["".join(pair) for pair, _ in zip(sides, range(MOST), strict=False)]
    if isinstance(node, ast.IfExp):
        return texts_of(node.body, names, depth + 1) + texts_of(node.orelse, names, depth + 1)
    if isinstance(node, ast.Name) and node.id in names:
        return [text for value in names[node.id] for text in texts_of(value, names, depth + 1)][:MOST]
    return ["{}"]


def names_in(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Names:
    """What is assigned to names."""
    found: Names = defaultdict(list)
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name):
            found[target.id].append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, given in zip(target.elts, value.elts, strict=False):
                if isinstance(one, ast.Name):
                    found[one.id].append(given)
    return found


def told_in(path: Path) -> Iterator[Told]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owner = {
        node: function
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    everywhere, within = names_in(tree.body), dict[ast.AST, Names]()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
            continue
        error = ast.unparse(node.exc.func).rpartition(".")[2]
        if error not in READ or len(node.exc.args) <= READ[error]:
            continue
        function = owner.get(node)
        if function is not None and function not in within:
            within[function] = names_in(ast.walk(function))
        names = everywhere if function is None else everywhere | within[function]
        texts = [text for text in texts_of(node.exc.args[READ[error]], names) if text != "{}"]
        yield Told(f"{path.relative_to(ROOT)}:{node.lineno}", error, texts)


@pytest.fixture(scope="module")
def catalogue() -> list[Told]:
    paths = sorted(path for folder in ("toolkit", "commands") for path in (ROOT / folder).rglob("*.py"))
    return [told for path in paths for told in told_in(path)]


def test_nearly_every_text_is_in_the_catalogue(catalogue: list[Told]) -> None:
    unread = [told.where for told in catalogue if not told.texts]
    assert len(catalogue) > 1000 and len(unread) < 0.05 * len(catalogue), unread


def test_texts_are_lines_that_can_stand_in_others(catalogue: list[Told]) -> None:
    """A name may precede one, and advice follow: no full stop, no line break."""
    wrong = [
        (told.where, text)
        for told in catalogue
        for text in told.texts
        if "\n" in text or text.startswith(" ") or text.endswith((".", "!")) or len(text) > LONGEST
    ]
    assert not wrong


def test_texts_name_what_is_wrong(catalogue: list[Told]) -> None:
    """A field, an option or a file, and behind a colon what is the matter; or a sentence and what to do."""
    wrong = [
        (t.where, text) for t in catalogue for text in t.texts if not any(mark in text for mark in (":", "{}", ";"))
    ]
    assert not wrong


def test_whoever_misuses_something_is_told_what_to_do(catalogue: list[Told]) -> None:
    wrong = [
        (told.where, text)
        for told in catalogue
        if told.error == "UsageError"
        for text in told.texts
        if not any(word in text for word in (*HELPS, "{}"))
    ]
    assert not wrong
