"""For which processors the native library is compiled."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

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


def test_compile_commands_name_every_source_and_can_be_run(tmp_path: Path) -> None:
    file = tmp_path / "compile_commands.json"
    build.write_commands(file)
    entries = {Path(entry["file"]): entry for entry in json.loads(file.read_text())}
    assert set(entries) == {*build.HERE.glob("*.cpp"), *build.kernel_folder().glob("*.cpp")}
    if build.compiler() is not None:
        entry = entries[build.HERE / "pool.cpp"]
        command = [word for word in entry["arguments"] if word != "-c"]
        done = subprocess.run([*command[: command.index("-o")], "-fsyntax-only"], cwd=entry["directory"])
        assert done.returncode == 0
