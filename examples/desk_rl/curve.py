#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The learning curves that train.py --out wrote, as a table and a picture.

    python examples/desk_rl/curve.py runs/desk/*.jsonl -o curve.svg

Each line of the picture is the mean over the runs (seeds) of a strategy, the band around it reaches from the lowest to the
highest run: on the left over iterations, on the right over the seconds of training, without sampling.
"""

import argparse
import json
import statistics
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 300, 190, 44, 40
NAMES = {"tree-packing": "trees", "sequence-packing": "packing"}
STYLE = """
text { font: 12px sans-serif; fill: #1f2328 } .axis { stroke: #8c959f; fill: none } .small { font-size: 11px; fill: #59636e }
.line0 { stroke: #1a7f37; fill: #1a7f37 } .line1 { stroke: #bc4c00; fill: #bc4c00 }
polyline { fill: none !important; stroke-width: 2 } polygon { stroke: none !important; opacity: 0.18 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9198a1 }
  .line0 { stroke: #3fb950; fill: #3fb950 } .line1 { stroke: #f0883e; fill: #f0883e } }
"""


def read_curves(files):
    """{strategy: [one list of points for each run]}."""
    curves = {}
    for file in files:
        for line in Path(file).read_text().splitlines():
            point = json.loads(line)
            runs = curves.setdefault(point["strategy"], [])
            if not runs or runs[-1][-1]["seed"] != point["seed"]:
                runs.append([])
            runs[-1].append(point)
    for strategy, runs in curves.items():
        if len({tuple(point["iteration"] for point in run) for run in runs}) > 1:
            raise SystemExit(f"{strategy}: expected runs that were measured at the same iterations")
    if not curves:
        raise SystemExit("expected files that train.py --out wrote, received no points")
    return curves


def table(curves):
    lines = [f"{'':<18} {'runs':>4} {'success: start':>22} {'end':>22} {'training seconds':>24}"]
    for strategy, runs in curves.items():
        def spread(place, name, digits, runs=runs):
            values = [run[place][name] for run in runs]
            return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
        lines.append(f"{strategy:<18} {len(runs):>4} {spread(0, 'success', 3):>22} {spread(-1, 'success', 3):>22} "
                     f"{spread(-1, 'training_seconds', 1):>24}")  # fmt: skip
    return "\n".join(lines)


def panel(curves, name, title, offset):
    """One diagram: success over `name`."""
    most = max(run[-1][name] for runs in curves.values() for run in runs) or 1
    across = lambda value: offset + LEFT + WIDTH * value / most
    up = lambda success: TOP + HEIGHT * (1 - success)
    parts = [f'<path class="axis" d="M{across(0):.1f},{TOP} V{TOP + HEIGHT} H{across(most):.1f}"/>',
             f'<text class="small" text-anchor="middle" x="{across(most / 2):.0f}" y="{TOP + HEIGHT + 32}">{title}</text>']  # fmt: skip
    for part in range(5):
        parts += [f'<text class="small" text-anchor="end" x="{across(0) - 5:.1f}" y="{up(part / 4) + 4:.1f}">{part / 4:g}</text>',
                  f'<text class="small" text-anchor="middle" x="{across(most * part / 4):.1f}" y="{TOP + HEIGHT + 15}">'
                  f"{most * part / 4:.0f}</text>"]  # fmt: skip
    for number, runs in enumerate(curves.values()):
        points = list(zip(*runs, strict=True))
        where = [across(statistics.mean(point[name] for point in each)) for each in points]
        success = [[point["success"] for point in each] for each in points]
        draw = lambda heights, xs: " ".join(f"{x:.1f},{up(height):.1f}" for x, height in zip(xs, heights, strict=True))
        band = draw(map(max, success), where) + " " + draw([min(each) for each in reversed(success)], where[::-1])
        parts += [f'<polygon class="line{number % 2}" points="{band}"/>',
                  f'<polyline class="line{number % 2}" points="{draw(map(statistics.mean, success), where)}"/>']  # fmt: skip
    return parts


def picture(curves):
    """An SVG."""
    width, height = 2 * (LEFT + WIDTH + 16), TOP + HEIGHT + 42
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
             f"<style>{STYLE}</style>", f'<text x="{LEFT}" y="18">success on held-out questions</text>']  # fmt: skip
    for number, strategy in enumerate(curves):
        x = LEFT + WIDTH - 90 + 260 * number
        parts += [f'<rect class="line{number % 2}" x="{x}" y="9" width="18" height="9"/>',
                  f'<text x="{x + 24}" y="18">{NAMES.get(strategy, strategy)}</text>']  # fmt: skip
    parts += panel(curves, "iteration", "iterations", 0)
    parts += panel(curves, "training_seconds", "seconds of training", LEFT + WIDTH + 16)
    return "\n".join([*parts, "</svg>", ""])


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="that train.py --out wrote")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the picture here, an SVG")
    arguments = parser.parse_args(given)
    curves = read_curves(arguments.files)
    print(table(curves))
    if arguments.out:
        part = arguments.out.with_name(arguments.out.name + ".part")
        part.write_text(picture(curves))
        part.replace(arguments.out)


if __name__ == "__main__":
    main()
