"""Rules that shipped kernels break for now, each with its reason; an entry that no longer holds fails the gate."""

from tsattn.testing.audit_rules import KnownIssue

BOTH = ("3.6", "3.9")
_CODES = "a pipelined tile of 8-bit codes is copied 8 bytes at a time: as many elements as a 16-bit operand has in 16 bytes"
_STACK = "ptxas stops at 32, 64, 96 or 168 registers and keeps one or two more values on the stack, outside the loops"

_EIGHT_BIT = (
    "attend-bfloat16-float8_e4m3fn-128-16-5-128",
    "attend-float16-float8_e4m3fn-256-1-1-None",
    "attend-float16-int8-80-16-4-128-True",
)

KNOWN_ISSUES = [
    *(
        KnownIssue("bulk", target, case, "_attend_kernel", BOTH, _CODES)
        for target in ("sm_80", "sm_90", "sm_100")
        for case in _EIGHT_BIT
    ),
    KnownIssue("spill", "sm_80", "append-minmax-2-bfloat16-bfloat16-bfloat16-128-16", "_append_kernel", ("3.9",), _STACK),
    KnownIssue("spill", "sm_80", "score-meanvar-2-bfloat16-bfloat16-128-16-4-max", "_score_kernel", ("3.9",), _STACK),
    KnownIssue("spill", "sm_90", "score-meanvar-2-bfloat16-bfloat16-128-16-4-max", "_score_kernel", ("3.6",), _STACK),
    KnownIssue("spill", "sm_80", "attend-bfloat16-bfloat16-128-16-71-128", "_attend_kernel", ("3.6",), _STACK),
    KnownIssue("spill", "sm_100", "select-tile-1-1-0.9-1", "_top_p_kernel", ("3.9",), _STACK),
]
