# SPDX-License-Identifier: Apache-2.0
"""Training a PyTorch model on a plan: micro-batches that may be parts of trees larger than memory."""

import warnings
from collections.abc import Iterator
from typing import Any, Literal, NoReturn, overload

from torch import Tensor

from ..errors import InputError, Unsupported
from ..hf.context import naming_layers
from ..hf.gradient_sync import is_one_of_several_ranks, one_reduction
from ..hf.micro_batch import MicroBatchModel
from ..hf.routes import routes_of_rows
from ..hf.run import Expand
from ..rank_group import RankGroup
from ..trees import Plan
from .division import Division, pair_cost
from .passes import Divided, Pass, StepBatch, StepTerms
from .plan import StepPlan


class Step:
    """The forward and backward passes of one optimiser step, as a loop over the micro-batches of a plan.

    After the loop `.grad` holds the gradients of the rows trained each on its own, whatever the plan. Under partition every
    token is encoded once: what layers leave to the micro-batches that go on from theirs is passed on, and gradients come back
    the same way. At any time only the micro-batches of one path of the plan are held.

    On several ranks a plan may be empty, and gradients come together by espalier.distributed.

    A loop under torch.no_grad() runs forward alone, and wants no backward. A step may be looped over again. Where a loop with
    gradients is left early, by break or an error, `.grad` holds those of the micro-batches that were done. A warning says so,
    and the next loop over the model with gradients raises InputError, unless they were zeroed since or discarded by `discard`.

    Args:
        model: As `espalier.hf.patch` takes it, with a head; it is patched where it is not yet.
        plan: As `espalier.plan` makes it.
        loss_mask: Which tokens carry loss: R rows of a number >= 0 for each token, or one array [N] of all rows, such as
            `espalier.read(...).loss_weights`; 0 for none. Default: all tokens. A row's first token never does. Micro-batches
            without such tokens, or descendants with them, do not run. Numbers other than 1 are weights: a loss multiplies its
            terms by `batch.weights`, and divides by `total_weight` for a mean. A loss for which nobody asked for them is
            refused.
        recompute: False: the activations of a micro-batch are kept until those that go on from it are done. True: it runs
            forward twice, at first without a graph, and is given to the loop after them; each micro-batch has the memory for
            itself.
        routed_experts: Recorded expert routes that the routers of a mixture of experts replay, as those of a patched model do:
            R rows of integers [n, L, K] (K experts for each token and each of L routers or layers, -1 for none), or one array
            [N, L, K] or [N, L * K] of all rows, such as `espalier.read(...).routed_experts`. The forest has to be built from
            rows with the same routes, so that tokens with different ones are not shared.

    Raises:
        Unsupported: As `espalier.hf.patch` does; for compiled models; for a backend without context under partition; and for
            losses of routers, which depend on all micro-batches at once.
        InputError: An argument cannot be used.

    Examples:
        >>> import espalier, torch, transformers
        >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...                                   num_attention_heads=4, num_key_value_heads=2)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> plan = espalier.plan(espalier.build([[11, 12, 13, 14], [11, 12, 13, 15]]), token_budget=8)
        >>> step = espalier.Step(model, plan)
        >>> for batch in step:
        ...     step.backward(-step.logprobs(batch).sum() / step.num_terms)
        >>> step.num_terms, model.lm_head.weight.grad.shape
        (6, torch.Size([97, 32]))
    """

    def __init__(self, model: Any, plan: Plan, *, loss_mask: Any = None, recompute: bool = False,
                 routed_experts: Any = None) -> None:  # fmt: skip
        if not isinstance(plan, Plan):
            raise InputError(f"plan: expected a Plan, as espalier.plan makes it, received {type(plan).__name__}")
        self._plan = StepPlan(plan, loss_mask)
        self.plan = plan
        if sum(self._plan.num_terms) == 0 and not is_one_of_several_ranks():
            raise InputError("loss_mask: expected at least one token with a loss that is not the first of its row, "
                             "received none")  # fmt: skip
        self._model = MicroBatchModel(model)
        self._routes: Tensor | None = None
        if routed_experts is not None:
            self._routes = routes_of_rows(self._model.backbone, routed_experts, self._plan.offsets)
            for batch in range(len(self._plan)):
                self._plan.routes(self._routes, self._plan.layout(batch))  # which checks them
        self._recompute = bool(recompute)
        self._pass: Pass | None = None
        self._divided: Divided | None = None

    @property
    def num_terms(self) -> int:
        """Terms of all micro-batches: what to divide a sum over tokens by for their mean."""
        return sum(self._plan.num_terms)

    @property
    def total_weight(self) -> float:
        """The sum of the weights of all terms; num_terms without weights other than 1."""
        return self._plan.total_weight

    def __reduce__(self) -> NoReturn:
        raise Unsupported("espalier.Step: expected no pickle or copy of a step, which holds a model and its gradients, received "
                          "one; pickle its plan, and make another step of it")  # fmt: skip

    def __len__(self) -> int:
        """The micro-batches that the loop gives."""
        return sum(count > 0 for count in self._plan.num_terms)

    def __iter__(self) -> Iterator[StepBatch]:
        if self._pass is not None:
            self._end(self._pass)  # a loop that was left, and may be held by somebody
        has_context = self._divided is not None or max(self._plan.parent, default=-1) >= 0
        self._model.prepare(has_context=has_context, has_routes=self._routes is not None)
        with naming_layers(self._model.backbone), one_reduction(self._model.model) as synchronise:
            self._pass = current = Pass(self._model, self._plan, self._recompute, synchronise, self._routes, self._divided)
            try:
                yield from current.walk()
            finally:
                self._end(current)

    def _divided_over(self, group: RankGroup) -> Divided:
        """What a step of espalier.distributed.Ranks sets as `_divided` while it lasts: loops run this rank's shards of the
        micro-batches then."""
        self._model.check_dividing()
        pair = pair_cost(self._model.inner.config, self._model.device.type)
        division = Division(self._plan, group.rank, group.size, pair, self._model.is_recurrent)
        return Divided(division, group, self._recompute)

    def _end(self, current: Pass) -> None:
        if not current.close():
            return
        self._model.mark_partial(current.progress())
        warnings.warn(f"the loop over espalier.Step was left after {current.progress()} had run backward: .grad holds "
                      "the gradients of a part of the step; call step.discard(), or zero them",
                      RuntimeWarning, stacklevel=3)  # fmt: skip

    def discard(self) -> None:
        """Ends a loop that was left early, and forgets gradients.

        `.grad` of all parameters is None afterwards, that of earlier loops too. The step may then be looped over again.

        Examples:
            >>> step.discard()
        """
        if self._pass is not None:
            self._pass.close()
        self._model.discard()

    @overload
    def logprobs(self, batch: StepBatch, *, temperature: float = 1.0, entropy: Literal[False] = False) -> Tensor: ...

    @overload
    def logprobs(self, batch: StepBatch, *, temperature: float = 1.0, entropy: Literal[True]) -> tuple[Tensor, Tensor]: ...

    def logprobs(self, batch: StepBatch, *, temperature: float = 1.0,
                 entropy: bool = False) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Log-probabilities of the terms of the micro-batch: those of batch.positions[m] in row batch.rows[m].

        Every micro-batch runs once: call this or `hidden`, once.

        Args:
            batch: The micro-batch that the loop gave last, of M terms.
            temperature: A number that divides logits.
            entropy: Give entropies as well.

        Returns:
            [M], float32 (float64 for float64 models), natural logarithms. With entropy=True (logprobs, entropy), entropies [M] of
            the distributions that they come from, which are differentiable as well.

        Raises:
            InputError: The micro-batch is not the loop's.

        Examples:
            >>> with torch.no_grad():
            ...     [step.logprobs(batch).shape for batch in step]
            [torch.Size([6])]
        """

        def compute(hidden: Tensor, terms: StepTerms) -> tuple[Tensor, ...]:
            rows = hidden.index_select(0, terms.sources)
            found = self._model.edge_logprobs(rows, terms.edge_row, terms.edge_target, temperature=temperature,
                                              entropy=entropy)  # fmt: skip
            return tuple(values.index_select(0, terms.edges) for values in (found if entropy else (found,)))

        outputs = self._current().outputs(batch, compute)
        return outputs if entropy else outputs[0]

    def hidden(self, batch: StepBatch) -> Tensor:
        """Hidden states after the last norm, each that which predicts the term, for your own heads.

        Args:
            batch: The micro-batch that the loop gave last, of M terms.

        Returns:
            [M, H], in the dtype of the model.

        Raises:
            InputError: The micro-batch is not the loop's.

        Examples:
            >>> with torch.no_grad():
            ...     [step.hidden(batch).shape for batch in step]
            [torch.Size([6, 32])]
        """

        def compute(hidden: Tensor, terms: StepTerms) -> tuple[Tensor, ...]:
            return (Expand.apply(hidden, terms.sources[terms.edge_row[terms.edges]]),)  # type: ignore[no-untyped-call]

        return self._current().outputs(batch, compute)[0]

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of the micro-batch's loss to `.grad`.

        That happens at once or when the micro-batches that go on from it are done; all are done after the loop.

        Args:
            loss: One number, of what `logprobs` or `hidden` gave for this micro-batch. Losses of all are added up, so that a mean
                divides by a number of the whole step, such as num_terms.

        Raises:
            InputError: It is the second loss of the micro-batch. Without any, the next micro-batch raises.

        Examples:
            >>> for batch in step:
            ...     step.backward(-step.logprobs(batch).sum() / step.num_terms)
        """
        self._current().backward(loss)

    def _current(self) -> Pass:
        if self._pass is None:
            raise InputError("espalier.Step: expected a call inside of `for batch in step`, received one outside")
        return self._pass
