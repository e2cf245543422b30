"""Which files are taken for the library."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.errors import UsageError
from toolkit.runners.native import library


@pytest.mark.parametrize("stale", [False, True], ids=["older than the number", "another number"])
def test_one_of_another_version_is_refused_before_it_is_used(
    stale: bool, tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "library.so"
    shutil.copy(library.library_path() if stale else next(Path(np.__file__).parent.rglob("_umath_linalg*.so")), file)
    found = str(library.VERSION) if stale else "None"
    expected = library.VERSION + stale
    monkeypatch.setattr(library, "VERSION", expected)
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(file))
    with pytest.raises(UsageError) as caught:
        drive("llama")
    assert str(caught.value).endswith(
        f"{file}: made by another version of the package (found {found}, expected {expected}); build it again with "
        "python -m toolkit.runners.native.build"
    )
    library.explain_mapped_faults()  # and loading a model for another runner does without it
