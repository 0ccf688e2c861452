#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that ptxas has kept the overlap of exponentials and products in the kernels for Hopper.

    tests/check_sass.py OBJECT...              object files of src/espalier/ops/kernels/cuda/hopper_attention_*.cu
    tests/check_sass.py --self-test OBJECT...  also spoils what was read and demands that it is noticed

In the loop of a kernel of OVERLAPPING two groups of products are under way: when the first is done, its exponentials
are worked out while the second still runs. ptxas may move arithmetic past the wait for the second one, and then
nothing overlaps (simt_hopper.h, settle). So of a loop's MUFU.EX2 all must stand between the wait that leaves one group
and the wait that leaves none. What they compute is checked by other tests.

Exits with 77 where there is no cuobjdump: of the CUDA toolkit, or as Triton brings it.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

OVERLAPPING = ("forward_tile_kernel", "backward_queries_kernel")
NOT_FOUND = 77
WAIT_FOR_ALL_BUT_ONE, WAIT_FOR_ALL, EXPONENTIAL = "wait 1", "wait 0", "ex2"


def find_cuobjdump():
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    if triton := importlib.util.find_spec("triton"):
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    return shutil.which("cuobjdump") or next((str(p / "cuobjdump") for p in places if (p / "cuobjdump").exists()), None)


def instructions(text):
    """(address, instruction) of one function."""
    return [(int(a, 16), i.strip()) for a, i in re.findall(r"/\*([0-9a-f]{4,6})\*/ +([^;]*?);", text)]


def event(instruction):
    if wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([01])$", instruction):
        return WAIT_FOR_ALL if wait[1] == "0" else WAIT_FOR_ALL_BUT_ONE
    return EXPONENTIAL if "MUFU.EX2" in instruction else None


def loops(code):
    """What happens in the innermost loops that wait for all but one group, each in the order of addresses."""
    found = []
    for address, instruction in code:
        jump = re.search(r"\bBRA 0x([0-9a-f]+)$", instruction)
        if not jump or int(jump[1], 16) >= address:
            continue
        body = [event(i) for a, i in code if int(jump[1], 16) <= a <= address]
        events = [each for each in body if each]
        if WAIT_FOR_ALL_BUT_ONE in events and EXPONENTIAL in events:
            found.append(events)
    shortest = min((len(each) for each in found), default=0)
    return [each for each in found if len(each) == shortest]


def fault(events):
    first = events.index(WAIT_FOR_ALL_BUT_ONE)
    if WAIT_FOR_ALL not in events[first:]:
        return "no wait for the second group"
    last = events.index(WAIT_FOR_ALL, first)
    late = events[last:].count(EXPONENTIAL)
    early = events[:first].count(EXPONENTIAL)
    if late or early:
        return f"of {events.count(EXPONENTIAL)} exponentials {early} stand before the wait that leaves one group and {late} after the next wait"
    return None


def kernels_of(cuobjdump, path):
    text = subprocess.run([cuobjdump, "-sass", path], check=True, capture_output=True, text=True).stdout
    for function in text.split("Function : ")[1:]:
        name = function.split("\n", 1)[0]
        if any(each in name for each in OVERLAPPING):
            yield name, loops(instructions(function))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+", metavar="OBJECT")
    parser.add_argument("--self-test", action="store_true", help="also demand that spoiled loops are noticed")
    args = parser.parse_args()
    cuobjdump = find_cuobjdump()
    if not cuobjdump:
        print("no cuobjdump: neither on PATH, nor in $CUDA_HOME/bin, nor with Triton")
        return NOT_FOUND
    checked, faults = 0, []
    for path in args.objects:
        if not re.search(r"hopper_attention_(forward|queries)", path):
            continue
        for name, found in kernels_of(cuobjdump, path):
            if not found:
                faults.append(f"{name}: expected a loop with two groups of products under way; found none")
            for events in found:
                checked += 1
                if message := fault(events):
                    faults.append(f"{name}: {message}")
                if args.self_test and not fault([*events, EXPONENTIAL]) and not fault([EXPONENTIAL, *events]):
                    faults.append(f"{name}: an exponential after the last wait was not noticed")
    for each in faults:
        print(each)
    print(f"{checked} loops checked")
    return 1 if faults or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
