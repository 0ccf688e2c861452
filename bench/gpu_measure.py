# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmarks share: a budget of seconds, timing of several sides in turns, tables and JSON."""

import argparse
import functools
import json
import signal
import statistics
import sys
import time
from pathlib import Path

PASSES = ("forward", "backward")
REPOSITORY = Path(__file__).resolve().parents[1]


class Failure(Exception):
    """What the user has to know, in one line."""


class Stopped(BaseException):
    """SIGTERM came: report what there is."""


def stop_on_sigterm():
    """From here on SIGTERM raises Stopped, so that a run that is cut short still prints its table."""

    def stop(number, frame):
        raise Stopped

    signal.signal(signal.SIGTERM, stop)


def say(text):
    print(f"{Path(sys.argv[0]).stem}: {text}", file=sys.stderr, flush=True)


class Budget:
    """Seconds that may still be spent. What does not fit is left out by name, and said so under the table."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds
        self.left_out = []

    @property
    def left(self):
        return self.end - time.monotonic()

    def has(self, seconds, what):
        if self.left >= seconds:
            return True
        self.left_out.append(what)
        return False

    def each(self, items, seconds, name):
        """The items for which there is time."""
        for item in items:
            if self.has(seconds, name(item)):
                yield item

    def note(self):
        return left_out_note(self.left_out)


def left_out_note(names):
    return f"\nLeft out for want of time: {', '.join(names)}.\n" if names else ""


# ---- Timing ------------------------------------------------------------------------------------------------


class Timer:
    """Milliseconds of calls on a device: by CUDA events, with the L2 cache overwritten before each; on the CPU by clock."""

    FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU
    AHEAD_CYCLES = 1_500_000  # about a millisecond, in which the host gets through autograd to the launches

    def __init__(self, device):
        import torch

        self.torch = torch
        self.cuda = torch.device(device).type == "cuda"
        self.flush = torch.empty(self.FLUSH_BYTES, dtype=torch.int8, device=device) if self.cuda else None

    def once(self, call):
        """Starts the call; returns a function that waits and says how long it took."""
        if not self.cuda:
            begin = time.perf_counter()
            call()
            took = (time.perf_counter() - begin) * 1e3
            return lambda: took
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        self.torch.cuda._sleep(self.AHEAD_CYCLES)
        begin.record()
        call()
        end.record()

        def milliseconds():
            end.synchronize()
            return begin.elapsed_time(end)

        return milliseconds

    def in_turns(self, sides, seconds, min_rounds=3, max_rounds=15, waits=lambda name: None):
        """sides: name -> call. {name: [milliseconds of each round]}; the order rotates, so that drift favours none. One
        round before is not counted. As many rounds as fit the seconds. waits(name): called before it waits for a side."""
        if not sides:
            return {}
        samples = {name: [] for name in sides}
        for name, call in sides.items():
            waits(name)
            self.once(call)()
        began, names = time.monotonic(), list(sides)
        for index in range(max_rounds):
            shift = index % len(names)
            started = [(name, self.once(sides[name])) for name in names[shift:] + names[:shift]]
            for name, wait in started:
                waits(name)
                samples[name].append(wait())
            spent = time.monotonic() - began
            if index + 1 >= min_rounds and spent * (index + 2) / (index + 1) > seconds:
                break
        return samples


def relative_distance(a, b):
    """Of tensor a from tensor b, in norms."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def spread(samples):
    """median, lowest, highest"""
    return statistics.median(samples), min(samples), max(samples)


# ---- Results -----------------------------------------------------------------------------------------------


def markdown(headers, rows):
    """A table; a header that ends in a space is left-aligned. Cells are text."""
    lines = ["| " + " | ".join(header.strip() for header in headers) + " |",
             "|" + "|".join("---" if header.endswith(" ") else "---:" for header in headers) + "|"]  # fmt: skip
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


@functools.cache
def hardware(device):
    """One line: the device, LibTorch and its libraries."""
    import torch

    if torch.device(device).type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return (f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, "
            f"cuDNN {torch.backends.cudnn.version()}")  # fmt: skip


def add_common(parser, seconds, device=True):
    add = parser.add_argument
    add("--seconds", type=float, default=seconds, metavar="S",
        help="stop starting new measurements after so long; what was left out is named (default: %(default)s)")  # fmt: skip
    if device:
        add("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script itself (default: %(default)s)")
    add("-o", "--out", type=Path, metavar="FILE.md", help="write the table to this file too")
    add("--json", type=Path, metavar="FILE.json", help="write all figures to this file")


def finish(args, text, record, show=True):
    """Prints the table, where it is to be shown, and writes what was asked for; again and again, as figures come."""
    if show:
        print(text, end="")
    for path, content in ((args.out, text), (args.json, json.dumps(record, indent=1) + "\n")):
        if path:
            # Whoever is killed here leaves the earlier one.
            new = path.with_name(path.name + ".new")
            new.write_text(content)
            new.replace(path)


def list_of(kind):
    """argparse type: comma-separated; `none`: an empty list."""

    def parse(text):
        try:
            return [] if text == "none" else [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected comma-separated values or none, received {text!r}") from None

    return parse


def run_main(main):
    """Exit status 1 and one line for what the user has to know."""
    try:
        return main()
    except Failure as failure:
        say(failure)
        return 1
