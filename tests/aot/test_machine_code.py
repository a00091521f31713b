"""The audit's reading of machine code: opcodes, widths, tiles, occupancy, and the rules over its rows."""

from collections import Counter
from dataclasses import replace

import pytest

from tsattn.testing import audit_rules, machine_code
from tsattn.testing.audit import table
from tsattn.tuning.hardware import programs_per_multiprocessor

SASS = """
        /*0000*/                   LDG.E R12, desc[UR8][R2.64] ;
        /*0010*/               @P0 LDG.E.EF.128 R24, desc[UR14][R22.64] ;
        /*0020*/              @!P6 LDG.E.U16.CONSTANT R24, desc[UR14][R22.64] ;
        /*0030*/             @!UP0 LDGSTS.E.BYPASS.LTC128B.128 [R83], desc[UR8][R22.64], P2 ;
        /*0040*/                   LDGDEPBAR ;
        /*0050*/                   LDS.128 R4, [R5] ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8.reuse, R40, RZ ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0080*/                   UTMALDG.2D [UR8], [UR4] ;
        /*0090*/                   IMAD.MOV.U32 R2, RZ, RZ, RZ ;
        /*00a0*/                   NOP;
"""
GCN = """kernel:
	.file	1 "/k" "attend.py"
	.loc	1 13 23                         ; attend.py:13:23
	buffer_load_dwordx4 v[22:25], v4, s[12:15], 0 offen
	buffer_load_dword v4, s[12:15], 0 offen lds
	global_load_ushort v1, v0, s[0:1] ; a comment
	global_load_ubyte_d16 v1, v0, s[0:1]
	global_load_lds_dwordx4 v[2:3], off
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_nop 0
	; %bb.1:
.Lfunc_end0:
	v_mov_b32_e32 v0, 0
"""
TTGIR = """
#loc = loc("/k/attend.py":1:0)
#loc7 = loc("/k/attend.py":10:12)
#loc8 = loc("/k/attend.py":20:12)
#loc9 = loc("k"(#loc7))
#loc10 = loc(callsite(#loc8 at #loc))
module attributes {"ttg.num-warps" = 4 : i32, "ttg.threads-per-warp" = 32 : i32} {
    %a = tt.load %p : !tt.ptr<i32> loc(#loc)
    %k = tt.load %p, %m : tensor<64x128x!tt.ptr<bf16>, #blocked> loc(#loc9)
    %q = tt.load %p, %m : tensor<4x128x!tt.ptr<bf16>, #blocked> loc(#loc)
    %i = tt.load %p, %m : tensor<4096x!tt.ptr<i32>, #blocked> loc(#loc)
    %b = amdg.buffer_load %c[%o], %m {contiguity = 8 : i32} : !tt.ptr<bf16> -> tensor<16x128xbf16, #blocked> loc(#loc10)
    %l = ttg.local_load %s : !ttg.memdesc<64x128xbf16, #shared, #smem> -> tensor<64x128xbf16, #dot> loc(#loc)
}
"""
PTX = """
	.file	1 "/k/attend.py"
	.loc	1 10 12                         // attend.py:10:12
	// begin inline asm
	.loc	1 10 12
	mov.u32 %r1, 0x0;
	.loc	1 11 12
	mov.u32 %r2, 0x0;
	.loc	1 12 12
	@%p2 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd22 + 0 ];
	// end inline asm
	// begin inline asm
	cp.async.cg.shared.global [ %r7 + 0 ], [ %rd3 + 0 ], 0x10, %r4;
	// end inline asm
	.loc	1 12 12
	ld.global.b16 	%rs1, [%rd1];
"""


def test_sass_is_counted_by_opcode_and_width():
    code = machine_code.sass_instructions(SASS)
    assert len(code) == 10  # without the padding
    loads = [found for found in map(machine_code.sass_load, code) if found]
    assert loads == [("32", False), ("128", False), ("16", False), ("128", True), ("tma", True)]
    assert sum(map(machine_code.is_sass_mma, code)) == 2


def test_gcn_is_counted_by_opcode_and_width():
    code = list(machine_code.gcn_instructions(GCN))
    assert len(code) == 7
    assert {i.line for i in code} == {("/k/attend.py", 13)}
    loads = [found for found in map(machine_code.gcn_load, code) if found]
    assert loads == [("128", False), ("32", True), ("16", False), ("8", False), ("128", True)]
    assert sum(map(machine_code.is_gcn_mma, code)) == 1


def test_a_tile_has_rows_columns_and_16_bytes_for_every_thread():
    assert machine_code.bulk_lines(TTGIR) == {("/k/attend.py", 10), ("/k/attend.py", 20)}
    older = TTGIR.replace(" : !tt.ptr<bf16> -> tensor", " : tensor")  # as Triton 3.6 writes a buffer load
    assert machine_code.bulk_lines(older) == machine_code.bulk_lines(TTGIR)
    narrow = TTGIR.replace('"ttg.num-warps" = 4', '"ttg.num-warps" = 16')
    assert machine_code.bulk_lines(narrow) == {("/k/attend.py", 10)}


def test_loads_belong_to_the_line_in_front_of_their_inline_block():
    """Each line of inline PTX is numbered one source line further: a load that ends one shows up where another may be."""
    assert machine_code.bulk_loads(PTX, {("/k/attend.py", 10)}) == {"128": 2}
    assert machine_code.bulk_loads(PTX, {("/k/attend.py", 12)}) == {"16": 1}


def test_tiles_without_loads_are_an_error():
    asm = {"amdgcn": GCN + "\n.private_segment_fixed_size: 0\n.vgpr_count: 8", "ttgir": TTGIR}
    with pytest.raises(ValueError, match="are not those of the code"):
        machine_code.count(asm, GCN)
    there = asm | {"ttgir": TTGIR.replace('attend.py":10', 'attend.py":13')}
    code = machine_code.count(there, GCN)
    assert code.bulk == code.loads == {"8": 1, "16": 1, "32": 1, "128": 2}
    assert (code.registers, code.spill_bytes, code.async_loads, code.mma) == (8, 0, 2, 1)


@pytest.mark.parametrize(
    "target, registers, shared_bytes, num_warps, programs",
    [
        ("sm_80", 32, 0, 4, 16),  # 64 warps
        ("sm_80", 33, 0, 4, 12),  # 33 registers take 40
        ("sm_90", 56, 16384, 4, 9),
        ("sm_90", 80, 36 << 10, 4, 6),  # 37 KB with the system's kilobyte
        ("sm_90", 255, 0, 16, 0),  # 16 warps of 255 registers don't fit
        ("sm_90", 32, 0, 1, 32),
        ("sm_100", 32, 227 << 10, 4, 1),
        ("sm_100", 32, (227 << 10) + 1, 4, 0),
        ("gfx942", 128, 16384, 4, 4),
        ("gfx942", 129, 16384, 4, 3),
        ("gfx942", 512, 0, 4, 1),
    ],
)
def test_programs_per_multiprocessor(target, registers, shared_bytes, num_warps, programs):
    assert programs_per_multiprocessor(target, registers=registers, shared_bytes=shared_bytes, num_warps=num_warps) == programs


ROW = {
    "case": "attend-x",
    "kernel": "_attend_kernel",
    "target": "sm_90",
    "config": {"BLOCK_T": 64, "num_warps": 4, "num_stages": 3},
    "registers": 80,
    "spill_bytes": 0,
    "instructions": 1000,
    "loads": {"32": 4, "128": 8},
    "bulk": {"128": 8},
    "async_loads": 0,
    "mma": 8,
    "shared_bytes": 4096,
    "occupancy": 6,
    "shipped": True,
    "tensor_cores": True,
    "seconds": 1.0,
    "triton": "3.9.0",
}
BASELINE = {"sm_90": {"attend-x _attend_kernel": 1000}}


def broken(row, baseline=BASELINE):
    return Counter(f.rule for f in audit_rules.findings([ROW | row], baseline))


@pytest.mark.parametrize(
    "row, rule",
    [
        ({"spill_bytes": 4}, "spill"),
        ({"bulk": {"64": 1, "128": 8}}, "bulk"),
        ({"mma": 0}, "tensor_cores"),
        ({"occupancy": 0}, "fit"),
        ({"instructions": 1151}, "instructions"),
        ({"instructions": 849}, "instructions"),
        ({"case": "attend-new"}, "instructions"),
    ],
)
def test_each_rule_finds_what_it_is_for(row, rule):
    assert broken(row) == {rule: 1}
    assert not broken(row | {"shipped": False})


@pytest.mark.parametrize("row", [{}, {"instructions": 1150}, {"bulk": {"128": 1, "tma": 2}}, {"mma": 0, "tensor_cores": False}])
def test_the_rules_leave_good_code_alone(row):
    assert not broken(row)


ISSUE = audit_rules.KnownIssue("spill", "sm_90", "attend-x", "_attend_kernel", ("3.9",), "a reason")


def unexpected(row, issues=(ISSUE,), version="3.9"):
    found = audit_rules.findings([ROW | row], BASELINE)
    return audit_rules.unexpected(found, issues, target="sm_90", version=version)


def test_a_known_issue_is_let_through_and_only_that():
    assert unexpected({"spill_bytes": 8}) == []
    assert len(unexpected({"spill_bytes": 8}, version="3.6")) == 1
    assert len(unexpected({"spill_bytes": 8}, [replace(ISSUE, target="sm_80")])) == 1
    assert len(unexpected({"spill_bytes": 8, "mma": 0})) == 1


def test_a_known_issue_that_is_gone_is_reported():
    (text,) = unexpected({})
    assert text.startswith("mended") and "attend-x" in text
    assert unexpected({}, version="3.6") == []


def test_a_baseline_is_written_and_read_back(tmp_path):
    path = tmp_path / "tests" / "baseline.json"
    assert audit_rules.read_baseline(path) == {}
    audit_rules.write_baseline(path, [ROW, ROW | {"case": "c", "shipped": False}], keep={})
    assert audit_rules.read_baseline(path) == BASELINE
    audit_rules.write_baseline(path, [ROW | {"instructions": 7, "target": "sm_80"}], keep=BASELINE)
    assert audit_rules.read_baseline(path) == BASELINE | {"sm_80": {"attend-x _attend_kernel": 7}}
    assert audit_rules.stale([ROW | {"case": "other"}], BASELINE, "sm_90") == ["attend-x _attend_kernel"]


def test_the_table_shows_changes_and_failures():
    text = table([ROW | {"instructions": 990}, {"case": "score-x", "target": "sm_80", "error": "broke"}], BASELINE)
    assert "990 (-10)" in text and "8x128" in text and "FAILED sm_80 score-x: broke" in text
