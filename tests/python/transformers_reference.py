# SPDX-License-Identifier: Apache-2.0
"""Ordinary per-trajectory training in Transformers: what the command line is compared with.

Transformers computes RMSNorm in float32 whatever the model's dtype. For float64 comparisons that is replaced by the
same formula in float64, so that both sides may agree to rounding; likewise routers of experts, the gates of Gated
DeltaNet, and its rule, token by token; of Mamba-2 gates, scan, hidden states between layers and logits, in
granitemoehybrid and nemotron_h routers as well; of ernie4_5 rotations. (Its eager attention computes softmax in
float32 too, hence sdpa; grouped products of experts are not there in float64, hence eager experts. gpt_oss has
eager attention alone, for its sinks; that one computes softmax in the model's dtype, as do its router and its
experts. gemma2 has it for its softcap.)
"""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm, DeepseekV3TopkRouter
from transformers.models.ernie4_5 import modeling_ernie4_5 as ernie4_5
from transformers.models.exaone4.modeling_exaone4 import Exaone4RMSNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm, Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granitemoehybrid
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.ministral.modeling_ministral import MinistralRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.seed_oss.modeling_seed_oss import SeedOssRMSNorm
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm

NORMS = (LlamaRMSNorm, MistralRMSNorm, Olmo3RMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm, Glm4MoeRMSNorm,
         mamba2.Mamba2RMSNorm, granitemoehybrid.GraniteMoeHybridRMSNorm, GptOssRMSNorm, Olmo2RMSNorm, SmolLM3RMSNorm,
         SeedOssRMSNorm, ernie4_5.Ernie4_5RMSNorm, GraniteRMSNorm, MixtralRMSNorm, MinistralRMSNorm, Exaone4RMSNorm,
         Phi3RMSNorm, DeepseekV3RMSNorm, nemotron_h.NemotronHRMSNorm)  # fmt: skip


def float64_norm(self, hidden_states):
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def float64_softmax_router(self, hidden_states):
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    weights, experts = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, experts


def float64_sigmoid_router(self, hidden_states):
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores = logits.sigmoid()
    choice = scores + self.e_score_correction_bias
    groups = choice.unflatten(-1, (self.num_group, -1))
    best = groups.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
    is_best = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
    choice = groups.masked_fill(~is_best.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = choice.topk(self.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if self.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * self.routed_scaling_factor, experts


def float64_zero_centred_norm(self, hidden_states):
    return self._norm(hidden_states) * (1 + self.weight)


def float64_gated_norm(self, hidden_states, gate):
    return float64_norm(self, hidden_states) * torch.nn.functional.silu(gate)


def float64_delta_rule(query, key, value, g, beta, **_):
    """torch_recurrent_gated_delta_rule from an empty state, without its casts to float32."""
    group = value.shape[2] // key.shape[2]
    query, key = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 2)
                  for x in (query, key))  # fmt: skip
    state, outs = 0, []
    for t in range(value.shape[1]):
        state = state * g[:, t, :, None, None].exp() + torch.zeros_like(key[:, t, :, :, None] * value[:, t, :, None])
        update = beta[:, t, :, None] * (value[:, t] - torch.einsum("bhk,bhkv->bhv", key[:, t], state))
        state = state + key[:, t, :, :, None] * update[:, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state) * key.shape[-1] ** -0.5)
    return torch.stack(outs, 1), state


def float64_norm_of_groups(self, hidden_states, gate):
    gated = (hidden_states * torch.nn.functional.silu(gate)).unflatten(-1, (-1, self.group_size))
    variance = gated.square().mean(-1, keepdim=True)
    return self.weight * (gated * torch.rsqrt(variance + self.variance_epsilon)).flatten(-2)


def float64_residual(self, hidden_states, **arguments):
    """A layer of Mamba-2, whose hidden states are float32 where residual_in_fp32."""
    return hidden_states + self.mixer(self.norm(hidden_states), **arguments)


def without_float(forward):
    """A forward function without its casts by Tensor.float(), of decays, logits or what routers are given."""

    def in_float64(self, *args, **kwargs):
        original = torch.Tensor.float
        torch.Tensor.float = lambda tensor: tensor
        try:
            return forward(self, *args, **kwargs)
        finally:
            torch.Tensor.float = original

    return in_float64


def float64_capped_attention(module, query, key, value, attention_mask, *, scaling, softcap=None, **_):
    """Eager attention of gemma2 without its softmax in float32."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return ((scores + attention_mask).softmax(-1) @ value).transpose(1, 2).contiguous(), None


def with_delta_layers(module, stem):
    """What is replaced in a modeling file of Qwen with Gated DeltaNet layers, whose classes begin with `stem`."""
    layer = getattr(module, f"{stem}GatedDeltaNet")
    return [
        (getattr(module, f"{stem}RMSNorm"), "forward", float64_zero_centred_norm),
        (getattr(module, f"{stem}RMSNormGated"), "forward", float64_gated_norm),
        (layer, "forward", without_float(layer.forward)),
        (module, "torch_chunk_gated_delta_rule", float64_delta_rule),
    ]


FLOAT64 = [(norm, "forward", float64_norm) for norm in NORMS] + [
    (Qwen3MoeTopKRouter, "forward", float64_softmax_router),
    (Glm4MoeTopkRouter, "forward", float64_sigmoid_router),
    (DeepseekV3TopkRouter, "forward", float64_sigmoid_router),
    (qwen3_5_moe.Qwen3_5MoeTopKRouter, "forward", float64_softmax_router),
    (qwen3_next.Qwen3NextTopKRouter, "forward", float64_softmax_router),
    (MixtralTopKRouter, "forward", float64_softmax_router),
    (Gemma3RMSNorm, "forward", float64_zero_centred_norm),
    (GemmaRMSNorm, "forward", float64_zero_centred_norm),
    (gemma2.Gemma2RMSNorm, "forward", float64_zero_centred_norm),
    (gemma2, "eager_attention_forward", float64_capped_attention),
    (ernie4_5, "apply_rotary_pos_emb", without_float(ernie4_5.apply_rotary_pos_emb)),
    (mamba2.MambaRMSNormGated, "forward", float64_norm_of_groups),
    (mamba2.Mamba2Block, "forward", float64_residual),
    (granitemoehybrid.GraniteMoeHybridRMSNormGated, "forward", float64_norm_of_groups),
    (granitemoehybrid.GraniteMoeHybridForCausalLM, "forward",
     without_float(granitemoehybrid.GraniteMoeHybridForCausalLM.forward)),
    (nemotron_h.NemotronHTopkRouter, "forward", float64_sigmoid_router),
    (getattr(nemotron_h, "NemotronHRMSNormGated", None) or nemotron_h.Zamba2RMSNormGated, "forward", float64_norm_of_groups),
    (nemotron_h.NemotronHForCausalLM, "forward", without_float(nemotron_h.NemotronHForCausalLM.forward)),
    (mamba2.Mamba2ForCausalLM, "forward", without_float(mamba2.Mamba2ForCausalLM.forward)),
    *with_delta_layers(qwen3_5, "Qwen3_5"),
    *with_delta_layers(qwen3_5_moe, "Qwen3_5Moe"),
    *with_delta_layers(qwen3_next, "Qwen3Next"),
]


@contextmanager
def norms_in_model_dtype(dtype):
    """Inside, float64 models compute in float64 what Transformers computes in float32 (see above)."""
    originals = [getattr(owner, name) for owner, name, _ in FLOAT64]
    if dtype == torch.float64:
        for owner, name, replacement in FLOAT64:
            setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(FLOAT64, originals):
            setattr(owner, name, original)


def load_model(folder, dtype):
    attention = {"mamba2": None, "gpt_oss": "eager", "gemma2": "eager"}.get(AutoConfig.from_pretrained(folder).model_type, "sdpa")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, experts_implementation="eager").train()  # fmt: skip
    if dtype == torch.float64:
        all_in_float64(model, folder)
    return model


def all_in_float64(model, folder):
    """Gives parameters that Transformers has loaded in float32 all digits of the folder. Since 5.24 these are routers of experts."""
    def inner_name(name):
        return name.partition(".")[2]  # nemotron_h has another word before it in files

    rounded = {inner_name(name): name for name, parameter in model.named_parameters() if parameter.dtype != torch.float64}
    model.double()
    for file in Path(folder).glob("*.safetensors") if rounded else ():
        for name, weight in load_file(file).items():
            if inner_name(name) in rounded:
                model.get_parameter(rounded[inner_name(name)]).data.copy_(weight)


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


def by_checkpoint_name(name, gradient, model_type):
    """The gradient of a parameter in memory, by its names in the checkpoint: experts are one tensor each there, except in
    gpt_oss."""
    if ".block_sparse_moe." in name:  # files keep the older names
        for new, old in ((".experts.gate_up_proj", ".input_linear.weight"), (".router.", ".router.layer."),
                         (".experts.down_proj", ".output_linear.weight")):  # fmt: skip
            name = name.replace(new, old)
        return {name: gradient}
    stem, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
    if model_type == "nemotron_h":  # likewise
        stem = stem.replace("model.", "backbone.", 1)
    if model_type == "mixtral":  # likewise
        stem, parts = stem.replace(".mlp.", ".block_sparse_moe."), {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    if model_type == "gpt_oss" or not stem.endswith(".experts"):
        return {f"{stem}.{kind}": gradient}
    return {f"{stem}.{expert}.{part}.weight": values
            for expert, of_expert in enumerate(gradient)
            for part, values in zip(parts[kind], of_expert.chunk(len(parts[kind])))}  # fmt: skip


def gradients(model, loss):
    """Gradients by the parameters' names in the checkpoint; tied parameters once."""
    names = [name for name, _ in model.named_parameters()]
    result = {}
    for name, gradient in zip(names, torch.autograd.grad(loss, list(model.parameters()))):
        result.update(by_checkpoint_name(name, gradient, model.config.model_type))
    return result


def read_rows(path):
    with open(path) as file:
        return [json.loads(line) for line in file]
