# SPDX-License-Identifier: Apache-2.0
"""Line charts as plain SVG, for light and dark pages."""

import math
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 560, 300, 56, 46, 62, 22
COLOURS = [("#1a7f37", "#3fb950"), ("#0969da", "#4493f8"), ("#bc4c00", "#f0883e"), ("#8250df", "#ab7df8"), ("#59636e", "#9198a1"),
           ("#bf3989", "#f778ba"), ("#9a6700", "#d29922"), ("#1b7c83", "#39c5cf")]  # on light pages, on dark pages


def style():
    light, dark = (" ".join(f".c{number} {{ stroke: {pair[side]}; fill: {pair[side]} }}" for number, pair in enumerate(COLOURS))
                   for side in (0, 1))  # fmt: skip
    return f"""
text {{ font: 12px sans-serif; fill: #1f2328 }} .small {{ font-size: 11px; fill: #59636e }} .axis {{ stroke: #8c959f; fill: none }}
.grid {{ stroke: #d1d9e0; fill: none }} .bar {{ fill: none; stroke-width: 2 }} .dashed {{ stroke-dasharray: 5 4 }}
{light} polyline.bar {{ fill: none }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} .small {{ fill: #9198a1 }} .grid {{ stroke: #3d444d }}
  {dark} }}
"""


@dataclass
class Series:
    name: str
    points: list  # (x, y) or (x, y, low, high)
    dashed: bool = False  # what is computed or was published, not measured here
    joined: bool = True


@dataclass
class Chart:
    title: str
    x: str
    y: str
    series: list
    note: str  # machine and commit
    log: bool = False  # both axes
    from_zero: bool = True  # the vertical axis, unless log
    ticks: list = field(default_factory=list)  # (x, label); empty: by the values


def ticks_of(low, high, log):
    if log:
        return [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    step = 10 ** math.floor(math.log10((high - low) or 1))
    step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (step * part) <= 8)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


class Frame:
    """Where values stand in the picture."""

    def __init__(self, chart):
        points = [point for series in chart.series for point in series.points]
        if not points:
            raise ValueError(f"{chart.title}: expected points, received none")
        xs, ys = [point[0] for point in points], [value for point in points for value in point[1:]]
        self.log = chart.log
        self.x_ticks = chart.ticks or [(value, f"{value:g}") for value in ticks_of(min(xs), max(xs), chart.log)]
        self.y_ticks = ticks_of(0 if chart.from_zero and not chart.log else min(ys), max(ys), chart.log)
        places = [tick[0] for tick in self.x_ticks]
        self.x_range, self.y_range = (min(places + xs), max(places + xs)), (self.y_ticks[0], self.y_ticks[-1])

    def _part(self, value, limits):
        low, high = limits
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / ((high - low) or 1)

    def across(self, value):
        return LEFT + WIDTH * self._part(value, self.x_range)

    def up(self, value):
        return TOP + HEIGHT * (1 - self._part(value, self.y_range))


def axes(chart, frame):
    parts = []
    for value in frame.y_ticks:
        parts += [f'<path class="grid" d="M{LEFT},{frame.up(value):.1f} H{LEFT + WIDTH}"/>',
                  f'<text class="small" text-anchor="end" x="{LEFT - 6}" y="{frame.up(value) + 4:.1f}">'
                  f"{value:g}</text>"]  # fmt: skip
    for value, label in frame.x_ticks:
        parts.append(
            f'<text class="small" text-anchor="middle" x="{frame.across(value):.1f}" y="{TOP + HEIGHT + 16}">{escape(label)}</text>'
        )
    parts += [f'<path class="axis" d="M{LEFT},{TOP} V{TOP + HEIGHT} H{LEFT + WIDTH}"/>',
              f'<text class="small" text-anchor="middle" x="{LEFT + WIDTH / 2:.0f}" y="{TOP + HEIGHT + 34}">'
              f"{escape(chart.x)}</text>",
              f'<text x="{LEFT}" y="18">{escape(chart.title)}</text>',
              f'<text class="small" x="{LEFT}" y="36">{escape(chart.y)}</text>']  # fmt: skip
    return parts


def curve(series, number, frame):
    colour = f"c{number % len(COLOURS)}"
    dashed = " dashed" if series.dashed else ""
    parts = [f'<path class="bar {colour}" d="M{frame.across(x):.1f},{frame.up(more[0]):.1f} V{frame.up(more[1]):.1f}"/>'
             for x, _, *more in series.points if more]  # fmt: skip
    if series.joined:
        line = " ".join(f"{frame.across(x):.1f},{frame.up(y):.1f}" for x, y, *_ in series.points)
        parts.append(f'<polyline class="bar {colour}{dashed}" points="{line}"/>')
    return parts + [
        f'<circle class="{colour}" cx="{frame.across(x):.1f}" cy="{frame.up(y):.1f}" r="3"/>' for x, y, *_ in series.points
    ]


def legend(chart):
    parts = []
    for number, series in enumerate(chart.series):
        y = TOP + HEIGHT + BOTTOM - 8 + LEGEND * number
        colour = f"c{number % len(COLOURS)}"
        line = f'<path class="bar {colour}{" dashed" if series.dashed else ""}" d="M{LEFT},{y - 4} h24"/>'
        parts += [line if series.joined else f'<circle class="{colour}" cx="{LEFT + 12}" cy="{y - 4}" r="3"/>',
                  f'<text x="{LEFT + 32}" y="{y}">{escape(series.name)}</text>']  # fmt: skip
    return parts


def svg(chart):
    frame = Frame(chart)
    width, height = LEFT + WIDTH + 44, TOP + HEIGHT + BOTTOM + LEGEND * len(chart.series) + 14
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
             f"<style>{style()}</style>", *axes(chart, frame)]  # fmt: skip
    for number, series in enumerate(chart.series):
        parts += curve(series, number, frame)
    note = f'<text class="small" x="{LEFT}" y="{height - 8}">{escape(chart.note)}</text>'
    return "\n".join([*parts, *legend(chart), note, "</svg>", ""])
