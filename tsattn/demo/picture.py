"""out/demo.png: pages read by each decode step, against where the attention mass is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm
from numpy.typing import NDArray

from tsattn.demo.measure import StepRecord

_MOST_LAYERS = 6
_MOST_LABELS = 32
"""Steps that get a label of their own; of more, every second, third, ... has one."""
_LONGEST_LABEL, _LONGEST_PANEL_TITLE, _LONGEST_TITLE = 12, 80, 150
_READ_IN_VAIN = 0.3
"""Where the orange of a page that was read and has no attention begins on the colour map (0 would be white)."""


@dataclass(frozen=True)
class Panel:
    """One column of the picture: a method."""

    title: str
    records: list[StepRecord]
    labels: list[str]  # the token that each step decoded
    page_size: int


def label_of(token: str) -> str:
    """A token's text on an axis: white space made visible."""
    return shortened(token.replace("\n", "\\n").replace(" ", "␣"), _LONGEST_LABEL) or "∅"


def shortened(text: str, most: int) -> str:
    """At most ``most`` characters of a text."""
    return text if len(text) <= most else text[: most - 1] + "…"


def labelled_steps(steps: int) -> range:
    """The steps that have a label: all, or every n-th so that they stay apart."""
    return range(0, steps, -(-steps // _MOST_LABELS))


def draw(path: Path, panels: list[Panel], *, title: str, needle: tuple[int, int] | None) -> None:
    """Draw one column per method and one row per full-attention layer.

    Orange pages were read, blue ones were not; the darker, the more attention mass a page has, from its even share (white)
    up. ``needle`` is the needle's range of token positions.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    layers = sorted({record.layer for panel in panels for record in panel.records})
    if len(layers) > _MOST_LAYERS:
        layers = [layers[round(i * (len(layers) - 1) / (_MOST_LAYERS - 1))] for i in range(_MOST_LAYERS)]
    steps = min(max(len(panel.labels) for panel in panels), _MOST_LABELS)
    size = (10.5 * len(panels), 2.2 + len(layers) * (0.9 + 0.17 * steps))
    figure, axes = plt.subplots(len(layers), len(panels), figsize=size, squeeze=False, layout="constrained")
    pages = max(record.mass.shape[0] for panel in panels for record in panel.records)
    norm = LogNorm(1.0 / pages, 1.0)
    blues, oranges = plt.get_cmap("Blues"), _without_white(plt.get_cmap("Oranges"))
    drawn: tuple[Any, Any] | None = None
    for column, panel in enumerate(panels):
        for line, layer in enumerate(layers):
            axis = axes[line][column]
            drawn = _draw_layer(axis, panel, layer, norm, blues, oranges)
            if line == len(layers) - 1:
                axis.set_xlabel(f"position in the context (tokens; one cell is a page of {panel.page_size})")
            if column == 0:
                axis.set_ylabel("token decoded in the step")
            for edge in needle or ():
                axis.axvline(edge, color="black", linewidth=1.0, linestyle=(0, (2, 2)))
        axes[0][column].annotate(
            shortened(panel.title, _LONGEST_PANEL_TITLE),
            (0.5, 1.0),
            (0, 26),
            "axes fraction",
            textcoords="offset points",
            ha="center",
            fontsize=13,
        )
    assert drawn is not None
    for image, label in zip(drawn, ("attention mass of a page not read", "attention mass of a page read"), strict=True):
        figure.colorbar(image, ax=axes, location="right", shrink=0.7, pad=0.01, aspect=35).set_label(
            f"{label} (dense attention, mean over heads)"
        )
    legend: list[Any] = [Patch(color=oranges(0.45), label="page read"), Patch(color=blues(0.55), label="page not read")]
    if needle is not None:
        legend.append(Line2D([], [], color="black", linestyle=(0, (2, 2)), label="the needle lies between these lines"))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=11, frameon=False)
    figure.suptitle(shortened(title, _LONGEST_TITLE), fontsize=14)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_layer(axis: Any, panel: Panel, layer: int, norm: LogNorm, blues: Colormap, oranges: Colormap) -> tuple[Any, Any]:
    mass, read = _grids(panel, layer)
    pages = mass.shape[1]
    shown = np.clip(mass, norm.vmin, norm.vmax)
    extent = (0, pages * panel.page_size, mass.shape[0], 0)
    images = [
        axis.imshow(
            np.where(hidden, np.nan, shown), cmap=cmap, norm=norm, aspect="auto", interpolation="nearest", extent=extent
        )
        for hidden, cmap in ((read, blues), (~read, oranges))
    ]
    covered = np.mean([record.covered for record in panel.records if record.layer == layer])
    axis.set_title(
        f"layer {layer}: {read.sum() / read.shape[0]:.0f} of {pages} pages read per step, "
        f"{covered:.0%} of the attention mass covered",
        fontsize=10,
    )
    shown_steps = labelled_steps(len(panel.labels))
    axis.set_yticks(
        [step + 0.5 for step in shown_steps], [panel.labels[step] for step in shown_steps], fontsize=8, family="monospace"
    )
    return images[0], images[1]


def _without_white(colours: Colormap) -> Colormap:
    return LinearSegmentedColormap.from_list("read", colours(np.linspace(_READ_IN_VAIN, 1.0, 256)))


def _grids(panel: Panel, layer: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """[steps, pages] of attention mass and of pages read; short steps are padded with unread, empty pages."""
    records = [record for record in panel.records if record.layer == layer]
    pages = max(record.mass.shape[0] for record in records)
    mass = np.zeros((len(records), pages))
    read = np.zeros((len(records), pages), dtype=np.bool_)
    for row, record in enumerate(records):
        count = record.mass.shape[0]
        mass[row, :count] = record.mass.numpy()
        read[row, :count] = record.read.numpy()
    return mass, read
