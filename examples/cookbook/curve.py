#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The curves of a supervised recipe and of one for reinforcement learning, of the metrics.jsonl that the cookbook writes.

    python examples/cookbook/curve.py --supervised LOG --reinforcement LOG... -o curve.svg

On the left is the loss of sl_loop.py over steps, on the right the mean reward of rl_loop.py: one line for each run.
"""

import argparse
import json
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 300, 190, 44, 40
STYLE = """
text { font: 12px sans-serif; fill: #1f2328 } .axis { stroke: #8c959f; fill: none } .small { font-size: 11px; fill: #59636e }
polyline { fill: none; stroke-width: 2; stroke: #1a7f37 } polyline.line1 { stroke: #bc4c00 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9198a1 }
  polyline { stroke: #3fb950 } polyline.line1 { stroke: #f0883e } }
"""


def read(log, key):
    """[(step, value)]."""
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    points = [(row["step"], row[key]) for row in rows if key in row]
    if not points:
        raise SystemExit(f"{log}: expected metrics with {key}, received none")
    return points


def panel(runs, title, offset, top):
    last = max(step for run in runs for step, _ in run)
    across = lambda step: offset + LEFT + WIDTH * step / last
    up = lambda value: TOP + HEIGHT * (1 - value / top)
    parts = [f'<text x="{offset + LEFT}" y="18">{title}</text>',
             f'<path class="axis" d="M{across(0):.1f},{TOP} V{TOP + HEIGHT} H{across(last):.1f}"/>',
             f'<text class="small" text-anchor="middle" x="{across(last / 2):.0f}" y="{TOP + HEIGHT + 32}">steps</text>']  # fmt: skip
    for part in range(5):
        parts += [f'<text class="small" text-anchor="end" x="{across(0) - 5:.1f}" y="{up(top * part / 4) + 4:.1f}">{top * part / 4:g}</text>',
                  f'<text class="small" text-anchor="middle" x="{across(last * part / 4):.1f}" y="{TOP + HEIGHT + 15}">'
                  f"{last * part / 4:.0f}</text>"]  # fmt: skip
    for number, run in enumerate(runs):
        points = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in run)
        parts.append(f'<polyline class="line{number % 2}" points="{points}"/>')
    return parts


def picture(supervised, reinforcement):
    """An SVG."""
    width, height = 2 * (LEFT + WIDTH + 16), TOP + HEIGHT + 42
    highest = max(value for _, value in supervised)
    top = next(size for size in (0.02, 0.04, 0.08, 0.12, 0.2, 0.4, 0.8, 2, 4, 8) if size >= highest)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
             f"<style>{STYLE}</style>", *panel([supervised], "sl_loop.py: loss per token", 0, top),
             *panel(reinforcement, "rl_loop.py: mean reward", LEFT + WIDTH + 16, 1)]  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--supervised", required=True, type=Path, metavar="LOG", help="log_path of sl_loop.py")
    parser.add_argument("--reinforcement", required=True, nargs="+", type=Path, metavar="LOG", help="log_path of rl_loop.py")
    parser.add_argument("-o", "--out", required=True, type=Path, metavar="FILE", help="write the picture here, an SVG")
    arguments = parser.parse_args(given)
    supervised = read(arguments.supervised, "train_mean_nll")
    reinforcement = [read(log, "reward/total") for log in arguments.reinforcement]
    for name, run in [("loss", supervised), *(("reward", run) for run in reinforcement)]:
        mean = lambda points: sum(value for _, value in points) / len(points)
        print(f"{name}: {mean(run[:5]):.3f} over the first five steps, {mean(run[-5:]):.3f} over the last five of {len(run)}")
    arguments.out.write_text(picture(supervised, reinforcement))


if __name__ == "__main__":
    main()
