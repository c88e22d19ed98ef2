"""Small charts as SVG: a few hundred bytes each, coloured by the page's style, so that light and dark are one file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 22, 12, 44


def percent(value: float) -> str:
    """Without digits that say nothing: 20 %, 97.5 %, 0.02 %."""
    return f"{100 * value:.3g} %" if value < 0.995 else f"{100 * value:.4g} %"


def number(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")


@dataclass
class Chart:
    """Marks are added in data coordinates; `svg` draws the axes around them. `label` is what a screen reader says."""

    label: str
    x: str
    y: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_format: Callable[[float], str] = number
    y_format: Callable[[float], str] = number
    x_ticks: Sequence[float] | None = None
    marks: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def line(self, xs: Sequence[float], ys: Sequence[float], style: str, name: str = "") -> None:
        points = " ".join(f"{self.across(x):.1f},{self.up(y):.1f}" for x, y in zip(xs, ys, strict=True))
        self.marks.append(f'<polyline class="line {style}" points="{points}"/>')
        self._name(name, style)

    def dots(self, xs: Sequence[float], ys: Sequence[float], style: str, name: str = "") -> None:
        for x, y in zip(xs, ys, strict=True):
            self.marks.append(f'<circle class="dot {style}" cx="{self.across(x):.1f}" cy="{self.up(y):.1f}" r="3.2"/>')
        self._name(name, style)

    def spans(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], style: str) -> None:
        for x, low, high in zip(xs, lows, highs, strict=True):
            place, bottom, top = f"{self.across(x):.1f}", f"{self.up(low):.1f}", f"{self.up(high):.1f}"
            self.marks.append(f'<line class="span {style}" x1="{place}" x2="{place}" y1="{bottom}" y2="{top}"/>')

    def steps(self, edges: Sequence[float], heights: Sequence[float], style: str, name: str = "") -> None:
        """A histogram's outline, filled."""
        floor = self.up(self.y_range[0])
        points = [f"{self.across(edges[0]):.1f},{floor:.1f}"]
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
            points += [f"{self.across(place):.1f},{self.up(height):.1f}" for place in (left, right)]
        points.append(f"{self.across(edges[-1]):.1f},{floor:.1f}")
        self.marks.append(f'<polygon class="area {style}" points="{" ".join(points)}"/>')
        self._name(name, style)

    def rule(self, x: float, style: str, name: str = "") -> None:
        place = f"{self.across(x):.1f}"
        self.marks.append(f'<line class="rule {style}" x1="{place}" x2="{place}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        self._name(name, f"{style} dashed")

    def svg(self) -> str:
        ticks = "".join(self._x_tick(x) for x in (self.x_ticks or nice(*self.x_range, 6)))
        ticks += "".join(self._y_tick(y) for y in nice(*self.y_range, 5))
        middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
        names = f'<text class="name" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x)}</text>'
        names += (
            f'<text class="name" x="12" y="{centre:.0f}" text-anchor="middle" '
            f'transform="rotate(-90 12 {centre:.0f})">{escape(self.y)}</text>'
        )
        keys = "".join(
            f'<li><svg class="key" viewBox="0 0 16 10" aria-hidden="true"><line class="line {style}" x1="1" x2="15" '
            f'y1="5" y2="5"/></svg>{escape(name)}</li>'
            for name, style in self.legend
        )
        legend = f'<ul class="legend">{keys}</ul>' if keys else ""
        return (
            f'<figure class="chart"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.label)}">'
            f"{ticks}{''.join(self.marks)}{names}</svg>{legend}</figure>"
        )

    def across(self, x: float) -> float:
        low, high = self.x_range
        return LEFT + (min(max(x, low), high) - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (min(max(y, low), high) - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)

    def _name(self, name: str, style: str) -> None:
        if name:
            self.legend.append((name, style))

    def _x_tick(self, x: float) -> str:
        place, floor = f"{self.across(x):.1f}", HEIGHT - BOTTOM
        return (
            f'<line class="grid" x1="{place}" x2="{place}" y1="{TOP}" y2="{floor}"/>'
            f'<text class="tick" x="{place}" y="{floor + 15}" text-anchor="middle">{escape(self.x_format(x))}</text>'
        )

    def _y_tick(self, y: float) -> str:
        place, said = self.up(y), escape(self.y_format(y))
        return (
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{place + 3.5:.1f}" text-anchor="end">{said}</text>'
        )


def nice(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low to high: steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= raw * 0.999)
    if step > high - low:  # then none may be a multiple of 5; of 2, one is
        step = 2 * power
    first = math.ceil(low / step - 1e-9)
    return [round(count * step, 12) for count in range(first, math.floor(high / step + 1e-9) + 1)]


def around(values: Sequence[float], share: float = 0.06, floor: float | None = None) -> tuple[float, float]:
    """A range that holds the values, with a little air."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    air = (high - low) * share or max(abs(high), 1e-6) * share
    return (max(low - air, floor) if floor is not None else low - air), high + air
