"""What is read from listings of machine code: loops, and the instructions that do not belong in them."""

from __future__ import annotations

import pytest

from toolkit.kernels.machine_code import Usage, costly, faults, inner_loops, occupancy, shown


def listing(*instructions: str) -> str:
    """As ``cuobjdump -sass`` prints them; numbers after ``@`` are indices of instructions."""
    lines = []
    for i, text in enumerate(instructions):
        *words, last = text.split()
        target = f"{16 * int(last[1:]):#x}" if last[0] == "@" and last[1:].isdigit() else last
        lines.append(f"        /*{16 * i:04x}*/    {' '.join([*words, target])} ;    /* 0x000000000000794d */")
    return "\n".join(lines)


def test_a_loop_within_a_loop_is_the_inner_one():
    code = listing("MOV a", "OUTER a", "INNER b", "@P0 BRA @2", "OUTER c", "@!P1 BRA @1", "STG d", "EXIT", "BRA @8")
    assert inner_loops(code) == [["INNER b", "@P0 BRA 0x20"]]


def test_code_laid_elsewhere_belongs_to_its_loop_and_what_lies_between_does_not():
    code = listing("MOV a", "ADD b", "@P1 BRA @6", "MUL c", "@P0 BRA @1", "EXIT", "RARE d", "BRA @3", "BRA @8")
    assert inner_loops(code) == [["ADD b", "@P1 BRA 0x60", "MUL c", "@P0 BRA 0x10", "RARE d", "BRA 0x30"]]


def test_two_ways_back_to_one_head_are_one_loop_and_a_jump_into_its_middle_is_none():
    code = listing("MOV a", "ADD b", "@P1 BRA @1", "MUL c", "BRA P0, @1", "EXIT")
    assert [len(loop) for loop in inner_loops(code)] == [4]
    jump = listing("@P0 BRA @2", "ADD a", "MUL b", "@P1 BRA @1", "EXIT")  # entered at 1 and at 2: no loop's head
    assert inner_loops(jump) == []


@pytest.mark.parametrize(
    "instruction, name",
    [
        ("I2F.U32.RP R0, R1", "integer division"),
        ("I2FP.F32.S32 R0, R1", "integer to float"),
        ("I2F.S8 R0, R1", "integer to float"),
        ("@!P0 CALL.REL.NOINC @4", "call"),
    ],
)
def test_what_does_not_belong_in_an_inner_loop_is_found_there_alone(instruction, name):
    inside = listing("MOV a", instruction, "@P0 BRA @1", "EXIT", "MUL b", "RET.REL.NODEC R2 0x0")
    assert costly(inside) == [name]
    assert costly(listing("MOV a", "ADD b", "@P0 BRA @1", instruction, "EXIT", "RET.REL.NODEC R2 0x0")) == []
    usage = Usage(64, 0, 0)
    assert faults(inside, usage, 0, 1024, 4, frozenset(), frozenset()) == (f"{name} in an inner loop",)
    assert faults(inside, usage, 0, 1024, 4, frozenset(), frozenset({name})) == ()


def test_a_far_jump_out_of_a_loop_is_no_call():
    code = listing("MOV a", "ADD b", "@P0 CALL.REL.NOINC @4", "BRA @1", "MUL c", "EXIT", "RET.REL.NODEC R2 0x0")
    assert inner_loops(code) == [["ADD b", "BRA 0x10"]] and costly(code) == []


def test_what_a_listing_shows():
    code = "LDG.E.128.CONSTANT R0 ; LDGSTS.E.BYPASS.LTC128B.128 [R4] ; LDSM.16.M88.4 R8 ; HGMMA.64x64x16.F32 R24 ;"
    assert set(shown(code)) == {*("vector", "async", "async vector", "ldmatrix", "mma", "wgmma", "no conversion")}
    assert set(shown("QMMA.16832.F32 R0 ; I2FP.F32.S32 R1 ; LDG.E.64 R2 ;")) == {"mma"}
    assert set(shown("IMMA.16832.S8.S8 R0 ; UTCHMMA gdesc[UR4] ;")) == {"mma", "no conversion"}


@pytest.mark.parametrize(
    "architecture, threads, registers, shared, blocks",
    [(90, 128, 80, 36880, 6), (86, 128, 80, 12816, 6), (80, 256, 255, 0, 1), (86, 128, 32, 100 * 1024, 0)],
)
def test_occupancy(architecture, threads, registers, shared, blocks):
    """As the CUDA occupancy calculator counts: a warp's registers by 256, a block's shared memory and 1 KB more."""
    assert occupancy(architecture, threads, registers, shared) == blocks
