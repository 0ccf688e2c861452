# SPDX-License-Identifier: Apache-2.0
"""The texts of `espalier verify`, `sample` and `device`: a row for each figure of what --json gives."""

import re
from typing import Any

from ..commands.console import count_of
from .figures import human_bytes, printable


def _rows(width: int, rows: list[tuple[str, str]]) -> str:
    return "".join(f"{name:<{width}}{text}\n" for name, text in rows)


def verify_text(report: dict[str, Any], max_error: float, max_error_ratio: float) -> str:
    """The limits: of the relative error in float64, of the error ratio elsewhere."""
    exact = report["dtype"] == "float64"
    limit = f" (at most {max_error:g})" if exact else ""
    rows = [("dtype, device", f"{report['dtype']}, {report['device']}"),
            ("flat tokens / tree tokens / encoded",
             f"{report['flat_tokens']:,} / {report['tree_tokens']:,} / {report['encoded_tokens']:,}"),
            ("loss, per trajectory", f"{report['loss']:.12g}"),
            ("relative error of the loss", f"{report['loss_rel_error']:.3g}"),
            ("relative error of gradients, worst",
             f"{report['grad_rel_error_max']:.3g} in {report['grad_rel_error_worst_parameter']}{limit}"),
            ("absolute error of log-probs, worst", f"{report['logprob_abs_error_max']:.3g}")]  # fmt: skip
    if not exact:
        rows.append(("error ratio, tree over per-trajectory",
                     f"worst {report['error_ratio_max']:.3f} in {report['error_ratio_worst_parameter']}, "
                     f"median {report['error_ratio_median']:.3f} (at most {max_error_ratio:g})"))  # fmt: skip
    if report["pad_token_id"] is not None:
        trained = "trained; Transformers does not (--freeze-pad-embedding)"
        how = "not trained, as in Transformers" if report["freeze_pad_embedding"] else trained
        rows.append(("input embedding of the pad token", f"{report['pad_token_id']}: {how}"))
    isolation = "bitwise" if report["isolation_bitwise"] else "BROKEN"
    rows.append(("isolation", f"{isolation} in {count_of(report['isolation_trials'], 'trial')}"))
    return _rows(39, rows) + ("passed\n" if report["passed"] else "FAILED\n")


def sample_text(report: dict[str, Any], out: str, texts: list[tuple[str, int, str]]) -> str:
    """`out`: the file of the completions. `texts`: name, number of tokens and text of each, with --text."""
    completions = f"{report['completions']:,}"
    rows = [("prompts / completions", f"{report['prompts']:,} / {completions}"),
            ("prompt tokens: of all / encoded", f"{report['flat_prompt_tokens']:,} / {report['encoded_prompt_tokens']:,}"
             + _rate(report["encoded_prompt_tokens"], report["prompt_seconds"])),
            ("sampled tokens", f"{report['sampled_tokens']:,}{_rate(report['sampled_tokens'], report['decode_seconds'])}"),
            ("completions that reached a stop token", f"{report['stopped']:,} of {completions}")]  # fmt: skip
    if (mismatch := report.get("mismatch")) is not None:
        rows.append(("log-probs, sampler against training",
                     f"differ by {mismatch['largest']:.2g} at most, {mismatch['mean']:.2g} on average "
                     f"({count_of(mismatch['tokens'], 'token')} of {count_of(mismatch['rows'], 'row')})"))  # fmt: skip
    text = _rows(39, rows) + f"{out}: {count_of(report['completions'], 'row')}\n"
    return text + "".join(f"\n{name} ({count_of(tokens, 'token')})\n{said}\n" for name, tokens, said in texts)


def _rate(tokens: int, seconds: float) -> str:
    return f" in {_duration(seconds)} ({round(tokens / seconds):,} per second)" if seconds > 0 else ""


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m {rest:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def device_text(cpu: dict[str, Any], cuda: dict[str, Any], auto: str) -> str:
    """The CPU, the software of GPUs, each GPU, and what --device auto takes."""
    driver = f"{cuda['driver']}, CUDA up to {cuda['driver_cuda'] or 'none'}" if cuda["driver"] else "none"
    kernels = f"built with nvcc {cuda['nvcc']} for {cuda['architectures'] or 'none'}"
    if not cuda["nvcc"]:
        kernels = "none: this build had no nvcc; operators of LibTorch are used instead"
    rows = [("CPU", cpu["name"]), ("instruction set", cpu["instruction_set"]), ("threads", str(cpu["threads"])),
            ("matrix products", f"{cpu['matrix_products']} ({cpu['chosen_by']})"),
            *_rates("measured rates", cpu["rates"], "cpu"),
            ("LibTorch", f"{cuda['libtorch']}, CUDA {cuda['libtorch_cuda'] or 'none'}"), ("NVIDIA driver", driver),
            ("GPU kernels", kernels)]  # fmt: skip
    for gpu in cuda["devices"]:
        rows.append((gpu["device"], f"{gpu['name']}, compute capability {gpu['compute_capability']}, "
                     f"{human_bytes(gpu['memory_bytes'])}"))  # fmt: skip
        rows.append(("  ampere", code_of(gpu["compute_capability"], cuda["architectures"] or "")))
        rows += [(f"  {kind} {family}", verdict) for kind in ("attention", "operators", "taken")
                 for family, verdict in gpu.get(kind, {}).items()]  # fmt: skip
        rows += _rates("  measured rates", gpu["rates"], gpu["device"])
    if cuda["fault"]:
        rows.append(("CUDA", f"cannot be used: {cuda['fault']}"))
    return _rows(26, [*rows, ("--device auto", auto)])


def code_of(capability: str, architectures: str) -> str:
    """Of kernels that need compute capability 8.0, built for `architectures`: "80,90-real".

    Machine code runs on devices of the same major and the same or a later minor version, with an `a` on exactly this version.
    PTX, which all but -real include, runs on every later device (CUDA C++ Programming Guide, "Application Compatibility").
    """
    major, _, minor = capability.partition(".")
    own, has_ptx = 10 * int(major) + int(minor), False
    for each in architectures.split(",") if own >= 80 else []:
        number = re.match("[0-9]*", each)[0]  # type: ignore[index]
        version, rest = int(number or 0), each[len(number) :]
        if not version <= own or version == 0 or (rest.startswith("a") and own != version):
            continue
        if own // 10 == version // 10 and not rest.endswith("-virtual"):
            return "machine code"
        has_ptx = has_ptx or not rest.endswith("-real")
    return "PTX, compiled by the driver" if has_ptx else "none"


def _rates(title: str, kept: list[dict[str, Any]], device: str) -> list[tuple[str, str]]:
    """Of all calibrations that are stored for a device; `device`: its name for --device."""
    if not kept:
        return [(title, f"none stored; `espalier plan --model DIR --data FILE --device {device}` measures them")]
    return [(title, _rate_text(each)) for each in kept]


def _rate_text(kept: dict[str, Any]) -> str:
    """"float32, hidden size 576: layers 52.1, attention 20.3, LM head 40.0 GFLOP/s (2 threads, 2026-11-23)"."""
    known = {name: rate for name, rate in kept["flops_per_second"].items() if rate is not None}
    unit, name = (1e12, "TFLOP/s") if max(known.values(), default=0) >= 1e13 else (1e9, "GFLOP/s")
    rates = ", ".join(f"{'LM head' if part == 'head' else part} {rate / unit:.1f}" for part, rate in known.items())
    threads = f"{kept['threads']} threads, " if "threads" in kept else ""
    return f"{kept['dtype']}, hidden size {kept['hidden_size']}: {rates} {name} ({threads}{kept['measured']})"


def synth_text(out: str, trajectories: int, flat_tokens: int, tree_tokens: int, cached_token_ratio: float, por: float) -> str:
    """What was written."""
    return (f"{printable(out)}: {count_of(trajectories, 'trajectory', 'trajectories')}, {count_of(flat_tokens, 'flat token')}, "
            f"{count_of(tree_tokens, 'tree token')}, cached-token ratio {cached_token_ratio:.3f}, POR {por:.3f}\n")  # fmt: skip
