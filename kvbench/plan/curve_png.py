"""Hit-rate curves as a picture."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from kvbench.plan.curve import Lru, Point


def check(path: Path) -> None:
    """Raises ValueError where no picture could be drawn at `path`: without matplotlib, or in a folder that is not there."""
    if find_spec("matplotlib") is None:
        raise ValueError("--png needs the package matplotlib, which is not installed: pip install -e '.[curve]'")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--png {path}: there is no folder {path.absolute().parent}")


def draw(path: Path, lru: Lru, points: Sequence[Point], title: str) -> None:
    """Write a PNG: every policy's block hit rate over blocks, LRU as its whole curve, the ideal and the knee. Raises OSError
    where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="cache size, blocks", ylabel="block hit rate, %", title=title, xscale="log")
    least = min(point.blocks for point in points)
    most = max(lru.enough, least + 1, *(point.blocks for point in points))
    sizes = np.unique(np.geomspace(least, most, 400).astype(np.int64))
    axes.plot(sizes, [100 * lru.rate(int(n)) for n in sizes], color="black", linewidth=2, label="lru")
    for name in dict.fromkeys(point.policy for point in points):
        if name != "lru":
            own = [point for point in points if point.policy == name]
            style = "--" if name == "belady" else "-"
            rates = [100 * point.block_hit_rate for point in own]
            axes.plot([point.blocks for point in own], rates, style, marker=".", linewidth=1, label=name)
    axes.axhline(100 * lru.ideal, color="grey", linestyle=":", label="ideal")
    if (knee := lru.knee()) is not None:
        axes.axvline(knee.blocks, color="grey", linewidth=0.8, label="knee")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize="small")
    figure.savefig(path, format="png", dpi=120)
