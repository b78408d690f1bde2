"""Loops and spills in the listings of nvdisasm."""

import pytest

from coneheads.lab.gpu_instructions import (
    blocks_of,
    loop_over_tiles,
    loops,
    multiplies_on_tensor_cores,
    spills,
    successors,
)

# Two loops around the tiles' one, which has a loop of its own that only some pass through.
NESTED = """
        .headerflags    @"EF_CUDA_TEXMODE_UNIFIED"
.text.forward:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P6 EXIT ;
.L_x_0:
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0030*/                   LDS R4, [R2] ;
        /*0040*/                   FSETP.GEU.AND P0, PT, R4, RZ, PT ;
        /*0050*/               @P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   FADD R5, R4, -R6 ;
        /*0070*/                   FFMA R7, R5, R5, R7 ;
        /*0080*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0090*/                   MUFU.EX2 R8, R7 ;
        /*00a0*/                   MUFU.SQRT R9, R8 ;
        /*00b0*/                   BRA.U UP0, `(.L_x_1) ;
        /*00c0*/              @!P2 BRA `(.L_x_0) ;
        /*00d0*/                   MUFU.EX2 R8, R7 ;
        /*00e0*/                   EXIT ;
.L_x_4:
        /*00f0*/                   BRA `(.L_x_4);
"""

STRAIGHT = """
        /*0000*/                   MUFU.EX2 R8, R7 ;
        /*0010*/                   EXIT ;
.L_x_0:
        /*0020*/                   BRA `(.L_x_0);
"""


def test_the_loop_over_tiles_is_the_innermost_with_exponentials_and_its_own_loops_are_apart():
    loop = loop_over_tiles(NESTED)
    assert loop.kinds == {"LDS": 1, "FSETP": 1, "BRA": 2, "MUFU": 2}
    assert loop.instructions == 6
    assert loop.nested == 3


def test_of_two_loops_one_after_the_other_the_larger_counts():
    text = """
.L_x_0:
        /*0000*/                   MUFU.EX2 R8, R7 ;
        /*0010*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   MUFU.EX2 R8, R7 ;
        /*0030*/                   FADD R8, R8, R7 ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
    """
    assert loop_over_tiles(text).kinds == {"MUFU": 1, "FADD": 1, "BRA": 1}


def test_without_a_loop_that_takes_exponentials_nothing_is_counted():
    assert loop_over_tiles(STRAIGHT) is None
    assert loop_over_tiles("") is None


def test_a_branch_without_a_predicate_goes_nowhere_else():
    blocks = blocks_of(NESTED)
    following = successors(blocks)
    numbers = {block.label: i for i, block in enumerate(blocks)}
    first, inner, last, end = (numbers[f".L_x_{i}"] for i in range(1, 5))
    assert following[end] == {end}
    assert following[inner] == {inner, inner + 1}
    assert following[last] == {first, last + 1}


def test_loops_are_the_strongly_connected_parts():
    following = [{1}, {2}, {1, 3}, {3}, {0}]
    assert loops(set(range(5)), following) == [{1, 2}, {3}]
    assert loops({0, 2, 3, 4}, following) == [{3}]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("STL [R1+0x8], R6", 1),
        ("@P0 LDL.LU R20, [R1]", 1),
        ("LDL.64 R2, [R1]", 1),
        ("LDS R2, [R1]", 0),
        ("STG.E [R2.64], R1", 0),
        ("LDGSTS.E [R2], [R4.64]", 0),
    ],
)
def test_only_local_memory_is_a_spill(instruction, expected):
    assert spills(f"        /*0a80*/                   {instruction} ;") == expected


@pytest.mark.parametrize("name", ["HMMA.1688.F32.TF32", "HGMMA.64x64x8.F32.TF32", "UTCHMMA"])
def test_products_on_tensor_cores_are_seen(name):
    assert multiplies_on_tensor_cores(f"/*0000*/ {name} R4, R8, R9, R4 ;")
    assert not multiplies_on_tensor_cores(NESTED)
