"""Patterns as ECMA-262 has them, which xgrammar reads otherwise, or writes as no JSON."""

from __future__ import annotations

import re

_LEXEMES = re.compile(
    r"""\\(?:u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|c[A-Za-z]|.)
    |\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)
    |\((?:\?(?:[:=!]|<[=!]))?
    |[*+?]|\{\d+(?:,\d*)?\}
    |.""",
    re.VERBOSE | re.DOTALL,
)
_CONTROLS = re.compile(r"[\x00-\x1f]|\\(?:[tnrfv0]|c[A-Za-z]|x[01]|u00[01]|u\{0*1?[0-9a-fA-F]\})")
_ESCAPED = re.compile(r'"|\\["\\]|\\(?:x|u00|u\{0*)(?:22|5[cC])\}?')
_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_EDGES = ("\\b", "\\B")
_STRANGE = re.compile(r"\\(?![dDwWsSnrtfvbBxucpPk])[A-Za-z]")  # escapes that say nothing: each is read as its letter
_NO_END = r"[^\n\r]"  # of a line


def strange_escape(pattern: str) -> str | None:
    """The first escape that means nothing in a pattern, as Python's ``\\A`` and ``\\Z``; None where there is none."""
    lexemes = _LEXEMES.findall(pattern)
    return next((found[0] for lexeme in lexemes if (found := _STRANGE.search(_unescaped(lexeme)))), None)


def _unescaped(lexeme: str) -> str:
    """Without backslashes that stand for themselves."""
    return lexeme.replace("\\\\", "")


def within_lines(pattern: str) -> str:
    """The same, whose dots leave out the ends of lines: xgrammar's do not."""
    return "".join(_NO_END if lexeme == "." else lexeme for lexeme in _LEXEMES.findall(pattern))


def fault(pattern: str) -> str | None:
    """Why no answer can be held to ``pattern``, to be read behind the word that has it; None where it can."""
    lexemes = _LEXEMES.findall(pattern)
    if any(lexeme in _AROUND or lexeme in _EDGES for lexeme in lexemes):
        return ", which looks at what is around"
    if any(_CONTROLS.search(lexeme) for lexeme in lexemes if lexeme[:2] not in ("\\\\", "[^")):
        return " of control characters"
    if strange := strange_escape(pattern):
        return f" with {strange}, which means nothing in ECMA-262"
    if any(_ESCAPED.fullmatch(lexeme) for lexeme in lexemes):
        return " of quotes or backslashes"
    return ", in which ^ or $ is not at an end" if _anchored_within(pattern, lexemes) else None


def _anchored_within(pattern: str, lexemes: list[str]) -> bool:
    """Whether ``^`` or ``$`` may stand elsewhere than at an end of all that fits; xgrammar takes each for such."""
    inner = any(lexeme in "^$" for lexeme in lexemes[1:-1]) and re.search(r"\)[*+?{]", pattern) is not None
    there = [lexeme[0] if lexeme[0] in "()" else lexeme for lexeme in lexemes]
    back = [{"(": ")", ")": "("}.get(lexeme, lexeme) for lexeme in reversed(there)]
    return inner or not (_at_start(there, "^") and _at_start(back, "$"))


def _at_start(lexemes: list[str], anchor: str) -> bool:
    """Whether nothing stands before ``anchor`` in any way through the groups."""
    heads = [True]  # whether nothing was before each open group,
    head = True  # and whether nothing was before what comes now
    for lexeme in lexemes:
        if lexeme == anchor and not head:
            return False
        if lexeme == "(":
            heads.append(head)
        elif lexeme == ")":
            head = False
            if len(heads) > 1:
                heads.pop()
        elif lexeme == "|":
            head = heads[-1]
        elif lexeme not in "^$":
            head = False
    return True
