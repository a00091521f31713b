"""What a compiled kernel is made of, read from its machine code: registers, spills, loads by width, matrix instructions.

NVIDIA: the SASS that ``nvdisasm`` prints and the resources that ``cuobjdump`` reports, both shipped inside triton. AMD: the
assembly text that Triton keeps. Counts are static: an instruction inside a loop counts once.

**Bulk loads.** A kernel reads tiles (keys, values, statistics) and beside them lengths, page ids and scales; only the tiles
have to come in 128-bit pieces. Triton's own layout dump (TTGIR) says for each line of a kernel what tile it loads. A line is
*bulk* where the tile has rows and columns and at least 16 bytes for every thread of the program; the loads of such a line are
bulk loads. A TMA copy is always one.

On NVIDIA the loads of a line are read off the PTX, which names lines exactly; the line table of the machine code drifts, since
LLVM numbers each line of inline PTX one source line further. The assembler keeps widths, which is checked; the number of loads
may differ by a few, where it copied or merged code.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

Line = tuple[str, int]
"""A place in a source file."""

TMA = "tma"
"""Key of the copies by the tensor memory accelerator among loads by width."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: its name with modifiers and, on AMD, its operands and the source line it came from."""

    name: str
    operands: str = ""
    line: Line | None = None


@dataclass(frozen=True)
class Code:
    """Counts over the machine code of one kernel."""

    registers: int
    spill_bytes: int
    instructions: int
    loads: dict[str, int]
    """Loads from global memory by width in bits, those past the registers included."""
    bulk: dict[str, int]
    """The part of `loads` that fetches tiles."""
    async_loads: int
    """The part of `loads` that goes to shared memory without passing registers."""
    mma: int


# ------------------------------------------------------------------------------------------------------------- TTGIR

_LOADS = re.compile(r"\b(tt\.load|\w+\.buffer_load(?:_to_local)?|ttg\.async_copy_global_to_local)\b")
_SHAPE = re.compile(r"tensor<((?:\d+x)+)")
# Of what is loaded: a pointer's element, or where an operation names no pointer type, the tensor's.
_BITS = (re.compile(r"!tt\.ptr<[a-zA-Z]+(\d+)"), re.compile(r"tensor<(?:\d+x)+[a-zA-Z]+(\d+)"))


def _source_lines(ttgir: str) -> dict[str, Line]:
    """Innermost source line of every location name of a TTGIR dump."""
    text = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.MULTILINE))

    def resolve(body: str) -> Line | None:
        place = re.match(r'"([^"]+)":(\d+):\d+', body)
        if place:
            return place[1], int(place[2])
        inner = re.search(r"#loc\d*", body)  # a named place, or callsite(callee at caller): the callee comes first
        return resolve(text[inner[0]]) if inner else None

    places = {name: resolve(body) for name, body in text.items()}
    return {name: place for name, place in places.items() if place is not None}


def bulk_lines(ttgir: str) -> set[Line]:
    """Source lines of a kernel that load a tile of at least 16 bytes a thread."""
    places = _source_lines(ttgir)
    warps, lanes = (re.search(rf'"ttg\.{key}" = (\d+)', ttgir) for key in ("num-warps", "threads-per-warp"))
    if warps is None or lanes is None:
        raise ValueError("the layout dump names no number of warps")
    threads = int(warps[1]) * int(lanes[1])
    found = set()
    for text in ttgir.splitlines():
        shape, place = _SHAPE.search(text), re.search(r"loc\((#loc\d*)\)$", text)
        bits = _BITS[0].search(text) or _BITS[1].search(text)
        if not (_LOADS.search(text) and shape and bits and place and place[1] in places):
            continue
        sizes = [int(size) for size in shape[1].strip("x").split("x")]
        elements = 1
        for size in sizes:
            elements *= size
        if len(sizes) > 1 and elements * int(bits[1]) // 8 >= 16 * threads:
            found.add(places[place[1]])
    return found


# ------------------------------------------------------------------------------------------------------------ NVIDIA

_PTX_LOC = re.compile(r"^\s*\.loc\s+(\d+) (\d+)")
_PTX_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z](\d+)\s")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\S* .*\], (0x[0-9a-f]+|\d+)")


def _ptx_load(row: str) -> str | None:
    """Width of a load from global memory, None for anything else."""
    copy, load = _PTX_COPY.search(row), _PTX_LOAD.search(row)
    if copy:
        return str(8 * int(copy[1], 0))
    return str(int(load[1] or 1) * int(load[2])) if load else None


def bulk_loads(ptx: str, tiles: set[Line]) -> Counter[str]:
    """Loads of the lines `tiles`, by width."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]+)"', ptx, re.MULTILINE))
    line: Line | None = None
    inside = False  # of inline PTX: the line in front of it is right, those within are not
    found: Counter[str] = Counter()
    for row in ptx.splitlines():
        place = _PTX_LOC.match(row)
        if place and not inside:
            line = (files.get(place[1], ""), int(place[2]))
        elif "inline asm" in row:
            inside = "begin" in row
        load = _ptx_load(row)
        if load and line in tiles:
            found[load] += 1
    return found


_SASS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)[^;]*;")


def _text_section(cubin: bytes) -> bytes:
    """The code of the one kernel in a cubin, a 64-bit ELF file."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, sections_at + i * size) for i in range(count)]
    code = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", sections[names][4] + name)
    ]
    if len(code) != 1:
        raise ValueError(f"a cubin with {len(code)} pieces of code, one kernel is wanted")
    return code[0]


def disassemble(asms: Sequence[Any]) -> list[str]:
    """The machine code of compiled kernels as text. Takes many at once, since nvdisasm takes longer to start than to run."""
    texts = [str(asm.get("amdgcn", "")) for asm in asms]
    families: dict[str, list[int]] = {}
    for i, asm in enumerate(asms):
        if "cubin" in asm:
            family = re.search(r"^\.target sm_(\w+)", asm["ptx"], re.MULTILINE)
            assert family is not None
            families.setdefault(f"SM{family[1]}", []).append(i)
    for family_name, members in families.items():
        codes = [_text_section(asms[i]["cubin"]) for i in members]
        rows = _run_on(b"".join(codes), "nvdisasm", "-b", family_name).splitlines()
        addressed = [(int(found[1], 16), row) for row in rows if (found := _SASS.match(row))]
        begin = 0
        for i, code in zip(members, codes, strict=True):
            texts[i] = "\n".join(row for address, row in addressed if begin <= address < begin + len(code))
            begin += len(code)
    return texts


def sass_instructions(text: str) -> list[Instruction]:
    """Instructions of nvdisasm's output, without the padding behind the code."""
    found = (_SASS.match(row) for row in text.splitlines())
    return [Instruction(match[2]) for match in found if match and match[2] != "NOP"]


def sass_load(instruction: Instruction) -> tuple[str, bool] | None:
    """(width, past the registers) of a load from global memory, None for anything else."""
    name, *modifiers = instruction.name.split(".")
    if name in ("UTMALDG", "UBLKCP"):
        return TMA, True
    if name not in ("LDG", "LD", "LDGSTS"):
        return None
    narrow = {"U8": "8", "S8": "8", "U16": "16", "S16": "16"}
    widths = [narrow.get(m, m) for m in modifiers if m in narrow or m in ("64", "128", "256")]
    return (widths[0] if widths else "32"), name == "LDGSTS"


def is_sass_mma(instruction: Instruction) -> bool:
    """Whether an instruction multiplies matrices."""
    return instruction.name.split(".")[0].endswith("MMA")  # HMMA, IMMA, HGMMA (warp groups), UTCHMMA (Blackwell), ...


def _run_on(data: bytes, *command: str) -> str:
    """What a tool of the CUDA toolkit prints about a file with this content."""
    name, *options = command
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


# --------------------------------------------------------------------------------------------------------------- AMD

_GCN_WIDTHS = {"byte": "8", "short": "16", "dword": "32", "dwordx2": "64", "dwordx3": "96", "dwordx4": "128"}
_GCN_LOAD = re.compile(r"^(?:global|buffer|flat)_load_(?:lds_)?[us]?(byte|short|dwordx[234]|dword)(?:_|$)")


def gcn_instructions(text: str) -> Iterator[Instruction]:
    """Instructions of a kernel's AMDGCN assembly, without the padding."""
    files = {number: f"{folder}/{name}" for number, folder, name in re.findall(r'\.file\s+(\d+) "([^"]*)" "([^"]*)"', text)}
    line: Line | None = None
    for row in text.split(".Lfunc_end", 1)[0].splitlines():
        place = re.match(r"^\t\.loc\t(\d+) (\d+)", row)
        if place:
            line = (files.get(place[1], ""), int(place[2]))
            continue
        found = re.match(r"^\t([a-z]\w+)(.*)", row)
        if found and found[1] != "s_nop":
            yield Instruction(found[1], found[2].split(";")[0], line)


def gcn_load(instruction: Instruction) -> tuple[str, bool] | None:
    """(width, past the registers) of a load from global memory, None for anything else; not of scalar loads."""
    found = _GCN_LOAD.match(instruction.name)
    if found is None:
        return None
    return _GCN_WIDTHS[found[1]], "_lds_" in instruction.name or instruction.operands.split()[-1:] == ["lds"]


def is_gcn_mma(instruction: Instruction) -> bool:
    """Whether an instruction multiplies matrices."""
    return instruction.name.startswith(("v_mfma", "v_smfma"))


# -------------------------------------------------------------------------------------------------------------- both


def usage(asm: Any) -> tuple[int, int]:
    """(registers of a thread, bytes a thread spills) of a kernel that Triton compiled."""
    if "cubin" in asm:
        text = _run_on(asm["cubin"], "cuobjdump", "-res-usage")
        found = re.search(r"REG:(?P<regs>\d+) STACK:(?P<spill>\d+)", text)
    else:
        text = asm["amdgcn"]
        found = re.search(r"\.private_segment_fixed_size:\s*(?P<spill>\d+).*?\.vgpr_count:\s*(?P<regs>\d+)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"no resource usage in {text[:200]!r}")
    return int(found["regs"]), int(found["spill"])


def _by_width(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: item[0].zfill(4)))


def count(asm: Any, text: str) -> Code:
    """Count the machine code `text` of a kernel, whose other forms are in Triton's mapping `asm`."""
    tiles = bulk_lines(asm["ttgir"])
    if "cubin" in asm:
        instructions, load, is_mma = sass_instructions(text), sass_load, is_sass_mma
    else:
        instructions, load, is_mma = list(gcn_instructions(text)), gcn_load, is_gcn_mma
    found = [(instruction, *kind) for instruction in instructions if (kind := load(instruction)) is not None]
    loads = Counter(width for _, width, _ in found)
    if "cubin" in asm:
        bulk = bulk_loads(asm["ptx"], tiles) + Counter({TMA: loads.get(TMA, 0)})
    else:
        bulk = Counter(width for instruction, width, _ in found if instruction.line in tiles)
    if (tiles and not bulk) or not set(bulk) <= set(loads):
        raise ValueError(f"the loads of the tiles of {sorted(tiles)}, {dict(bulk)}, are not those of the code: {dict(loads)}")
    return Code(
        *usage(asm),
        len(instructions),
        _by_width(loads),
        _by_width(bulk),
        sum(past_registers for _, _, past_registers in found),
        sum(map(is_mma, instructions)),
    )
