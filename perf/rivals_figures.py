"""Pictures of rival policies: quality against the share of tokens kept, and a radar of what each gets right."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from tsattn.evaluation import report

Row = dict[str, Any]


def ratios(rows: list[Row], path: Path) -> None:
    """KL and facts missed against the share of tokens that is kept, a line per policy, labels being ``name, ratio``."""
    import matplotlib.pyplot as plt

    texts, facts = report.of_task(rows, report.TEXT), report.answered(report.of_task(rows, report.RETRIEVAL))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    names = list(dict.fromkeys(label.rpartition(", ")[0] for label in report.policies(rows) if ", " in label))
    for name in names:
        mine = [row for row in texts if row["policy"].rpartition(", ")[0] == name]
        found = [row for row in facts if row["policy"].rpartition(", ")[0] == name]
        for axis, some, measure in ((axes[0], mine, "kl"), (axes[1], found, "right")):
            shares = sorted({float(row["policy"].rpartition(", ")[2]) for row in some})
            values = [fmean(row[measure] for row in some if row["policy"] == f"{name}, {share:g}") for share in shares]
            axis.plot(shares, values, "o-", ms=4, label=name)
    axes[0].set(xlabel="tokens kept, share of the context", ylabel="KL from dense attention, nats", yscale="log")
    axes[1].set(xlabel="tokens kept, share of the context", ylabel="pass keys found, of those that dense attention finds")
    axes[1].set_ylim(-0.03, 1.03)
    axes[0].legend(fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def radar(rows: list[Row], path: Path) -> None:
    """Share of right tokens by kind of fact, relative to dense attention's, an outline per policy."""
    import math

    import matplotlib.pyplot as plt

    facts = report.of_task(rows, report.RETRIEVAL)
    kinds = list(dict.fromkeys(row["task"]["kind"] for row in facts))
    angles = [2 * math.pi * i / len(kinds) for i in range(len(kinds))]
    figure, axis = plt.subplots(figsize=(7, 6), subplot_kw={"projection": "polar"}, layout="constrained")

    def share(policy: str, kind: str) -> float:
        return fmean(row["tokens_right"] for row in facts if row["policy"] == policy and row["task"]["kind"] == kind)

    for policy in report.policies(facts)[1:]:
        values = [share(policy, kind) / max(share("dense", kind), 1e-9) for kind in kinds]
        axis.plot([*angles, angles[0]], [*values, values[0]], lw=1.5, label=policy)
    axis.set_xticks(angles, kinds)
    axis.set_ylim(0.0, 1.1)
    axis.set_title("right tokens of answers, relative to dense attention")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.savefig(path, dpi=150)
    plt.close(figure)
