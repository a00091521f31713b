"""What the multiprocessors of the supported GPU families hold, and how many programs fit one at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Multiprocessor:
    """What the programs on one SM (NVIDIA) or compute unit (AMD) share."""

    lanes: int
    """Threads of a warp or wavefront."""
    registers: int
    """32-bit registers, over all its threads."""
    register_unit: int
    """Registers are handed to a warp in multiples of this."""
    max_registers: int
    """Of one thread."""
    shared_bytes: int
    """Of all its programs."""
    program_shared_bytes: int
    """The most that one program can have."""
    reserved_bytes: int
    """Shared memory that the system takes for each program."""
    shared_unit: int
    max_warps: int
    max_programs: int
    partitions: int = 4
    """Parts that own their registers and warp slots; a warp lives in one of them."""


_KB = 1024

# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the tables of the CUDA Occupancy
# Calculator (register unit 256 a warp, shared memory unit 128 bytes, 1 KB reserved for each block from 8.0 on).
_NVIDIA = {
    "lanes": 32,
    "registers": 65536,
    "register_unit": 256,
    "max_registers": 255,
    "reserved_bytes": _KB,
    "shared_unit": 128,
    "max_warps": 64,
    "max_programs": 32,
}

MULTIPROCESSORS = {
    "sm_80": Multiprocessor(**_NVIDIA, shared_bytes=164 * _KB, program_shared_bytes=163 * _KB),
    "sm_90": Multiprocessor(**_NVIDIA, shared_bytes=228 * _KB, program_shared_bytes=227 * _KB),
    "sm_100": Multiprocessor(**_NVIDIA, shared_bytes=228 * _KB, program_shared_bytes=227 * _KB),
    # AMD: "AMD Instinct MI300 CDNA3 Instruction Set Architecture" (512 registers a lane and SIMD, in units of 8; 64 KB LDS) and
    # LLVM's AMDGPUBaseInfo.cpp (8 waves a SIMD; LDS in units of 512 bytes; at most 16 work-groups of several waves, and 32 of
    # one, which are counted as 16 here).
    "gfx942": Multiprocessor(
        lanes=64,
        registers=4 * 512 * 64,
        register_unit=8 * 64,
        max_registers=512,
        shared_bytes=64 * _KB,
        program_shared_bytes=64 * _KB,
        reserved_bytes=0,
        shared_unit=512,
        max_warps=32,
        max_programs=16,
    ),
}


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def programs_per_multiprocessor(target: str, *, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Programs that fit one multiprocessor at once; 0 for one that doesn't fit at all.

    Parameters
    ----------
    target
        A key of :data:`MULTIPROCESSORS`.
    registers
        Of one thread.
    shared_bytes, num_warps
        Of one program.
    """
    sm = MULTIPROCESSORS[target]
    if shared_bytes > sm.program_shared_bytes or registers > sm.max_registers:
        return 0
    per_warp = _round_up(max(registers, 1) * sm.lanes, sm.register_unit)
    warps = min(sm.registers // sm.partitions // per_warp, sm.max_warps // sm.partitions) * sm.partitions
    by_warps = warps // num_warps
    by_shared = sm.shared_bytes // max(1, _round_up(shared_bytes + sm.reserved_bytes, sm.shared_unit))
    return min(by_warps, by_shared, sm.max_programs)
