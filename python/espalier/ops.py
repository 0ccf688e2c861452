# SPDX-License-Identifier: Apache-2.0
# torch.ops has no types. mypy reads the next line.
# mypy: disable-error-code="no-any-return"
"""The operators, `torch.ops.espalier`: exact gradients, fake kernels, torch.compile and torch.export without graph
breaks.

Importing this module loads their shared library: that which the environment variable ESPALIER_OPS names, else
libespalier_ops.so beside the package, in the prefix that Espalier was installed to, in the build tree, or in the
distribution espalier-torch. It has to be built against the PyTorch that runs, with the schemas that this module calls;
ImportError says where it is not.

Tokens are those of a forest in preorder; docs/math.md explains `subtree_end` and `prev`. T tokens, H heads, K key
heads, D the size of a head. Elements are float64, float32 or bfloat16; "of sums" means float32, for float64 elements
float64. All tensors are on one device, but for those that say CPU, which the host reads. Every operator raises
RuntimeError, with what was expected and received, for shapes, dtypes and devices that do not fit. None has a second
derivative.
"""

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor

from . import torch_package

__all__ = ["causal_conv1d", "causal_conv1d_tails", "edge_logprobs", "gated_delta_rule", "moe", "moe_route", "ssm_scan",
           "tree_attention"]  # fmt: skip

_NAME = "libespalier_ops.so"
_SCHEMAS = 4  # the version of the operators' schemas, as src/espalier/ops/register.cpp has it
_BUILT_FOR = re.compile(rb"ESPALIER_OPS_TORCH=(\d+\.\d+)[^;]*;ESPALIER_OPS_SCHEMAS=(\d+);")


def _library() -> Path:
    """The file to load."""
    named = os.environ.get("ESPALIER_OPS")
    package = Path(__file__).resolve().parent
    installed = [prefix / folder / _NAME for prefix in package.parents[3:4] for folder in ("lib", "lib64")]
    built = package.parents[1] / "build/release/src/espalier/ops" / _NAME
    places = [Path(named)] if named else [package / _NAME, *installed, built]
    distribution = None if named else torch_package.find()
    if distribution:
        places.append(distribution / _NAME)
    for place in places:
        if place.is_file():
            if place.parent == distribution:
                torch_package.check(distribution, torch.__version__)
            return place
    raise ImportError(f"espalier.ops: expected the shared library of the operators at {' or '.join(map(str, places))}, "
                      f"found none; run {torch_package.INSTALL}, or `make build` in a clone, or let ESPALIER_OPS name "
                      "the file")  # fmt: skip


def _check_built_against(path: Path, version: str) -> None:
    """Refuses a library that was built against another PyTorch or with other schemas, before it is loaded: it might
    crash instead of failing, or take arguments for others."""
    found = _BUILT_FOR.search(_section(path, b".espalier"))
    if found is None:
        raise ImportError(f"espalier.ops: expected the library of Espalier's operators, received {path}, which is none, or "
                          "one of an older Espalier; build Espalier again, or install the espalier-torch of this "
                          "version")  # fmt: skip
    if (schemas := int(found[2])) != _SCHEMAS:
        raise ImportError(f"espalier.ops: expected a library with the operators' schemas in version {_SCHEMAS}, received "
                          f"{path}, with version {schemas}; build Espalier again, or install the espalier-torch of the "
                          "version of espalier-train")  # fmt: skip
    built, ours = found[1].decode(), ".".join(version.split(".")[:2])
    if built != ours:
        raise ImportError(f"espalier.ops: expected a library that was built against PyTorch {ours}, received {path}, "
                          f"built against {built}; build Espalier again with the Python that has this PyTorch, or "
                          f"install PyTorch {built}")  # fmt: skip


def _section(path: Path, name: bytes) -> bytes:
    """The bytes of a section of an ELF file; none where it has no such section. Reads a few kilobytes."""
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\2\1":  # 64 bits, little-endian
            return b""
        (table,), (size, count, names) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<3H", head, 58)
        file.seek(table)
        rows = file.read(size * count)
        if size < 40 or len(rows) < size * count or names >= count:
            return b""
        sections = [struct.unpack_from("<I20xQQ", rows, size * number) for number in range(count)]

        def content(number: int) -> bytes:
            file.seek(sections[number][1])
            return file.read(sections[number][2])

        texts = content(names)
        for number, (begin, _, _) in enumerate(sections):
            if texts[begin:].startswith(name + b"\0"):
                return content(number)
    return b""


def _load() -> None:
    if not torch._C._dispatch_has_kernel("espalier::tree_attention"):  # nobody has loaded them before
        path = _library()
        _check_built_against(path, torch.__version__)
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise ImportError(f"espalier.ops: {path} cannot be loaded: {error}") from error
    from . import fake_kernels  # noqa: F401
    from .kernels import attention, causal_conv, gated_delta, recurrences, ssm_scan

    if torch.version.cuda and (name := attention.installed()):
        _registered["attention"] = attention.register(name)
    for kind in (gated_delta.GatedDeltaRule, ssm_scan.SsmScan):
        if torch.version.cuda and kind.library.installed():
            _registered[kind.library.operator] = recurrences.register(kind)
    if torch.version.cuda and causal_conv.LIBRARY.installed():
        _registered[causal_conv.LIBRARY.operator] = causal_conv.register()


_registered: dict[str, torch.library.Library] = {}  # what Python implements: attention, and operators by their names


def _tokens(ends: Tensor | None) -> Tensor:
    return torch.empty((0,), dtype=torch.int64, device="cpu") if ends is None else ends


_load()
_ops = torch.ops.espalier


def tree_attention(q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, *, softmax_scale: float | None = None,
                   context_k: Sequence[Tensor] = (), context_v: Sequence[Tensor] = (), context_blocks: Tensor | None = None,
                   sliding_window: int = 0, position: Tensor | None = None, context_positions: Tensor | None = None,
                   sinks: Tensor | None = None, softcap: float | None = None) -> Tensor:  # fmt: skip
    """Attention in which token j sees token i where `i <= j < subtree_end[i]`, and the context.

    Differentiable in q, k, v, context_k, context_v and sinks. float16 on GPUs too.

    Args:
        q: [T, H, D].
        k: [T, K, D], H a multiple of K.
        v: [T, K, E].
        subtree_end: [T] int32.
        softmax_scale: Default: D ** -0.5.
        context_k: List of [S, K, D]: keys of tokens before the forest.
        context_v: List of [S, K, E]: their values.
        context_blocks: [P, 5] int64 on the CPU: rows of (segment, key_begin, key_end, query_begin, query_end), who sees them.
        sliding_window: 0 for none, else tokens see ancestors less than so many positions away; position and context_positions
            are needed then.
        position: [T] int32.
        context_positions: [P] int64 on the CPU: of each block's first key.
        sinks: [H]: logits that take part in the denominator alone, in the dtype of q or of sums.
        softcap: Logits z of keys become softcap * tanh(z / softcap); None: as they are.

    Returns:
        [T, H, E], in the dtype of q.

    Raises:
        RuntimeError: Shapes, dtypes or devices do not fit.

    Examples:
        >>> import torch
        >>> from espalier import ops
        >>> q = k = v = torch.randn(3, 1, 4)   # a token, and two that follow it in turn
        >>> out = ops.tree_attention(q, k, v, torch.tensor([3, 2, 3], dtype=torch.int32))
        >>> alone = ops.tree_attention(q[::2], k[::2], v[::2], torch.tensor([2, 2], dtype=torch.int32))
        >>> torch.allclose(out[2], alone[1], atol=1e-6)
        True
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    if context_blocks is None:
        context_blocks = torch.empty((0, 5), dtype=torch.int64, device="cpu")
    return _ops.tree_attention(q, k, v, subtree_end, softmax_scale, list(context_k), list(context_v), context_blocks,
                               sliding_window, position, context_positions, sinks,
                               0.0 if softcap is None else softcap)[0]  # fmt: skip


@overload
def edge_logprobs(hidden: Tensor, weight: Tensor, edge_row: Tensor, edge_target: Tensor, *, bias: Tensor | None = None,
                  temperature: float | Tensor = 1.0, logit_scale: float = 1.0, softcap: float | None = None,
                  entropy: Literal[False] = False) -> Tensor: ...  # fmt: skip


@overload
def edge_logprobs(hidden: Tensor, weight: Tensor, edge_row: Tensor, edge_target: Tensor, *, bias: Tensor | None = None,
                  temperature: float | Tensor = 1.0, logit_scale: float = 1.0, softcap: float | None = None,
                  entropy: bool) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def edge_logprobs(hidden: Tensor, weight: Tensor, edge_row: Tensor, edge_target: Tensor, *, bias: Tensor | None = None,
                  temperature: float | Tensor = 1.0, logit_scale: float = 1.0, softcap: float | None = None,
                  entropy: bool = False) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities of target tokens given hidden states; the matrix of logits never exists whole.

    Logits are, in this order,

        z = logit_scale * (hidden @ weight.T + bias),    z = softcap * tanh(z / softcap),    z = z / temperature

    Where any of these is given, or the entropy asked for, the operator is edge_distribution: it takes more memory and time, and
    its numbers are equal within rounding. Differentiable in hidden, weight and bias.

    Args:
        hidden: [R, C].
        weight: [V, C], of the dtype of hidden.
        edge_row: [E] int64, ascending: the row of hidden that predicts the edge's target.
        edge_target: [E] int64 in [0, V).
        bias: [V], of the dtype of weight.
        temperature: A number or [E] of sums, which has no gradient.
        logit_scale: See above.
        softcap: See above; None: none.
        entropy: Give entropies as well.

    Returns:
        [E] of sums, natural logarithms; with entropy=True (logprobs, entropy), both [E] and both differentiable.

    Raises:
        RuntimeError: Shapes, dtypes or devices do not fit.

    Examples:
        >>> import torch
        >>> from espalier import ops
        >>> hidden, weight = torch.randn(2, 4), torch.randn(7, 4)
        >>> found = ops.edge_logprobs(hidden, weight, torch.tensor([0, 0, 1]), torch.tensor([3, 5, 6]))
        >>> expected = (hidden @ weight.T).log_softmax(-1)[[0, 0, 1], [3, 5, 6]]
        >>> torch.allclose(found, expected, atol=1e-5)
        True
    """
    each = isinstance(temperature, torch.Tensor)
    if not (entropy or each or bias is not None or softcap is not None or temperature != 1 or logit_scale != 1):
        return _ops.edge_logprobs(hidden, weight, edge_row, edge_target)[0]
    logprobs, entropies, _, _ = _ops.edge_distribution(
        hidden, weight, edge_row, edge_target, bias, temperature if each else None, 1.0 if each else temperature,
        logit_scale, 0.0 if softcap is None else softcap)  # fmt: skip
    return (logprobs, entropies) if entropy else logprobs


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, prev: Tensor, *,
                     states: Tensor | None = None, ends: Tensor | None = None,
                     chunk_size: int = 64) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule along the paths of a forest, as Qwen3-Next has it (Yang et al., "Gated Delta Networks", 2024).

    Differentiable in q, k, v, g, beta and states.

    Args:
        q: [T, K, Dk], divided by its length inside.
        k: [T, K, Dk], divided by its length inside.
        v: [T, H, Dv], H a multiple of K.
        g: [T, H] of sums: logarithms of decays, <= 0.
        beta: [T, H] of sums.
        prev: [T] int32 on the CPU: the token before on the path, -1 where it begins, -2 - n where it goes on from states[n].
        states: [N, H, Dk, Dv] of sums.
        ends: [E] int64 on the CPU: tokens after which the state is wanted.
        chunk_size: A power of two.

    Returns:
        (out [T, H, Dv], end_states [E, H, Dk, Dv] of sums).

    Raises:
        RuntimeError: Shapes, dtypes or devices do not fit.

    Examples:
        >>> import torch
        >>> from espalier import ops
        >>> q, k, v = torch.randn(3, 1, 4), torch.randn(3, 1, 4), torch.randn(3, 2, 4)
        >>> prev = torch.tensor([-1, 0, 0], dtype=torch.int32)   # two tokens go on from the first
        >>> out, _ = ops.gated_delta_rule(q, k, v, -torch.rand(3, 2), torch.rand(3, 2), prev)
        >>> out.shape
        torch.Size([3, 2, 4])
    """
    return _ops.gated_delta_rule(q, k, v, g, beta, prev, states, _tokens(ends), chunk_size)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, prev: Tensor, *, tails: Tensor | None = None,
                  silu: bool = False) -> Tensor:  # fmt: skip
    """A causal convolution of every channel along the paths of a forest; zeros stand before the beginning.

    Differentiable in x, weight, bias and tails.

    Args:
        x: [T, C].
        weight: [C, W], W <= 8, of the dtype of x or of sums.
        bias: [C] as weight, or None.
        prev: [T] int32 on the CPU, as of `gated_delta_rule`; -2 - n where a path goes on from tails[n].
        tails: [N, W - 1, C] as x: what precedes a path, oldest first.
        silu: Give x * sigmoid(x) of each sum x.

    Returns:
        [T, C], in the dtype of x.

    Raises:
        RuntimeError: Shapes, dtypes or devices do not fit.

    Examples:
        >>> import torch
        >>> from espalier import ops
        >>> x, prev = torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([-1, 0, 0], dtype=torch.int32)
        >>> ops.causal_conv1d(x, torch.ones(1, 2), None, prev).flatten().tolist()
        [1.0, 11.0, 101.0]
    """
    return _ops.causal_conv1d(x, weight, bias, prev, tails, silu)


def causal_conv1d_tails(x: Tensor, prev: Tensor, ends: Tensor, taps: int, *, tails: Tensor | None = None) -> Tensor:
    """What paths that go on after the tokens `ends` need of x: the taps - 1 rows up to each, oldest first.

    Differentiable in x and tails.

    Args:
        x: [T, C].
        prev: As of `causal_conv1d`.
        ends: [E] int64 on the CPU.
        taps: The W of the convolution.
        tails: As of `causal_conv1d`.

    Returns:
        [E, taps - 1, C], in the dtype of x.

    Raises:
        RuntimeError: Shapes, dtypes or devices do not fit.

    Examples:
        >>> import torch
        >>> from espalier import ops
        >>> x, prev = torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([-1, 0, 0], dtype=torch.int32)
        >>> ops.causal_conv1d_tails(x, prev, torch.tensor([2]), 3).flatten().tolist()
        [1.0, 100.0]
    """
    return _ops.causal_conv1d_tails(x, prev, tails, ends, taps)


def ssm_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, prev: Tensor, *, D: Tensor | None = None,
             states: Tensor | None = None, ends: Tensor | None = None,
             chunk_size: int = 64) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024) along the paths of a forest.

    Differentiable in x, dt, A, B, C, D and states.

    Args:
        x: [T, H, P].
        dt: [T, H] of sums, after softplus.
        A: [H] of sums, <= 0.
        B: [T, G, N] as x, H a multiple of G.
        C: [T, G, N] as x.
        prev: [T] int32 on the CPU, as of `gated_delta_rule`.
        D: [H] of sums, or None.
        states: [M, H, N, P] of sums.
        ends: [E] int64 on the CPU: tokens after which the state is wanted.
        chunk_size: A power of two.

    Returns:
        (out [T, H, P], end_states [E, H, N, P] of sums).

    Raises:
        RuntimeError: Shapes, dtypes or devices do not fit.

    Examples:
        >>> import torch
        >>> from espalier import ops
        >>> x, B, C = torch.randn(3, 2, 4), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
        >>> prev = torch.tensor([-1, 0, 0], dtype=torch.int32)   # two tokens go on from the first
        >>> out, _ = ops.ssm_scan(x, torch.rand(3, 2), -torch.rand(2), B, C, prev)
        >>> out.shape
        torch.Size([3, 2, 4])
    """
    return _ops.ssm_scan(x, dt, A, B, C, D, prev, states, _tokens(ends), chunk_size)


def moe(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None, clamp_limit: float | None = None,
        clamp_alpha: float = 1.702) -> Tensor:  # fmt: skip
    """A mixture of experts that drops no token: the sum over a token's experts of weight * down(silu(gate) * up).

    Reads the number of tokens of each expert: the host waits for a GPU. Backward computes the experts again. Differentiable
    in all but experts.

    Args:
        x: [T, C], T > 0.
        weights: [T, K] of sums, as of `moe_route`.
        experts: [T, K] int64, ascending, as of `moe_route`.
        gate_up: [E, 2 I, C], gate before up. With clamp_limit [E, C, 2 I], gate and up in turn.
        down: [E, C, I]. With clamp_limit [E, I, C].
        gate_up_bias: [E, 2 I].
        down_bias: [E, C].
        clamp_limit: The clamped SwiGLU of gpt-oss in its layout. None: plain SwiGLU.
        clamp_alpha: The factor inside of its sigmoid.

    Returns:
        [T, C], in the dtype of x.

    Raises:
        RuntimeError: Shapes, dtypes or devices do not fit.

    Examples:
        >>> import torch
        >>> from espalier import ops
        >>> weights, experts = ops.moe_route(torch.randn(3, 4), 2)
        >>> ops.moe(torch.randn(3, 8), weights, experts, torch.randn(4, 10, 8), torch.randn(4, 8, 5)).shape
        torch.Size([3, 8])
    """
    return _ops.moe(x, weights, experts, gate_up, down, gate_up_bias, down_bias, clamp_limit, clamp_alpha)


def moe_route(logits: Tensor, top_k: int, *, correction_bias: Tensor | None = None, experts: Tensor | None = None,
              sigmoid: bool = False, normalise: bool = False, scaling: float = 1.0, num_groups: int = 1,
              num_best_groups: int = 1, softmax_over_chosen: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The experts of every token and their weights, from a router's logits.

    Scores are the softmax of the logits, their sigmoid, or with softmax_over_chosen the logits themselves. A token takes the
    top_k experts of the largest score + correction_bias, among the num_best_groups of num_groups groups whose two best sum to
    most. Differentiable in logits, through the weights.

    Args:
        logits: [T, E], float32 or float64.
        top_k: Experts of a token.
        correction_bias: [E].
        experts: [T, top_k] int64: fixes the choice (replayed routes); a row of -1 chooses.
        sigmoid: Scores are the sigmoid of the logits.
        normalise: Divide weights by their sum.
        scaling: Multiplies the weights.
        num_groups: Groups of experts, E a multiple of it.
        num_best_groups: Groups that a token may choose in.
        softmax_over_chosen: Weights are the softmax of the chosen logits.

    Returns:
        (weights [T, top_k], experts [T, top_k] int64, ascending). Weights are the scores, divided by their sum (normalise), times
        scaling; with softmax_over_chosen the softmax of the chosen ones.

    Raises:
        RuntimeError: Shapes, dtypes or devices do not fit.

    Examples:
        >>> import torch
        >>> from espalier import ops
        >>> weights, experts = ops.moe_route(torch.tensor([[0.0, 2.0, 1.0, -1.0]]), 2, normalise=True)
        >>> experts.tolist(), round(weights.sum().item(), 6)
        ([[1, 2]], 1.0)
    """
    return _ops.moe_route(logits, correction_bias, experts, top_k, sigmoid, normalise, scaling, num_groups,
                          num_best_groups, softmax_over_chosen)  # fmt: skip
