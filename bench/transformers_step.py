# SPDX-License-Identifier: Apache-2.0
"""A training step (forward and backward) of Transformers on a CPU, as fast as it goes without changing the library.

- Eager, attention "sdpa" without a mask, so that ATen's fused causal attention runs: in a batch of unequal lengths
  padding stands on the right, where no token that counts can see it.
- Trajectories sorted by length, in batches of a size that is measured (choose_batch_size).
- A trajectory ends before its last token with loss: what comes later predicts nothing.
- Logits at the tokens that predict one with loss, and only there: what `logits_to_keep` does for a batch of one.
- Nothing is cached, and gradients are None before a step, so that the first batch need not add.

The loss is that of docs/math.md: the sum of w * (-log p) over all tokens but the first of each trajectory, divided by
the sum of those w over the whole step.
"""

import ctypes
import itertools
import json
import math
import time
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM

from espalier.rows.lines import open_lines


class Trajectory(NamedTuple):
    ids: list
    weights: list  # loss weight of every token; that of the first is not used


class Batch(NamedTuple):
    input_ids: torch.Tensor  # [B, L]
    rows: torch.Tensor  # [R] tokens that predict one with loss, as indices into B * L
    targets: torch.Tensor  # [R]
    weights: torch.Tensor  # [R] float32: share of the step's loss
    tokens: int  # without padding


class StepResult(NamedTuple):
    seconds: float
    loss: float


def read_trajectories(path):
    """Rows of docs/data-format.md: JSON Lines (plain, gzip, zstd) or packed safetensors."""
    if str(path).endswith(".safetensors"):
        return list(_packed_trajectories(path))
    lines, *_ = open_lines(path)
    with lines:
        return [_trajectory(json.loads(line)) for line in lines if line.strip()]


def _trajectory(row):
    ids = row["input_ids"]
    weights = row.get("loss_weights") or row.get("loss_mask") or [1] * len(ids)
    return Trajectory(ids, [float(weight) for weight in weights])


def _packed_trajectories(path):
    from safetensors.numpy import load_file

    columns = load_file(path)
    ids = columns["input_ids"]
    weights = columns.get("loss_weights", columns.get("loss_mask", ids * 0 + 1))
    for begin, end in itertools.pairwise(columns["offsets"]):
        yield Trajectory(ids[begin:end].tolist(), weights[begin:end].astype(float).tolist())


def make_batches(trajectories, batch_size):
    """The step's batches, longest first. Trajectories without loss are left out."""
    total = sum(sum(trajectory.weights[1:]) for trajectory in trajectories)
    examples = []
    for ids, weights in trajectories:
        targets = [t for t in range(1, len(ids)) if weights[t] > 0]
        if targets:
            examples.append((ids[: targets[-1]], [(t - 1, ids[t], weights[t] / total) for t in targets]))
    examples.sort(key=lambda example: len(example[0]), reverse=True)
    return [_batch(examples[begin : begin + batch_size]) for begin in range(0, len(examples), batch_size)]


def _batch(examples):
    longest = len(examples[0][0])
    padded = [ids + [0] * (longest - len(ids)) for ids, _ in examples]
    terms = [(k * longest + source, target, share) for k, (_, own) in enumerate(examples) for source, target, share in own]
    rows, targets, weights = zip(*terms)
    return Batch(torch.tensor(padded), torch.tensor(rows), torch.tensor(targets), torch.tensor(weights),
                 sum(len(ids) for ids, _ in examples))  # fmt: skip


def reuse_freed_memory():
    """Freed memory stays in the process (glibc), as in bin/espalier: large tensors need not be made of pages that the
    kernel has to clear first. PyTorch does not ask for this by itself."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # not glibc
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # malloc.h
    for parameter, value in ((mmap_max, 0), (trim_threshold, -1), (top_pad, 64 << 20)):
        mallopt(parameter, value)


class TransformersSide:
    def __init__(self, folder, dtype, experts=None):
        """experts: implementation of a mixture of experts, the library's choice where it is None."""
        more = {"experts_implementation": experts} if experts else {}
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", **more).train()  # fmt: skip
        # Else the embedding of the padding token, the end of every turn for some models, would get no gradient.
        self.model.get_input_embeddings().padding_idx = None

    def _forward_backward(self, batch):
        hidden = self.model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.rows)
        logits = self.model.get_output_embeddings()(hidden).float()
        losses = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
        loss = (losses * batch.weights).sum()
        loss.backward()
        return loss.item()

    def step(self, batches):
        self.model.zero_grad(set_to_none=True)
        begin = time.monotonic()
        loss = math.fsum(self._forward_backward(batch) for batch in batches)
        return StepResult(time.monotonic() - begin, loss)

    def grad_norm(self):
        """Norm of the last step's gradients together."""
        norms = [p.grad.norm(dtype=torch.float64) for p in self.model.parameters() if p.grad is not None]
        return torch.stack(norms).norm().item()

    def choose_batch_size(self, trajectories, candidates, probe_tokens, max_batch_tokens, note):
        """The fastest of the candidates, each measured once on batches from all over the sorted trajectories that
        have `probe_tokens` tokens together, or at least one batch. `max_batch_tokens`: most tokens of a batch, padding
        included (memory); the smallest candidate is measured anyway."""
        rates = {}
        self.step(_spread(make_batches(trajectories, candidates[0]), probe_tokens)[:1])
        for size in candidates:
            batches = make_batches(trajectories, size)
            if rates and batches[0].input_ids.numel() > max_batch_tokens:
                break
            probe = _spread(batches, probe_tokens)
            seconds = self.step(probe).seconds
            rates[size] = sum(batch.tokens for batch in probe) / seconds
            note(f"batch size {size}: {rates[size]:.0f} tokens/s")
            if len(batches) == 1 or rates[size] < 0.75 * max(rates.values()):
                break
        return max(rates, key=rates.get)


def _spread(batches, tokens):
    """Batches at even distances with about that many tokens together."""
    mean = sum(batch.tokens for batch in batches) / len(batches)
    count = min(len(batches), math.ceil(tokens / mean))
    return [batches[(2 * k + 1) * len(batches) // (2 * count)] for k in range(count)]
