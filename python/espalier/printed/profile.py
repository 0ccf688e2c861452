# SPDX-License-Identifier: Apache-2.0
"""The table of `--profile`: where the time of a step went, read from its trace."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A kind of work. Nested events have it, too, unless it is only a default."""

    work: str
    part: str = ""
    is_default: bool = True

    def __str__(self) -> str:
        return self.work + (f", {self.part}" if self.part else "")


class Event(NamedTuple):
    """An operator, a region of the program, or a kernel or copy of the GPU. Times in nanoseconds."""

    begin: int
    end: int
    name: str
    category: str
    thread: Any
    launch: Any  # equal for an operator and what it launched


_OTHER = Kind("other")
_REGIONS = ("plan", "batch", "objective", "optimizer", "exchange")
_WORK = {"treeattention": "attention", "edgelogprobs": "head", "headlogprobs": "head", "linear": "linear", "rmsnorm": "norm",
         "rotary": "rotary", "swiglu": "SwiGLU", "embedding": "embedding"}  # fmt: skip
_OPERATORS = ("cpu_op", "user_annotation")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def profile_text(trace: str, on_gpu: bool, flops_per_second: float, flops: dict[str, float]) -> str:
    """Seconds of each kind of work, those of the GPU if `on_gpu`, which add up to the step's.

    `flops_per_second`: of one matrix product. `flops`: of the kinds of work where they are counted.
    """
    events = _events(Path(trace))
    step = next(event for event in events if event.name == "step")
    inside = [event for event in events if event.begin >= step.begin and event.end <= step.end]
    spent = _gpu_time(step, inside) if on_gpu else _host_time(step, inside)
    seconds = (step.end - step.begin) * 1e-9
    text = f"profile of a step, {trace}\n{'work':32}{'seconds':>11}{'share':>8}{'GFLOP/s':>10}{'of GEMM':>9}\n"
    for work, nanoseconds in sorted(spent.items(), key=lambda row: -row[1]):
        text += f"{work:32}{nanoseconds * 1e-9:11.6f}{nanoseconds * 1e-9 / seconds:8.4f}"
        if flops.get(work, 0) > 0 and nanoseconds > 0:
            rate = flops[work] / (nanoseconds * 1e-9)
            text += f"{rate / 1e9:10.4g}{rate / flops_per_second:9.3f}"
        text += "\n"
    bound = sum(flops.get(work, 0) for work in spent) / flops_per_second
    return text + (f"GEMM bound: a matrix product ran at {flops_per_second / 1e9:.1f} GFLOP/s; at that rate the step would take "
                   f"{bound:.4f} s. It took {seconds:.4f} s: {bound / seconds:.3f}")  # fmt: skip


def _events(trace: Path) -> list[Event]:
    # Microseconds with three decimals, of which a float would lose the last.
    found = json.loads(trace.read_bytes(), parse_float=Decimal)["traceEvents"]
    return [Event(int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000), event["name"], event["cat"], event["tid"],
                  event.get("args", {}).get("External id"))
            for event in found if event.get("ph") == "X" and event.get("cat") in _OPERATORS + _ON_GPU]  # fmt: skip


def _kind_of(name: str, outer: Kind) -> Kind:
    if not outer.is_default:
        return Kind("linear", name, False) if outer.work == "linear" and name == "gradient of weight" else outer
    if name in _REGIONS:
        return Kind(name, is_default=False)
    if name.startswith("layer "):
        return Kind("residual", "forward")
    if name in ("attention", "mlp", "head"):
        return _OTHER
    if name.startswith("autograd::engine::evaluate_function"):  # also sums gradients that reach a tensor on several paths
        return Kind("residual", "backward")
    # Names of operators, of autograd nodes and of regions differ in case and underscores.
    simple = "".join(c for c in name.lower() if c.isalnum())
    backward = "backward" in simple or "cppnode" in simple
    for contained, work in _WORK.items():
        if contained in simple:
            part = "forward" if not backward else "gradient of input" if work == "linear" else "backward"
            return Kind(work, part, is_default=False)
    return outer


def _walk(events: Iterable[Event], begin: int, spend: Callable[[Kind, int], None]) -> Iterable[tuple[Event, Kind]]:
    """Gives the nested events of one thread. spend(kind, time) for each interval, with the kind of the innermost event."""
    open_events: list[tuple[int, Kind]] = []
    now = begin

    def pass_until(until: int) -> None:
        nonlocal now
        if open_events and until > now:
            spend(open_events[-1][1], until - now)
        now = max(now, until)

    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        while open_events and open_events[-1][0] <= event.begin:
            pass_until(open_events[-1][0])
            open_events.pop()
        pass_until(event.begin)
        end, outer = open_events[-1] if open_events else (event.end, _OTHER)
        open_events.append((min(event.end, end), _kind_of(event.name, outer)))
        yield event, open_events[-1][1]
    while open_events:
        pass_until(open_events[-1][0])
        open_events.pop()


def _host_time(step: Event, events: list[Event]) -> dict[str, int]:
    """Of the thread that takes the step."""
    spent: dict[str, int] = defaultdict(int)

    def spend(kind: Kind, time: int) -> None:
        spent[str(kind)] += time

    own = (event for event in events if event.category in _OPERATORS and event.thread == step.thread)
    for _ in _walk(own, step.begin, spend):
        pass
    return spent


def _gpu_time(step: Event, events: list[Event]) -> dict[str, int]:
    """Kernels and copies count as the operator that launched them, on any thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.category in _OPERATORS:
            threads[event.thread].append(event)
    kinds = {event.launch: kind for thread in threads.values()
             for event, kind in _walk(thread, step.begin, lambda kind, time: None)}  # fmt: skip
    spent: dict[str, int] = defaultdict(int)
    for event in events:
        if event.category in _ON_GPU:
            spent[str(kinds.get(event.launch, _OTHER))] += event.end - event.begin
    spent["idle"] = max(0, step.end - step.begin - sum(spent.values()))
    return spent
