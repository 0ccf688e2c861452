# SPDX-License-Identifier: Apache-2.0
"""Problems on which the LM head, distributions of edges and products of matrices prove themselves, and their plain forms, which
the CPU computes."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from .cases import Case, Results, detached, error_of_sum, error_of_tensor_core_sum

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


class _Numbers:
    """Random numbers of a seed, exact in a dtype."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.dtype, self.sums_dtype = dtype, torch.promote_types(dtype, torch.float32)

    def elements(self, *shape: int) -> Tensor:
        return self._normal(*shape).to(self.dtype)

    def sums(self, *shape: int) -> Tensor:
        return self._normal(*shape).to(self.sums_dtype)

    def sums_from(self, low: float, *shape: int) -> Tensor:
        """Uniform in [low, low + 1)."""
        drawn = torch.rand(*shape, generator=self._generator, dtype=torch.float64, device="cpu")
        return (low + drawn).to(self.sums_dtype)

    def indices(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), generator=self._generator, device="cpu")

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64, device="cpu")


class _Problem(NamedTuple):
    """A call of an operator with its backward: `ours` and `plain` of the inputs by name. is_apart: elements are rows of wider
    matrices."""

    kind: str
    shape: str
    inputs: dict[str, Tensor]
    ours: Callable[..., Results]
    plain: Callable[..., Results]
    floors: Mapping[str, float]
    has_same_bits: bool = True
    is_apart: bool = False

    def case(self, dtype: torch.dtype, device: str) -> Case:
        def in_float64() -> dict[str, Tensor]:
            return {name: each.double() if each.is_floating_point() else each for name, each in self.inputs.items()}

        def moved(each: Tensor) -> Tensor:
            each = each.to(device)
            if not (self.is_apart and each.dtype == dtype and each.dim() > 1):
                return each
            return each.new_empty(*each.shape[:-1], each.shape[-1] + 3)[..., :-3].copy_(each)

        exact = functools.cache(lambda: self.plain(**in_float64()))
        plain = exact if dtype == torch.float64 else lambda: self.plain(**self.inputs)
        return Case(self.shape, lambda: self.ours(**{name: moved(each) for name, each in self.inputs.items()}), plain, exact,
                    self.kind, self.floors, None if self.has_same_bits else ())  # fmt: skip


# Rows, edges, hidden size, vocabulary.
_WHOLE_HEADS = ((63, 190, 8, 65), (63, 190, 24, 1023), (65, 20, 64, 576), (1023, 3000, 16, 2801), (130, 260, 200, 2003))
_BLOCKS = ((128, 512), (301, 100), (7, 1300))
_LOGPROBS, _ENTROPIES = "log-probabilities", "entropies"


@torch.no_grad()
def _head(hidden: Tensor, weight: Tensor, grad: Tensor, row: Tensor, target: Tensor) -> Results:
    logprobs, lse = torch.ops.espalier.edge_logprobs(hidden, weight, row, target)
    grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    grad_hidden = torch.ops.espalier.edge_logprobs_backward_(grad, hidden, weight, row, target, lse, grad_weight)
    return {_LOGPROBS: logprobs, "gradient of hidden": grad_hidden, "gradient of weight": grad_weight.to(weight.dtype)}


@torch.no_grad()
def _head_by_blocks(rows: int, columns: int, **inputs: Tensor) -> Results:
    found = torch.ops.espalier_judge.head_by_blocks(*inputs.values(), rows, columns)
    return dict(zip((_LOGPROBS, "gradient of hidden", "gradient of weight"), found))


def _plain_head(hidden: Tensor, weight: Tensor, grad: Tensor, row: Tensor, target: Tensor) -> Results:
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    logprobs = (leaves[0] @ leaves[1].t()).log_softmax(-1, dtype=grad.dtype)[row, target]
    grad_hidden, grad_weight = torch.autograd.grad(logprobs, leaves, grad)
    return detached({_LOGPROBS: logprobs, "gradient of hidden": grad_hidden, "gradient of weight": grad_weight})


def _head_problem(rows: int, edges: int, size: int, vocabulary: int, numbers: _Numbers) -> _Problem:
    inputs = {"hidden": numbers.elements(rows, size), "weight": numbers.elements(vocabulary, size), "grad": numbers.sums(edges),
              "row": numbers.indices(edges, rows).sort().values, "target": numbers.indices(edges, vocabulary)}  # fmt: skip
    floor = error_of_sum(max(rows, size, vocabulary))
    shape = f"{rows} rows, {edges} edges, hidden size {size}, vocabulary {vocabulary}"
    floors = dict.fromkeys((_LOGPROBS, "gradient of hidden", "gradient of weight"), floor)
    return _Problem("edge_logprobs", shape, inputs, _head, _plain_head, floors)


def head_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """edge_logprobs in one block and in several of rows and of the vocabulary, edges of one row, rows apart in memory, and logits
    whose exponentials overflow."""
    problems = [_head_problem(*sizes, _Numbers(101 + number, dtype)) for number, sizes in enumerate(_WHOLE_HEADS)]
    for number, block in enumerate(_BLOCKS):
        cut = _head_problem(301, 700, 32, 1300, _Numbers(106 + number, dtype))
        problems.append(cut._replace(kind="edge_logprobs by blocks", shape=f"{cut.shape}, blocks of {block[0]} x {block[1]}",
                                     ours=functools.partial(_head_by_blocks, *block)))  # fmt: skip
    numbers = _Numbers(109, dtype)
    one_row = _head_problem(300, 400, 8, 1300, numbers)
    one_row.inputs["row"].fill_(4)
    apart = _head_problem(130, 260, 24, 1023, numbers)
    problems += [one_row._replace(shape=f"{one_row.shape}, all edges of one row"),
                 apart._replace(shape=f"{apart.shape}, apart in memory", is_apart=True)]  # fmt: skip
    if dtype != torch.float64:  # where such logits, rounded, make gradients err by more than 1e-12
        problems.append(_with_large_logits(_head_problem(270, 800, 5, 1023, numbers)))
    return (problem.case(dtype, device) for problem in problems)


def _with_large_logits(problem: _Problem) -> _Problem:
    """Some near 10,000 and -10,000, and exact in float32, so that nothing but the softmax can err."""
    hidden, weight = problem.inputs["hidden"].double(), problem.inputs["weight"].double()
    hidden, weight = (hidden * 8).round() / 8, (weight * 8).round() / 8
    hidden[:, 1] = 100 * hidden[:, 1].sign()
    weight[:, 1] = 100
    exact = {"hidden": hidden.to(problem.inputs["hidden"].dtype), "weight": weight.to(problem.inputs["weight"].dtype)}
    return problem._replace(kind="edge_logprobs of large logits", inputs=problem.inputs | exact,
                            floors={**problem.floors, _LOGPROBS: 0.0})  # fmt: skip


# Options by the names that faults have for them.
_OPTIONS: dict[str, dict[str, Any]] = {
    "no options": {}, "temperature": {"temperature": 0.75}, "softcap": {"softcap": 3.0}, "scale": {"logit_scale": 0.5},
    "bias": {"bias": True}, "temperatures of edges": {"edge_temperature": True},
    "all options": {"logit_scale": 0.5, "softcap": 3.0, "bias": True, "edge_temperature": True},
}  # fmt: skip


def _distribution(hidden: Tensor, weight: Tensor, row: Tensor, target: Tensor, *, bias: Tensor | None = None,
                  edge_temperature: Tensor | None = None, **options: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    temperature: Any = options.pop("temperature", 1.0) if edge_temperature is None else edge_temperature
    found = ops.edge_logprobs(hidden, weight, row, target, bias=bias, temperature=temperature, entropy=True, **options)
    assert isinstance(found, tuple)  # with entropies
    return found


def _plain_distribution(hidden: Tensor, weight: Tensor, row: Tensor, target: Tensor, *, bias: Tensor | None = None,
                        edge_temperature: Tensor | None = None, temperature: float = 1.0, logit_scale: float = 1.0,
                        softcap: float | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits = hidden @ weight.t()
    logits = (logits if bias is None else logits + bias) * logit_scale
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    logits = logits[row].to(torch.promote_types(hidden.dtype, torch.float32)) / temperature
    logprobs = (logits if edge_temperature is None else logits / edge_temperature.unsqueeze(1)).log_softmax(-1)
    return logprobs.gather(1, target.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def _differentiated(function: Callable[..., tuple[Tensor, Tensor]], options: dict[str, Any]) -> Callable[..., Results]:
    def results(hidden: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, grad_entropy: Tensor, row: Tensor, target: Tensor,
                edge_temperature: Tensor) -> Results:  # fmt: skip
        names = ["hidden", "weight", *(["bias"] if "bias" in options else [])]
        leaves = {name: each.detach().requires_grad_() for name, each in zip(names, (hidden, weight, bias))}
        tensors = {**leaves, **({"edge_temperature": edge_temperature} if "edge_temperature" in options else {})}
        outs = function(**{**options, **tensors}, row=row, target=target)
        gradients = torch.autograd.grad(outs, list(leaves.values()), (grad, grad_entropy))
        named_gradients = {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients)}
        return detached({_LOGPROBS: outs[0], _ENTROPIES: outs[1], **named_gradients})

    return results


def distribution_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """edge_distribution with its options, one by one and together. Every edge has its own row: edges of one row would be added up
    before the products in the plain form."""
    edges, size, vocabulary = 260, 16, 700
    names = (_LOGPROBS, _ENTROPIES, *(f"gradient of {name}" for name in ("hidden", "weight", "bias")))
    for number, (title, options) in enumerate(_OPTIONS.items()):
        numbers = _Numbers(201 + number, dtype)
        inputs = {"hidden": numbers.elements(edges, size), "weight": numbers.elements(vocabulary, size),
                  "bias": numbers.elements(vocabulary), "grad": numbers.sums(edges), "grad_entropy": numbers.sums(edges),
                  "row": torch.arange(edges, device="cpu"), "target": numbers.indices(edges, vocabulary),
                  "edge_temperature": numbers.sums_from(0.5, edges)}  # fmt: skip
        yield _Problem(f"edge_distribution with {title}", f"{edges} edges, hidden size {size}, vocabulary {vocabulary}", inputs,
                       _differentiated(_distribution, options), _differentiated(_plain_distribution, options),
                       dict.fromkeys(names, error_of_sum(vocabulary)), has_same_bits=False).case(dtype, device)  # fmt: skip


# Rows, terms and columns, some with few results of many terms, whose sums libraries cut.
_PRODUCTS = ((1, 1, 1), (1, 63, 65), (65, 1023, 63), (1023, 65, 1), (64, 256, 128), (128, 8192, 256), (64, 16384, 64),
             (16, 32768, 16), (1, 16384, 300))  # fmt: skip
_MANY_TERMS = 8192
_PRODUCT_NAMES = ("product", "product with a bias", "sum of products")


@torch.no_grad()
def _products(a: Tensor, b: Tensor, bias: Tensor, total: Tensor) -> Results:
    return dict(zip(_PRODUCT_NAMES, torch.ops.espalier_judge.matrix_products(a.t(), b, bias, total)))


def _plain_products(is_rounded: bool, a: Tensor, b: Tensor, bias: Tensor, total: Tensor) -> Results:
    """is_rounded: products in bfloat16 are rounded before they are added."""
    sums = total.dtype
    product = (a.t() @ b).to(sums) if is_rounded else a.t().to(sums) @ b.to(sums)
    return dict(zip(_PRODUCT_NAMES, (product, (product + bias.to(sums)).to(a.dtype), total + product)))


def product_cases(dtype: torch.dtype, device: str, is_rounded: bool | None = None) -> Iterator[Case]:
    """Products of matrices as layers have them, with few and many terms: TF32 and sums in bfloat16 are noticed. The CPU may round
    products in bfloat16, and is not held to more."""
    if is_rounded is None:
        is_rounded = device == "cpu"
    for number, (rows, terms, columns) in enumerate(_PRODUCTS):
        numbers = _Numbers(301 + number, dtype)
        inputs = {"a": numbers.elements(terms, rows), "b": numbers.elements(terms, columns), "bias": numbers.elements(columns),
                  "total": numbers.sums(rows, columns)}  # fmt: skip
        floor = error_of_tensor_core_sum(terms) if dtype == torch.bfloat16 else error_of_sum(terms)
        kind = "short products" if terms < _MANY_TERMS else "long products"
        yield _Problem(kind, f"{rows} x {columns} results of {terms} terms", inputs, _products,
                       functools.partial(_plain_products, is_rounded), dict.fromkeys(_PRODUCT_NAMES, floor),
                       has_same_bits=False).case(dtype, device)  # fmt: skip


CASES: dict[str, Callable[[torch.dtype, str], Iterator[Case]]] = {
    "head": head_cases, "distribution": distribution_cases, "products": product_cases}  # fmt: skip
