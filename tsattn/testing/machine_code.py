"""What a compiled kernel is made of, read from its machine code: registers, spills, loads by width, matrix instructions.

NVIDIA: the SASS that ``nvdisasm`` prints and the resources that ``cuobjdump`` reports, both shipped inside triton. AMD: the
assembly text that Triton keeps. Counts are static: an instruction inside a loop counts once.

**Bulk loads.** A kernel reads tiles (keys, values, statistics) and beside them lengths, page ids and scales; only the tiles
have to come in 128-bit pieces. Triton's own layout dump (TTGIR) says for each line of a kernel what tile it loads. A line is
*bulk* where the tile has rows and columns and at least 16 bytes for every thread of the program; all machine loads that the
line table attributes to such a line are bulk loads. A TMA copy is always one.

On NVIDIA the line table drifts: a load is several lines of inline PTX, and LLVM numbers each of them one source line further.
The PTX still has the line in front of such a block, so it says which (line, width) pairs of the SASS belong to a bulk line.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
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
    """One machine instruction: its name with modifiers, its operands, and the source line it came from."""

    name: str
    operands: str
    line: Line | None


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
_BITS = re.compile(r"!tt\.ptr<[a-zA-Z]+(\d+)")


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
        shape, bits, place = re.search(r"tensor<((?:\d+x)+)", text), _BITS.search(text), re.search(r"loc\((#loc\d*)\)$", text)
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

Key = tuple[Line | None, str, bool]
"""What tells machine loads apart: line, width, past the registers."""


def _ptx_load(row: str) -> tuple[str, bool] | None:
    """(width, past the registers) of a load from global memory, None for anything else."""
    copy, load = _PTX_COPY.search(row), _PTX_LOAD.search(row)
    if copy:
        return str(8 * int(copy[1], 0)), True
    return (str(int(load[1] or 1) * int(load[2])), False) if load else None


def bulk_keys(ptx: str, tiles: set[Line]) -> set[Key]:
    """How the line table shows the loads of the lines `tiles`."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]+)"', ptx, re.MULTILINE))
    shown: Line | None = None  # what the line table says
    true: Line | None = None  # what it said in front of the inline block
    inside = False
    keys: set[Key] = set()
    for row in ptx.splitlines():
        place = _PTX_LOC.match(row)
        if place:
            shown = (files.get(place[1], ""), int(place[2]))
            true = true if inside else shown
        elif "inline asm" in row:
            inside = "begin" in row
        load = _ptx_load(row)
        if load and true in tiles:
            keys.add((shown, *load))
    return keys


_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)([^;]*);")
_SASS_LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')


def sass_instructions(text: str) -> Iterator[Instruction]:
    """Instructions of nvdisasm's output, without the padding behind the code."""
    line: Line | None = None
    for row in text.splitlines():
        place = _SASS_LINE.match(row)
        if place:
            # Lines of a call chain follow one another; the innermost is first and says "inlined at" for the others.
            line = (place[1], int(place[2])) if "inlined at" not in row or line is None else line
            continue
        found = _SASS.match(row)
        if found and found[1] != "NOP":
            yield Instruction(found[1], found[2], line)


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


def _print_cubin(cubin: bytes, *command: str) -> str:
    """What a tool of the CUDA toolkit prints about a cubin."""
    name, *options = command
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
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
        text = _print_cubin(asm["cubin"], "cuobjdump", "-res-usage")
        found = re.search(r"REG:(?P<regs>\d+) STACK:(?P<spill>\d+)", text)
    else:
        text = asm["amdgcn"]
        found = re.search(r"\.private_segment_fixed_size:\s*(?P<spill>\d+).*?\.vgpr_count:\s*(?P<regs>\d+)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"no resource usage in {text[:200]!r}")
    return int(found["regs"]), int(found["spill"])


def read(asm: Any) -> Code:
    """Count the machine code in the `asm` mapping of a kernel that Triton compiled."""
    if "cubin" in asm:
        instructions = list(sass_instructions(_print_cubin(asm["cubin"], "nvdisasm", "-c", "-g", "-ndf")))
        load, is_mma = sass_load, is_sass_mma
        tiles = bulk_lines(asm["ttgir"])
        keys = bulk_keys(asm["ptx"], tiles)
    else:
        instructions = list(gcn_instructions(asm["amdgcn"]))
        load, is_mma = gcn_load, is_gcn_mma
        tiles = bulk_lines(asm["ttgir"])
        keys = {(tile, width, past) for tile in tiles for width in _GCN_WIDTHS.values() for past in (False, True)}
    loads: Counter[str] = Counter()
    bulk: Counter[str] = Counter()
    past_registers = 0
    for instruction in instructions:
        found = load(instruction)
        if found is None:
            continue
        width, is_async = found
        loads[width] += 1
        past_registers += is_async
        if width == TMA or (instruction.line, width, is_async) in keys:
            bulk[width] += 1
    if tiles and not bulk:
        raise ValueError(f"no machine load belongs to the tiles of {sorted(tiles)}: the line tables don't fit")
    return Code(
        *usage(asm),
        len(instructions),
        dict(sorted(loads.items(), key=lambda item: item[0].zfill(4))),
        dict(sorted(bulk.items(), key=lambda item: item[0].zfill(4))),
        past_registers,
        sum(is_mma(instruction) for instruction in instructions),
    )
