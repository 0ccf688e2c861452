#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which kernels are right on this GPU, before their speed means anything: the verdicts of `espalier device --requalify --json`.

    python3 bench/gpu_qualify.py --espalier build/gpu/bin/espalier -o qualify.md --json qualify.json

--json has the command's whole report; --failed names the families that failed, one a line, for who measures the others. Exit
status 1 when a family failed or there is no GPU that can be used.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from commit import commit
from gpu_measure import REPOSITORY, Failure, finish, markdown, run_main, say


def report_of(espalier, seconds):
    """What the command prints; what it says beside goes to standard error."""
    try:
        done = subprocess.run([espalier, "device", "--requalify", "--json"], stdout=subprocess.PIPE, text=True, timeout=seconds)
    except OSError as error:
        raise Failure(f"{espalier}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"espalier device --requalify did not end within {seconds:g} s") from None
    if done.returncode != 0:
        raise Failure(f"espalier device --requalify ended with status {done.returncode}")
    return json.loads(done.stdout)


def outcomes_of(device, seconds):
    """In the form of bench/gpu_checks.py, for the short table. What is not for this device is no outcome."""
    return [
        {"part": kind, "what": f"{kind} {family}", "passed": verdict == "passed", "detail": verdict, "seconds": seconds}
        for kind in ("attention", "operators")
        for family, verdict in device.get(kind, {}).items()
        if verdict != "not for this device"
    ]


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--espalier", type=Path, default=REPOSITORY / "bin/espalier", metavar="PROGRAM", help="default: %(default)s")
    add("--seconds", type=float, default=1200, metavar="S", help="most time for all checks (default: %(default)s)")
    add("--failed", type=Path, metavar="FILE", help="write the names of families that failed to this file")
    add("-o", "--out", type=Path, metavar="FILE.md", help="write the table to this file too")
    add("--json", type=Path, metavar="FILE.json", help="write the whole report to this file")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    began = time.monotonic()
    report = report_of(args.espalier, args.seconds)
    seconds = round(time.monotonic() - began, 1)
    fault = report["cuda"]["fault"]
    if fault or not report["cuda"]["devices"]:
        raise Failure(f"expected a GPU, received none that can be used: {fault}")
    device = report["cuda"]["devices"][0]  # what the other scripts measure
    outcomes = outcomes_of(device, seconds)
    failed = [outcome for outcome in outcomes if not outcome["passed"]]
    rows = [[outcome["what"], outcome["detail"].replace("|", "/")] for outcome in outcomes]
    text = f"Kernels of {device['name']} (commit {commit()})\n\n" + markdown(["family ", "verdict "], rows)
    finish(args, text, {"outcomes": outcomes, "report": report})
    if args.failed:
        args.failed.write_text("".join(outcome["what"].split()[-1] + "\n" for outcome in failed))
    if failed:
        say(f"{len(failed)} of {len(outcomes)} families of kernels failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
