#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts what the stages of bench/gpu_suite.sh wrote into report.md and results.json, and prints the short table.

    python3 bench/gpu_summary.py build/gpu/suite --out runs/gpu-suite

The folder has stages.tsv (stage, result, seconds) and, by stage, NAME.md, NAME.json and NAME.last, the last line that it
printed, which is shown where it left nothing else. A file that is broken is said to be. Exit status 1 when a stage failed.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from commit import commit
from gpu_measure import markdown

MOST_LINES = 12  # of a stage in the short table


def checks_lines(record):
    outcomes = record["outcomes"]
    failed = [outcome for outcome in outcomes if not outcome["passed"]]
    lines = [f"{len(outcomes) - len(failed)} of {len(outcomes)} passed"]
    return lines + [f"{o['what']}: {o['detail']}" for o in failed or outcomes]


def attention_lines(record):
    """A line for each tree; its passes follow each other, forward first."""
    lines = []
    for r in record["records"]:
        rates = ", ".join(f"{side} {tflops:.0f}" for side, tflops in r["tflops"].items())
        if r["pass"] == "forward":
            lines.append(f"{r['tree']}, {r['heads']}/{r['key_heads']} x {r['head_dim']}: TFLOP/s {rates}")
        else:
            lines[-1] += f"; {r['pass']} {rates}"
    return lines + record["not_measured"]


def step_lines(record):
    return [f"{r['model']} {r['name']}: speed-up {r['speedup']:.2f} of {r['bound']:.2f} ({r['share_of_bound']:.2f}), "
            f"MFU {r['mfu'] * 100:.0f} %" for r in record["records"]] + record["failures"]  # fmt: skip


def head_lines(record):
    return [f"{r['vocabulary']:,} x {r['rows']:,} x {r['hidden']:,}: {r['milliseconds']['espalier'][0]:.1f} ms, "
            f"speed-up {r['speedups'][0]:.2f}" for r in record["records"]] + record["failures"]  # fmt: skip


def patched_lines(record):
    """A line for each case."""
    lines = []
    for r in record["records"]:
        sides = [f"{side} {milliseconds[0]:.1f}" for side, milliseconds in r["milliseconds"].items()]
        over = [f"{side} over Step {ratio[0]:.3f}" for side, ratio in r["over_step"].items()]
        lines.append(f"{r['model']} {r['case']}, ms: {'; '.join(sides + over)}")
    return lines + record["failures"]


def recurrent_lines(record):
    """A line for each pass."""
    lines = []
    for r in record["records"]:
        sides = [f"{name} {milliseconds[0]:.2f}" for name, milliseconds in r["milliseconds"].items()]
        sides += [f"({name} {mark:.2f})" for name, mark in r["marks"].items()]
        lines.append(f"{r['operator']}, {r['tree']}, {r['pass']} ms: {', '.join(sides)}")
    return lines + record["failures"]


LINES = {"qualify": checks_lines, "tests": checks_lines, "verify": checks_lines, "sanitizer": checks_lines, "attention": attention_lines,
         "attention_flex": attention_lines, "libraries": attention_lines, "waves": recurrent_lines,
         "step": step_lines, "step4b": step_lines, "step4b_rest": step_lines, "head": head_lines,
         "patched": patched_lines}  # fmt: skip


def read_stages(folder):
    path = folder / "stages.tsv"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [line.split("\t") for line in lines]


def read_record(folder, stage):
    """The stage's JSON; None where there is none, a text where it is broken."""
    path = folder / f"{stage}.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        return f"{path.name}: {error}"


def short_lines(folder, stage, result, record):
    if record is None or stage not in LINES:
        last = folder / f"{stage}.last"
        return [last.read_text().strip() if result != "passed" and last.is_file() else ""]
    if isinstance(record, str):
        return [record]
    lines = LINES[stage](record)
    more = len(lines) - MOST_LINES
    return (lines[:MOST_LINES] + ([f"... {more} more in report.md"] if more > 0 else [])) or ["nothing was measured"]


def summarize(folder, out):
    """The short table and whether all stages passed; writes the two files."""
    rows, results, pages = [], {"commit": commit(), "stages": {}}, []
    stages = read_stages(folder)
    for stage, result, seconds in stages:
        record = read_record(folder, stage)
        results["stages"][stage] = {"result": result, "seconds": float(seconds), "record": record}
        page = folder / f"{stage}.md"
        pages.append(f"## {stage}: {result}, {seconds} s\n\n{page.read_text() if page.is_file() else 'No table.'}\n")
        first, *others = short_lines(folder, stage, result, record)
        rows.append([stage, result, seconds, first.replace("|", "/")])
        rows += [["", "", "", line.replace("|", "/")] for line in others]
    table = markdown(["stage ", "result ", "seconds", "what "], rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(f"# GPU suite, commit {commit()}\n\n{table}\n" + "\n".join(pages))
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return table, all(result in ("passed", "left out") for _, result, _ in stages)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the stages wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for report.md and results.json")
    args = parser.parse_args(argv)
    table, passed = summarize(args.folder, args.out)
    print(table, end="")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
