"""Pictures of rival policies: quality by share of tokens kept, what each gets right, and what their decode steps take."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median
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
    figure, axis = plt.subplots(figsize=(7, 6), subplot_kw={"projection": "polar"})

    def share(policy: str, kind: str) -> float:
        return fmean(row["tokens_right"] for row in facts if row["policy"] == policy and row["task"]["kind"] == kind)

    for policy in report.policies(facts)[1:]:
        values = [share(policy, kind) / max(share("dense", kind), 1e-9) for kind in kinds]
        axis.plot([*angles, angles[0]], [*values, values[0]], lw=1.5, label=policy)
    axis.set_xticks(angles, kinds)
    axis.set_ylim(0.0, 1.1)
    axis.set_title("right tokens of answers, relative to dense attention")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _of(steps: list[Row], policy: str, context: int) -> list[Row]:
    return sorted((row for row in steps if (row["policy"], row["context"]) == (policy, context)), key=lambda row: row["step"])


def _kind(policy: str) -> str:
    """The label without its number of tokens, which is another one in every context."""
    return policy.partition(" (")[0]


def speed_ups(steps: list[Row], path: Path) -> None:
    """Times of whole steps against dense attention's in the same run, bars by context; outlined: what the bytes would allow."""
    import matplotlib.pyplot as plt

    contexts = sorted({row["context"] for row in steps})
    kinds = [kind for kind in dict.fromkeys(_kind(row["policy"]) for row in steps) if kind != "dense"]
    figure, axis = plt.subplots(figsize=(8, 4.4), layout="constrained")
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        for j, context in enumerate(contexts):
            mine = [row for row in steps if _kind(row["policy"]) == kind and row["context"] == context]
            dense = _of(steps, "dense", context)
            speed = median(row["seconds"] for row in dense) / median(row["seconds"] for row in mine)
            ideal = fmean(sum(row["bytes"].values()) for row in dense) / fmean(sum(row["bytes"].values()) for row in mine)
            place = j + (i - (len(kinds) - 1) / 2) * width
            axis.bar(place, ideal, width * 0.9, fill=False, edgecolor="0.6", lw=0.8)
            axis.bar(place, speed, width * 0.9, color=f"C{i}", label=kind if j == 0 else None)
            axis.text(place, speed, f"{speed:.1f}x", ha="center", va="bottom", fontsize=7)
    axis.axhline(1.0, color="0.4", lw=0.8)
    axis.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axis.set(xlabel="tokens of the context", ylabel="speed-up over dense attention; outlined: by bytes")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def reuse(steps: list[Row], path: Path) -> None:
    """Share of a step's pages that the step before read, too, by step: a line per layer, a panel per policy."""
    import matplotlib.pyplot as plt

    context = max(row["context"] for row in steps)
    policies = [
        name for name in dict.fromkeys(row["policy"] for row in steps) if any(r["reuse"] for r in _of(steps, name, context))
    ]
    figure, axes = plt.subplots(
        1, len(policies), figsize=(4.6 * len(policies), 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, policy in zip(axes[0], policies, strict=True):
        mine = [row for row in _of(steps, policy, context) if row["reuse"]]
        for layer in mine[0]["reuse"]:
            axis.plot([row["step"] for row in mine], [row["reuse"][layer] for row in mine], lw=1.2, label=f"layer {layer}")
        axis.set(title=f"{policy}, {context:,} tokens", xlabel="decode step", ylim=(0.0, 1.03))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("re-used pages, forced ones among them")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bandwidth(steps: list[Row], path: Path) -> None:
    """Bytes that a step must move over the time it takes, by step: a line per policy."""
    import matplotlib.pyplot as plt

    contexts = sorted({row["context"] for row in steps})
    figure, axes = plt.subplots(
        1, len(contexts), figsize=(4.2 * len(contexts), 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, context in zip(axes[0], contexts, strict=True):
        for policy in dict.fromkeys(row["policy"] for row in steps if row["context"] == context):
            mine = _of(steps, policy, context)
            rates = [sum(row["bytes"].values()) / row["seconds"] / 1e9 for row in mine]
            axis.plot([row["step"] for row in mine], rates, lw=1.2, label=_kind(policy))
        axis.set(title=f"{context:,} tokens", xlabel="decode step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0.0)  # shared, and by all panels
    axes[0][0].set_ylabel("bytes that must be moved, GB/s")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
