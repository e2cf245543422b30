"""The ahead-of-time build of the CUDA kernels and its checks; compiling itself is slow and wants nvcc."""

from __future__ import annotations

import json
import re

import pytest

from toolkit.kernels.cuda import build, check
from toolkit.kernels.cuda import plan as planning
from toolkit.kernels.machine_code import Usage
from toolkit.kernels.triton.launch import shared_limit

GOOD = """LDG.E.128 R16, desc[UR8][R70.64] ; LDGSTS.E.BYPASS.LTC128B.128 [R4], desc[UR8][R22.64] ;
LDS.128 R24, [R4] ; LOP3.LUT R29, R29, 0xf000f ; HMMA.16816.F32.BF16 R32, R32, R16, RZ ; STG.E.128 [R2], R4 ;"""


def test_what_machine_code_shows():
    built = check.judge("few_bfloat16_w4_s64_n1", 90, 1.0, Usage(64, 0, 0), GOOD)
    assert built.faults == () and built.blocks == 4 and built.shared == 49152
    assert (built.op, built.label, built.dtype) == ("linear_group_int", "few-w4-s64-n1", "bfloat16")


@pytest.mark.parametrize(
    "name, usage, code, fault",
    [
        ("few_float16_w4_s64_n1", (64, 8, 0), GOOD, "spills: 8 bytes of stack, 0 of local memory"),
        ("few_float16_w4_s64_n1", (64, 0, 0), GOOD + " STL [R1], R2 ;", "spills: 0 bytes of stack"),
        ("few_float16_w4_s64_n1", (64, 0, 0), GOOD + " I2F.RP R1, R2 ;", "no conversion missing"),
        ("few_float16_w4_s64_n1", (64, 0, 0), GOOD + " I2FP.F32.S32 R1, R2 ;", "no conversion missing"),
        ("few_float16_w4_s64_n1", (64, 0, 0), GOOD.replace("LDG.E.128", "LDG.E"), "vector missing"),
        ("few_float16_w4_s64_n1", (64, 0, 0), GOOD.replace("LDGSTS", "LDG"), "async vector missing"),
        ("tile_float16_w4_s64_n4", (64, 0, 0), GOOD.replace("HMMA", "FFMA"), "mma missing"),
        ("tile_float16_w4_s64_n4", (64, 0, 0), GOOD.replace("LOP3", "SHF"), "lop3 missing"),
        ("expand_float16_w4", (64, 0, 0), GOOD.replace("STG.E.128", "STG.E"), "stores missing"),
    ],
)
def test_what_does_not_hold_is_reported(name, usage, code, fault):
    assert any(f.startswith(fault) for f in check.judge(name, 90, 1.0, Usage(*usage), code).faults)


def test_too_much_shared_memory_is_reported():
    faults = check.judge("tile_float16_w8_s64_n16", 86, 1.0, Usage(64, 0, 0), GOOD).faults
    assert "149776 bytes of shared memory, more than 101376" in faults


@pytest.mark.parametrize("architecture", build.ARCHITECTURES)
def test_every_gpu_has_a_kernel_for_every_form(architecture):
    launched = check.launched(architecture)
    assert set(launched) <= set(planning.names())
    assert all(planning.shared_bytes(name) <= shared_limit(architecture) for name in launched)
    if shared_limit(architecture) > 128 * 1024:
        assert launched == sorted(planning.names())


def test_a_build_without_nvcc_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "nvcc", lambda: None)
    with pytest.raises(build.BuildError, match="no nvcc found"):
        build.build(tmp_path / "k.fatbin")


def test_the_fatbin_and_its_note(monkeypatch, tmp_path):
    """A compiler that writes down what it is asked for."""
    fake = tmp_path / "nvcc"
    fake.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version) echo "release 12.8, V12.8.1"; exit;; --list-gpu-code) echo sm_90a sm_100; exit;;\n'
        "esac\n"
        'for a; do [ "$last" = -o ] && out=$a; last=$a; done; echo "$@" > "$out"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(fake))
    target = build.build(tmp_path / "k.fatbin", tmp_path / "cache")
    flags = target.read_text()
    for wanted in (
        "compute_80,code=compute_80",
        "code=sm_80",
        "code=sm_86",
        "code=sm_89",
        "code=sm_90a",
        "code=sm_100",
    ):
        assert wanted in flags, wanted
    assert "sm_120" not in flags, "this compiler does not know it"
    note = json.loads((tmp_path / "k.json").read_text())
    assert note == {"cuda": 12080, "architectures": [80, 86, 89, 90, 100], "sources": build.sources()}
    flags = build.build(tmp_path / "one.fatbin", tmp_path / "cache", only=90).read_text()
    assert "code=sm_90a" in flags and "code=compute_80" in flags and "code=sm_80" not in flags
    assert json.loads((tmp_path / "one.json").read_text())["architectures"] == [90]


def test_the_hardware_is_touched_in_one_place():
    for source in build.HERE.glob("*.cu*"):
        if source.name != "hardware.cuh":
            found = re.findall(
                r"\basm\b|__syncthreads|__shfl\w*|\batomic\w+|__ldg|threadIdx|blockIdx", source.read_text()
            )
            assert not found, (source.name, found)


if build.nvcc() is not None:

    @pytest.mark.slow
    @pytest.mark.parametrize("architecture", [80, 90])
    def test_the_kernels_compile_and_show_what_they_claim(architecture):
        found = list(check.check(architecture))
        assert len(found) == len(planning.names())
        assert [f for f in found if isinstance(f, str) or f.faults] == []
