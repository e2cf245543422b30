"""What transformers lists as causal language models: it runs here, or ``lacking.py`` says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolkit.models import lacking
from toolkit.models.registry import families

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models-that-do-not-run.md"


def runs() -> set[str]:
    return {name for family in families() for name in family.architectures}


def test_each_architecture_stands_once_and_none_of_them_runs() -> None:
    named = [name for names in lacking.NEEDS.values() for name in names]
    assert len(named) == len(set(named)) and all(re.fullmatch(r"\w+", name) for name in named)
    assert not set(named) & runs()
    assert not set(lacking.ELSEWHERE) & (runs() | set(named))
    assert set(lacking.ELSEWHERE.values()) <= runs()


def test_the_page_has_the_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = lacking.table()
    assert lacking.TRIED in text
    assert "\n".join(rows) in text, f"{DOCUMENT.name}: expected this table\n" + "\n".join(rows)


def test_transformers_lists_no_other() -> None:
    """Of the version that was gone through; what a newer one lists is printed, and fails nothing."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LISTED

    found = {name for names in LISTED.values() for name in ([names] if isinstance(names, str) else names)}
    new = sorted(found - runs() - set(lacking.LACKING) - set(lacking.ELSEWHERE))
    print(f"transformers {transformers.__version__}: {len(found)} causal language models, {len(new)} not gone through")
    print(*new, sep="\n")
    if transformers.__version__ != lacking.TRIED:
        pytest.skip(f"{len(new)} that transformers {transformers.__version__} lists are not gone through: {new}")
    assert not new
