"""Small SVG charts. Colours come from the style sheet of the page, so that they follow its light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 22, 12, 44


def percent(value: float) -> str:
    """Without trailing zeros: 20%, 97.5%, 0.02%."""
    return f"{100 * value:.3g}%" if value < 0.995 else f"{100 * value:.4g}%"


def number(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")


@dataclass
class Chart:
    """Marks are added in data coordinates; `svg` draws the axes around them. `label` is for screen readers."""

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
        points = " ".join(f"{self.to_x(x):.1f},{self.to_y(y):.1f}" for x, y in zip(xs, ys, strict=True))
        self.marks.append(f'<polyline class="line {style}" points="{points}"/>')
        self._add_legend(name, style)

    def dots(self, xs: Sequence[float], ys: Sequence[float], style: str, name: str = "") -> None:
        radius = 1.8 if "small" in style else 3.2
        for x, y in zip(xs, ys, strict=True):
            position = f'cx="{self.to_x(x):.1f}" cy="{self.to_y(y):.1f}"'
            self.marks.append(f'<circle class="dot {style}" {position} r="{radius}"/>')
        self._add_legend(name, style)

    def spans(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], style: str) -> None:
        for x, low, high in zip(xs, lows, highs, strict=True):
            center, bottom, top = f"{self.to_x(x):.1f}", f"{self.to_y(low):.1f}", f"{self.to_y(high):.1f}"
            self.marks.append(f'<line class="span {style}" x1="{center}" x2="{center}" y1="{bottom}" y2="{top}"/>')

    def steps(self, edges: Sequence[float], heights: Sequence[float], style: str, name: str = "") -> None:
        """A histogram as a filled outline."""
        floor = self.to_y(self.y_range[0])
        points = [f"{self.to_x(edges[0]):.1f},{floor:.1f}"]
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
            points += [f"{self.to_x(x):.1f},{self.to_y(height):.1f}" for x in (left, right)]
        points.append(f"{self.to_x(edges[-1]):.1f},{floor:.1f}")
        self.marks.append(f'<polygon class="area {style}" points="{" ".join(points)}"/>')
        self._add_legend(name, style)

    def rule(self, x: float, style: str, name: str = "") -> None:
        position = f"{self.to_x(x):.1f}"
        self.marks.append(
            f'<line class="rule {style}" x1="{position}" x2="{position}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
        self._add_legend(name, f"{style} dashed")

    def svg(self) -> str:
        ticks = "".join(self._x_tick(x) for x in (self.x_ticks or nice_ticks(*self.x_range, 6)))
        ticks += "".join(self._y_tick(y) for y in nice_ticks(*self.y_range, 5))
        center_x, center_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
        names = (
            f'<text class="axis-name" x="{center_x:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x)}</text>'
        )
        names += (
            f'<text class="axis-name" x="12" y="{center_y:.0f}" text-anchor="middle" '
            f'transform="rotate(-90 12 {center_y:.0f})">{escape(self.y)}</text>'
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

    def to_x(self, x: float) -> float:
        low, high = self.x_range
        return LEFT + (min(max(x, low), high) - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def to_y(self, y: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (min(max(y, low), high) - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)

    def _add_legend(self, name: str, style: str) -> None:
        if name:
            self.legend.append((name, style))

    def _x_tick(self, x: float) -> str:
        position, floor = f"{self.to_x(x):.1f}", HEIGHT - BOTTOM
        return (
            f'<line class="grid" x1="{position}" x2="{position}" y1="{TOP}" y2="{floor}"/>'
            f'<text class="tick" x="{position}" y="{floor + 15}" text-anchor="middle">{escape(self.x_format(x))}</text>'
        )

    def _y_tick(self, y: float) -> str:
        position, text = self.to_y(y), escape(self.y_format(y))
        return (
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{position:.1f}" y2="{position:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{position + 3.5:.1f}" text-anchor="end">{text}</text>'
        )


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high, in steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if step > high - low:  # the range may contain no multiple of 5, but it contains a multiple of 2
        step = 2 * power
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def padded_range(values: Sequence[float], padding: float = 0.06, floor: float | None = None) -> tuple[float, float]:
    """A range that contains the values, with some padding; from -1 to 1 if all are 0."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    space = (high - low) * padding or abs(high) * padding or 1.0
    return (max(low - space, floor) if floor is not None else low - space), high + space
