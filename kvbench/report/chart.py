"""Small line charts as inline SVG: no script, no font, no colour that a dark page could hide."""

import html
import math
from collections.abc import Mapping, Sequence

from kvbench import units

Point = tuple[float, float | None]  # seconds, value; None breaks the line
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 180, 64, 22, 10
MOST = 600  # points per line; more would be narrower than a pixel


def lines(title: str, unit: str, series: Mapping[str, Sequence[Point]], top: float | None = None) -> str:
    """One chart with its lines and legend; "" where no point. unit: "s", "share" or text. top: fixed maximum."""
    known = {name: thin(points) for name, points in series.items() if any(value is not None for _, value in points)}
    if not known:
        return ""
    times = [t for points in known.values() for t, _ in points]
    highest = top or nice(max(value for points in known.values() for _, value in points if value is not None))
    start, span = min(times), max(times) - min(times) or 1.0

    def place(t: float, value: float) -> str:
        x = LEFT + (t - start) / span * (WIDTH - LEFT - 8)
        return f"{x:.1f},{TOP + (1 - min(1.0, value / highest)) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [_grid(highest, unit), _axis(start, span)]
    for number, points in enumerate(known.values()):
        for piece in pieces(points):
            spots = " ".join(place(t, value) for t, value in (piece if len(piece) > 1 else piece * 2))
            parts.append(f'<polyline class="l{number}" points="{spots}"/>')
    legend = " ".join(f'<span class="k{number}">{html.escape(name)}</span>' for number, name in enumerate(known))
    name = html.escape(title)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{name} {legend}</figcaption>{svg}</figure>"


def pieces(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """Runs of points between the gaps."""
    found: list[list[tuple[float, float]]] = [[]]
    for t, value in points:
        if value is not None:
            found[-1].append((t, value))
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def thin(points: Sequence[Point]) -> list[Point]:
    """At most MOST points: of each stretch the highest, so that no peak is lost."""
    step = math.ceil(len(points) / MOST)
    stretches = [points[k : k + step] for k in range(0, len(points), step)]
    return [max(part, key=lambda point: -1.0 if point[1] is None else point[1]) for part in stretches]


def nice(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten at or above `value`; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-12))


def show(value: float, unit: str) -> str:
    return units.duration(value) if unit == "s" else units.share(value) if unit == "share" else f"{value:g}{unit}"


def _grid(highest: float, unit: str) -> str:
    parts = []
    for part in (0.0, 0.5, 1.0):
        y = TOP + (1 - part) * (HEIGHT - TOP - BOTTOM)
        label = html.escape(show(highest * part, unit))
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}">{label}</text>')
    return "".join(parts)


def _axis(start: float, span: float) -> str:
    y = HEIGHT - 6
    ends = ((LEFT + 20, start), ((WIDTH + LEFT) / 2, start + span / 2), (WIDTH - 8, start + span))
    step = 10.0 ** math.floor(math.log10(span) - 2)  # a start after some milliseconds is 0 beside seconds
    shown = [(x, round(t / step) * step) for x, t in ends]
    return "".join(f'<text x="{x:.0f}" y="{y}">{units.duration(t)}</text>' for x, t in shown)
