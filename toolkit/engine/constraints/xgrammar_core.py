"""xgrammar's C++ classes without the Python around them, which imports torch and transformers: seconds, and memory
that neither the engine on the native runner nor a box has use for.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _load() -> Any:
    whole, torch = sys.modules.get("xgrammar"), "torch" in sys.modules
    if whole is None:
        spec = find_spec("xgrammar")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("No module named 'xgrammar'", name="xgrammar")
        bare = ModuleType("xgrammar")  # in the package's place while its parts are loaded, so that it is not run
        bare.__path__ = list(spec.submodule_search_locations)
        sys.modules["xgrammar"] = bare
    if not torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi imports it where it can, and needs it nowhere
    try:
        import xgrammar.load_binding  # noqa: F401  # it must come first
        from xgrammar.base import _core
    finally:
        if whole is None:
            del sys.modules["xgrammar"]  # whoever imports it gets all of it
        if not torch:
            del sys.modules["torch"]
    return _core


CORE = _load()  # GrammarCompiler, CompiledGrammar, GrammarMatcher, TokenizerInfo

# How texts of a schema are written: one blank after each comma and colon, as models were trained on. Where any number
# may stand, they write blanks on and on, and the answer is cut.
_ANY_WHITESPACE, _INDENT, _SEPARATORS, _STRICT, _MOST_BLANKS = False, None, (", ", ": "), True, None
STYLE = (_ANY_WHITESPACE, _INDENT, _SEPARATORS, _STRICT, _MOST_BLANKS)
ANY_ORDER = False  # of an object's properties


def vocabulary(tokens: list[bytes], size: int, stops: list[int]) -> Any:
    """xgrammar's TokenizerInfo: the bytes of each token (empty: none that text is made of), padded to ``size``."""
    raw = 0  # VocabType.RAW: tokens are the bytes that they stand for
    return CORE.TokenizerInfo(tokens, raw, size, stops or None, False)


def unreachable(token: bytes) -> bytes:
    """The bytes of a special token, so that no text has it, and a structural tag can ask for it by its id."""
    return b"\xff" + token
