"""Rules that shipped kernels break for now, each with its reason; an entry that no longer holds fails the gate."""

from tsattn.testing.audit_rules import KnownIssue

_OLD = ("3.6",)
_STACK = "the ptxas of Triton 3.6 stops at a round number of registers and keeps a few values on the stack; that of 3.9 doesn't"

_ROW = "ptxas keeps 8 bytes of the row plan on the stack at 96 registers (56 on Triton 3.6): smaller tiles don't end it"

_INT8_ROW = "decode-row-{}-bfloat16-bfloat16-128-16-4-max-int8"
_INT8_TWO = "decode-two-{}-bfloat16-bfloat16-128-16-4-max-int8"
_INT8_APPEND = "append-minmax-2-bfloat16-bfloat16-int8-128-16"
_INT8_KINDS = ("means-1", "means-4", "minmax-2")

KNOWN_ISSUES = [
    KnownIssue("spill", "sm_80", _INT8_ROW.format("means-1"), "_row_kernel", ("3.6", "3.9"), _ROW),
    *(KnownIssue("spill", "sm_80", _INT8_ROW.format(kind), "_row_kernel", _OLD, _STACK) for kind in _INT8_KINDS[1:]),
    *(
        KnownIssue("spill", target, _INT8_TWO.format(kind), "_score_select_kernel", _OLD, _STACK)
        for target in ("sm_90", "sm_100")
        for kind in _INT8_KINDS
    ),
    *(
        KnownIssue("spill", target, _INT8_APPEND, kernel, _OLD, _STACK)
        for target in ("sm_90", "sm_100")
        for kernel in ("_append_kernel", "_rebuild_stats_kernel")
    ),
    *(
        KnownIssue("spill", target, case, kernel, _OLD, _STACK)
        for target, case, kernel in (
            ("sm_80", "decode-ticket-means-2-bfloat16-bfloat16-128-16-4-max", "_ticket_kernel"),
            ("sm_90", "decode-two-means-2-bfloat16-bfloat16-128-16-4-max", "_score_select_kernel"),
            ("sm_100", "decode-two-means-2-bfloat16-bfloat16-128-16-4-max", "_score_select_kernel"),
            ("sm_90", "decode-two-centroids-2-bfloat16-bfloat16-128-16-4-max", "_score_select_kernel"),
            ("sm_100", "decode-two-centroids-2-bfloat16-bfloat16-128-16-4-max", "_score_select_kernel"),
            ("sm_90", "decode-two-minmax-2-float16-int8-80-12-5-none-True-1", "_score_select_kernel"),
            ("sm_100", "decode-two-minmax-2-float16-int8-80-12-5-none-True-1", "_score_select_kernel"),
        )
    ),
]
