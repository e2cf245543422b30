"""For which processors the native library is compiled."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from toolkit.runners.native import build, library


def test_all_instruction_sets_or_this_processors_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.ISAS_VARIABLE, raising=False)
    here = build.compiler() or "c++"
    assert tuple(build.wanted_isas(here)) == library.ISAS
    monkeypatch.setenv(build.ISAS_VARIABLE, "here")
    best, *rest = build.wanted_isas(here)
    assert library.isas()[0] in (best, *rest)  # the other where the system refuses tiles
    assert rest == (["avx512vnni"] if best == "amx" else [])  # which does what tiles do not
    monkeypatch.setenv(build.ISAS_VARIABLE, "avx9")
    with pytest.raises(build.BuildError, match="TOOLKIT_NATIVE_ISAS: expected all or here, found 'avx9'"):
        build.wanted_isas(here)


@pytest.fixture
def arm_compiler(monkeypatch: pytest.MonkeyPatch) -> str:
    """A C++ compiler for ARM, on another machine."""
    name = "aarch64-linux-gnu-g++"
    if os.uname().machine == "aarch64" or shutil.which(name) is None:
        pytest.skip(f"no cross compiler ({name})")
    monkeypatch.setenv("CXX", name)
    monkeypatch.delenv(build.ISAS_VARIABLE, raising=False)
    return name


def test_a_cross_compiler_compiles_for_its_own_processors(
    arm_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels as for the best processor; scripts/testing/arm runs what all of it gives."""
    assert tuple(build.wanted_isas(arm_compiler)) == ("i8mm", "dotprod", "neon", "generic")
    file = tmp_path / "compile_commands.json"
    build.write_commands(file)
    for entry in json.loads(file.read_text()):
        words, source = entry["arguments"], Path(entry["file"])
        if source.parent == build.kernel_folder():
            assert words[0] == arm_compiler and "-DTK_ISA=generic" not in words
            command = [*words[: words.index("-c")], "-O0", "-fsyntax-only", source]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0 and not done.stderr, done.stderr
    monkeypatch.setenv(build.ISAS_VARIABLE, "here")
    with pytest.raises(build.BuildError, match=r"TOOLKIT_NATIVE_ISAS=here: .* compiles for aarch64, this machine is"):
        build.wanted_isas(arm_compiler)


TABLES = """
#include <cstdio>
#include "ops.h"
namespace tk {
#define TABLE(isa) namespace isa { extern const Ops table; const Ops table = {#isa}; }
TABLE(i8mm) TABLE(dotprod) TABLE(neon) TABLE(generic)
}
int main(int count, char** names) {
    const char* why;
    const tk::Ops* ops = tk::select_ops(count > 1 ? names[1] : "", &why);
    std::puts(ops ? ops->name : why);
}
"""


def test_the_best_that_an_arm_processor_has_is_chosen(arm_compiler: str, tmp_path: Path) -> None:
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("no emulator (qemu-aarch64-static)")
    source, program, kernels = tmp_path / "tables.cpp", tmp_path / "tables", build.kernel_folder()
    source.write_text(TABLES)
    have = [f"-DTK_HAVE_{isa}" for isa in build.wanted_isas(arm_compiler)]
    command = [arm_compiler, "-std=c++17", "-static", "-w", *have, f"-I{kernels}", "-o", program]
    subprocess.run([*command, source, kernels / "dispatch.cpp"], check=True)

    def chosen(processor: str, *isa: str) -> str:
        return subprocess.run([qemu, "-cpu", processor, program, *isa], capture_output=True, text=True).stdout.strip()

    assert chosen("max") == "i8mm"
    assert chosen("neoverse-n1") == "dotprod"
    assert chosen("cortex-a72") == "neon"
    assert chosen("cortex-a72", "dotprod") == "this processor lacks it"
    assert chosen("max", "avx2") == "no such instruction set in this build"


def test_compile_commands_name_every_source_and_can_be_run(tmp_path: Path) -> None:
    file = tmp_path / "compile_commands.json"
    build.write_commands(file)
    entries = {Path(entry["file"]): entry for entry in json.loads(file.read_text())}
    assert set(entries) == {*build.HERE.rglob("*.cpp"), *build.kernel_folder().rglob("*.cpp")}
    if build.compiler() is not None:
        entry = entries[build.HERE / "system" / "pool.cpp"]
        command = [word for word in entry["arguments"] if word != "-c"]
        done = subprocess.run([*command[: command.index("-o")], "-fsyntax-only"], cwd=entry["directory"])
        assert done.returncode == 0


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--hepl", 2)])
def test_nothing_is_built_where_nothing_was_asked_for(
    argument: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*args: object, **more: object) -> None:
        raise AssertionError("it builds")

    monkeypatch.setattr(build, "build", never)
    monkeypatch.setattr("sys.argv", ["build.py", argument])
    with pytest.raises(SystemExit) as left:
        build.main()
    out, err = capsys.readouterr()
    assert left.value.code == code and "--sanitize" in out + err


@pytest.mark.parametrize(
    ("arguments", "built"),
    [
        ([], (None, None)),
        (["--debug"], (None, "debug")),
        (["--sanitize", "here.so"], (Path("here.so"), "sanitized")),
    ],
)
def test_options_name_what_is_built(
    arguments: list[str], built: tuple[Path | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path | None, str | None]] = []
    monkeypatch.setattr(build, "build", lambda file, *, other: asked.append((file, other)))
    monkeypatch.setattr("sys.argv", ["build.py", *arguments])
    build.main()
    assert asked == [built]


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_other_builds_leave_the_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for gdb lies beside it, of objects that no compiler has optimized."""
    source = tmp_path / "one.cpp"
    source.write_text(
        "#ifdef __OPTIMIZE__\nint optimized = 1;\n#else\nint optimized = 0;\n#endif\n"
        'extern "C" __attribute__((visibility("default"))) int is_optimized() { return optimized; }\n'
    )
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "kernel_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "_units", lambda kernels, isas: [(source, "one", [])])
    for other, name, optimized in ((None, "_native.so", 1), ("debug", "_native_debug.so", 0)):
        made = build.build(objects=tmp_path / name.removesuffix(".so"), other=other)
        assert made == tmp_path / name
        assert ctypes.CDLL(str(made)).is_optimized() == optimized


def test_without_a_compiler_the_build_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", ["build.py"])
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler found"):  # a text: Python prints it and leaves with 1
        build.main()
