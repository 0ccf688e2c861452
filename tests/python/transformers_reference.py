# SPDX-License-Identifier: Apache-2.0
"""Ordinary per-trajectory training in Transformers: what the command line is compared with.

Transformers computes RMSNorm in float32 whatever the model's dtype. For float64 comparisons that is replaced by the
same formula in float64, so that both sides may agree to rounding. (Its eager attention computes softmax in float32 too,
hence sdpa.)
"""

import json
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

NORMS = (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


def float64_norm(self, hidden_states):
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


@contextmanager
def norms_in_model_dtype(dtype):
    """Inside, float64 models compute their norms in float64."""
    originals = [norm.forward for norm in NORMS]
    if dtype == torch.float64:
        for norm in NORMS:
            norm.forward = float64_norm
    try:
        yield
    finally:
        for norm, original in zip(NORMS, originals):
            norm.forward = original


def load_model(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").train()


def token_logprobs(model, ids):
    """Log-probabilities [len(ids) - 1] of ids[1:], each given all before it."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def weights_of(row):
    if "loss_weights" in row:
        return row["loss_weights"]
    return [float(m) for m in row.get("loss_mask", [1] * len(row["input_ids"]))]


def sft_loss(model, rows):
    """Sum of w_t * (-log p_t) over all rows and t >= 1, divided by the sum of those w_t."""
    total = sum(sum(weights_of(row)[1:]) for row in rows)
    loss = 0
    for row in rows:
        weights = torch.tensor(weights_of(row)[1:], dtype=model.dtype)
        loss = loss - (weights * token_logprobs(model, row["input_ids"])).sum()
    return loss / total


def grpo_loss(model, rows, clip_low=0.2, clip_high=0.2):
    """The same with -min(r A, clip(r) A); r = exp(log p - log p of the row), or of itself where it has none."""
    total = sum(sum(weights_of(row)[1:]) for row in rows)
    loss = 0
    for row in rows:
        logprobs = token_logprobs(model, row["input_ids"])
        weights = torch.tensor(weights_of(row)[1:], dtype=model.dtype)
        old = torch.tensor(row["logprobs"][1:], dtype=model.dtype) if "logprobs" in row else logprobs.detach()
        advantages = row.get("advantages", [row.get("advantage")] * len(row["input_ids"]))
        advantage = torch.tensor(advantages[1:], dtype=model.dtype)
        ratio = torch.exp(logprobs - old)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
        loss = loss - (weights * surrogate).sum()
    return loss / total


def gradients(model, loss):
    """Gradients by parameter name; tied parameters once."""
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters()))))


def read_rows(path):
    with open(path) as file:
        return [json.loads(line) for line in file]
