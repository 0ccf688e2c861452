# SPDX-License-Identifier: Apache-2.0
# Written by scripts/write_options.py.
"""The options of `espalier.Engine` as dataclasses. They need neither PyTorch nor the compiled part of the package."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

from .options_base import Options

__all__ = ["EngineConfig", "LoraConfig", "ObjectiveConfig", "SamplingParams"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
    """How an `espalier.Engine` trains: precision, optimiser, plan and device. The flags of `espalier train`.

    Attributes:
        dtype: Precision of training (bfloat16: with float32 master weights and gradient sums).
        optimizer: adamw or sgd (plain, no momentum).
        learning_rate: Peak learning rate.
        weight_decay: Weight decay of matrices (norms and biases have none).
        max_grad_norm: Clip the global gradient norm (0: off).
        beta1: adamw: decay of the mean of gradients.
        beta2: adamw: decay of the mean of their squares.
        eps: adamw: added to the denominator, above 0.
        freeze_pad_embedding: Give the input embedding of config.json's pad_token_id no gradient, as Transformers does; a tied
            LM head still trains it. Without this flag it is trained like any other, because trajectories have no padding and
            the token may be a real one, such as the end of a turn.
        strategy: partition: cut trees into pieces and encode each token once; tree-packing: put whole trees into
            micro-batches, and split trees over the budget, which repeats their prefixes; append-only: encode a trajectory
            that another one extends as a part of it, and share nothing else; sequence-packing: encode every trajectory
            separately; the last two are baselines; auto: use the one with the lowest predicted time.
        token_budget: Maximum tokens per micro-batch. 0: 4096, or the longest trajectory if that is longer; with
            `memory_budget`: no limit.
        memory_budget: Maximum memory for weights, gradients, optimiser and activations, such as 8GiB or 500MB. The fastest
            plan that fits is used (0: no limit). A number counts bytes.
        checkpoint_activations: Recompute activations in the backward pass instead of saving them: layer (inside every layer),
            piece (all of a micro-batch with descendants; strategy partition), none, or auto (the choice whose plan is the
            fastest that fits the memory budget; none without a budget).
        offload_context: With `checkpoint_activations` piece: keep the context between micro-batches in host memory.
        cost_model: Compare plans by the rates in this file instead of built-in ones. `plan --save-cost-model` writes such a
            file, and a run saves one as cost_model.json, which --resume uses. Plans never depend on measurements of the run,
            so runs with equal flags and data are bitwise identical.
        device: Where the model runs: cpu, cuda (the first visible GPU), cuda:N, or auto (the first GPU that can be used, else
            the CPU; `espalier device` says why). CUDA needs a LibTorch and a build with CUDA.
        deterministic: CUDA: make every run on the same GPU bitwise identical, by slower ways of accumulating gradients
            (sorted instead of atomic). Without it, gradients may differ in their last bits from run to run. The CPU is always
            deterministic.
        threads: CPU threads (0: all cores).
        prefix_cache: Memory for keys, values and states of prompts and completions that are kept between calls of sample,
            such as 1GiB: prompts that go on from them encode only what is new. What was not used for the longest time goes
            first (0: nothing is kept). A number counts bytes.

    Examples:
        >>> from espalier import EngineConfig
        >>> EngineConfig(learning_rate=1e-5, memory_budget="16GiB").optimizer
        'adamw'
    """

    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-05
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-08
    freeze_pad_embedding: bool = False
    strategy: Literal["auto", "partition", "tree-packing", "append-only", "sequence-packing"] = "auto"
    token_budget: int = 0
    memory_budget: int | str = 0
    checkpoint_activations: Literal["auto", "none", "layer", "piece"] = "auto"
    offload_context: bool = False
    cost_model: str | os.PathLike[str] | None = None
    device: Literal["cpu", "cuda", "auto"] | str = "cpu"
    deterministic: bool = False
    threads: int = 0
    prefix_cache: int | str = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(Options):
    """The low-rank adapter that an `espalier.Engine` trains in place of the weights (Hu et al., LoRA, 2021).

    Either `lora_rank` or `adapter` is needed.

    Attributes:
        lora_rank: Train low-rank adapters of this rank instead of the weights, which are frozen and have neither gradients
            nor optimiser state. Checkpoints are then PEFT folders.
        lora_alpha: Scale of adapters: their output is multiplied by this over the rank (default: the rank).
        lora_targets: Linear maps with adapters: comma-separated names, such as q_proj,v_proj, or all-linear. A name selects
            all maps whose names end with it. Routers and experts have none; the LM head has one only where lm_head is named.
            Or a list of names.
        lora_rslora: Divide by the square root of the rank instead (rsLoRA).
        adapter: Continue training this adapter, a PEFT folder or a checkpoint, instead of a new one.
        seed: Seed of new adapters.

    Examples:
        >>> from espalier import LoraConfig
        >>> LoraConfig(lora_rank=16, lora_targets=["q_proj", "v_proj"]).lora_targets
        ('q_proj', 'v_proj')
    """

    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_targets: str | Sequence[str] = "all-linear"
    lora_rslora: bool = False
    adapter: str | os.PathLike[str] | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Options):
    """The loss of `Engine.forward_backward`. docs/objectives.md has the formulas and their sources.

    Attributes:
        objective: sft: cross-entropy; ppo, grpo, dr_grpo, dapo: clipped policy gradients; gspo: the same with one ratio for a
            trajectory; cispo: with the clipped ratio as a weight; reinforce: without a ratio; opd: distillation from a
            teacher on own samples; dpo, ipo, simpo, orpo: preferences between the two trajectories of a pair; kto: labelled
            single trajectories (docs/objectives.md).
        shared_targets: For a target token that several trajectories share and train on: sum keeps every trajectory's term,
            once keeps one, with the mean of their advantages.
        normalize: Over the whole optimiser step: average the loss over tokens (token), over sequences the mean (sequence;
            default of gspo) or sum (sequence-sum; dr_grpo, reinforce, preferences) of their tokens, over groups the mean of
            their tokens (group), or divide it by a NUMBER. None: by objective.
        clip_low: Policy gradients: clip the ratio at 1 minus this (0.2; gspo 0.0003; cispo 1: no lower bound). None: by
            objective.
        clip_high: Policy gradients: clip the ratio at 1 plus this (0.2; dapo 0.28; gspo 0.0004; cispo 4). None: by objective.
        dual_clip: ppo, grpo, dr_grpo, dapo: upper bound of the ratio where the advantage is negative, such as 3 (0: off).
        baseline: Advantages from rewards: subtract the mean of the group (mean), of its other rows (leave-one-out: the
            default of reinforce), of the groups before it in the file (running), or nothing (none). None: by objective.
        scale_rewards: Advantages from rewards: divide by the standard deviation of the group (group), or do not (none: the
            default of dr_grpo, reinforce and baselines that do not use the group). None: by objective.
        turn_discount: Advantages from rewards: discount factor per turn before the turn of a reward, which is the last one
            or, with `turn_rewards`, its own. A turn is a contiguous range of tokens with loss.
        importance_weights: Policy gradients: use the ratio to the policy of `logprobs` as a weight without gradient, at most
            `importance_cap` (truncate), or 0 outside of `importance_floor` to `importance_cap` (mask). The clipped ratio then
            starts at 1 in every step.
        importance_level: Weights are ratios of tokens, or products over the tokens of a trajectory (sequence).
        importance_cap: Largest importance weight.
        importance_floor: Smallest importance weight (mask).
        kl_coef: Policy gradients: add this times the estimated KL divergence from the model of `ref_logprobs`.
        kl_estimator: With d = log p - log p_ref: d (k1), d^2 / 2 (k2), or exp(-d) - 1 + d (k3).
        kl_in: Add the divergence to the loss of every token, or subtract its sum over a trajectory, computed from `logprobs`,
            from the reward.
        ref_topk: opd: compare the sampled token alone, by `ref_logprobs` (none), or the teacher's most likely tokens, by
            `ref_topk_ids` and `ref_topk_logprobs`: with all other tokens as one (rest), or among themselves (renormalize).
        beta: dpo, ipo, kto: strength of the constraint to the model of `ref_logprobs` (0.1); simpo: scale of rewards (2);
            orpo: weight of the odds ratio (0.1). None: by objective.
        margin: simpo: target margin of the chosen reward over the rejected one.
        chosen_weight: kto: weight of chosen trajectories.
        rejected_weight: kto: weight of rejected trajectories.
        entropy_coef: Subtract this times the entropy of every token's distribution from the loss, such as 0.001.
        log_entropy: Report the metric entropy even without `entropy_coef`, by a second pass of the LM head.
        router_aux_loss_coef: Mixture of experts: add this times the load-balancing loss of the routers, such as 0.001. Every
            token is weighted by the number of trajectories through it.
        router_z_loss_coef: Mixture of experts: add this times the z-loss, which keeps the routers' logits small, such as
            0.001.

    Examples:
        >>> from espalier import ObjectiveConfig
        >>> ObjectiveConfig(objective="grpo", clip_high=0.28).normalize is None
        True
    """

    objective: Literal[
        "sft", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce", "opd", "dpo", "ipo", "kto", "simpo", "orpo"
    ] = "sft"
    shared_targets: Literal["sum", "once"] = "sum"
    normalize: Literal["token", "sequence", "sequence-sum", "group"] | float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float = 0.0
    baseline: Literal["mean", "leave-one-out", "running", "none"] | None = None
    scale_rewards: Literal["group", "none"] | None = None
    turn_discount: float = 1.0
    importance_weights: Literal["none", "truncate", "mask"] = "none"
    importance_level: Literal["token", "sequence"] = "token"
    importance_cap: float = 2.0
    importance_floor: float = 0.5
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    ref_topk: Literal["none", "rest", "renormalize"] = "none"
    beta: float | None = None
    margin: float = 1.0
    chosen_weight: float = 1.0
    rejected_weight: float = 1.0
    entropy_coef: float = 0.0
    log_entropy: bool = False
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(Options):
    """How `Engine.sample` samples completions. The flags of `espalier sample`.

    Attributes:
        samples: Completions per prompt, which form a group.
        max_new_tokens: Maximum tokens of a completion.
        temperature: Divide logits by this. 0: always take the most likely token.
        top_k: Choose among the K most likely tokens (0: all).
        top_p: Choose among the smallest set of most likely tokens (after `top_k`) whose probabilities sum up to P.
        stop_ids: Token ids that end a completion, which keeps them. None: `eos_token_id` of the model's
            generation_config.json, or else of config.json; an empty list: none, so that all completions have `max_new_tokens`
            tokens.
        whole_rows: Continue whole rows instead of prompts, and keep their loss and log-probabilities: for conversations with
            sampled turns, after a tool's result.
        prompt_logprobs: Also write log-probabilities of the prompts' tokens, at temperature 1.
        seed: Of the random numbers, a whole number from 0. None: the number of calls of `Engine.sample` so far. Each
            completion has its own numbers, by the number of its prompt's row and its own number.
        batch_size: Maximum number of completions sampled together: more are faster per token and use more memory for keys and
            values.
        token_budget: Maximum number of prompt tokens, shared ones counted once, whose keys and values are kept at a time. A
            single prompt may have more.

    Examples:
        >>> from espalier import SamplingParams
        >>> SamplingParams(samples=8, temperature=0.7).top_p
        1.0
    """

    samples: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: Sequence[int] | None = None
    whole_rows: bool = False
    prompt_logprobs: bool = False
    seed: int | None = None
    batch_size: int = 64
    token_budget: int = 32768
