"""For which processors the native library is compiled."""

from __future__ import annotations

import pytest

from toolkit.runners.native import build, library


def test_all_instruction_sets_or_this_processors_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.ISAS_VARIABLE, raising=False)
    everything = build.wanted_isas()
    assert everything[-1] == "generic" and set(everything) <= set(library.ISAS)
    monkeypatch.setenv(build.ISAS_VARIABLE, "here")
    (best,) = build.wanted_isas()
    assert best == library.isas()[0]  # as the processor itself says
    monkeypatch.setenv(build.ISAS_VARIABLE, "avx9")
    with pytest.raises(build.BuildError, match="TOOLKIT_NATIVE_ISAS: expected all or here, found 'avx9'"):
        build.wanted_isas()
