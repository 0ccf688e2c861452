# SPDX-License-Identifier: Apache-2.0
"""Code as other people put it into models: what it does to the tensors that it sees, and whole forwards of their own."""

import sys
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm, relu, scaled_dot_product_attention
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import ModelOutput

from small_models import COMMON

VOCABULARY = COMMON["vocab_size"]


def direction(x):
    """A vector of the width of x, other than that of its neighbours."""
    return torch.cos(torch.arange(x.shape[-1], dtype=x.dtype) * 1.7 + 0.3)


def along(x, dim, values):
    """values [n], as a tensor that broadcasts against dimension dim of x."""
    shape = [1] * x.dim()
    shape[dim] = -1
    return values.to(x.dtype).view(shape)


def at_position(x, dim, index, value):
    """x with value added at one position of each row, where there is such a one."""
    size = x.shape[dim]
    if not -size <= index < size:
        return x
    return x + along(x, dim, torch.nn.functional.one_hot(torch.tensor(index % size), size)) * value


def before(x, dim):
    """x of the position before; zeros at the first."""
    moved = x.narrow(dim, 0, x.shape[dim] - 1)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, 1)), moved], dim)


# Of a float tensor x, its dimension of positions, and a Behaviour. Of those in FOR_EACH_TOKEN the result of a token depends on
# nothing else.
FOR_EACH_TOKEN = {
    "nothing": lambda x, dim, way: x,
    "scale": lambda x, dim, way: x * (1 + way.amount),
    "bias": lambda x, dim, way: x + way.amount * direction(x),
    "activation": lambda x, dim, way: x + way.amount * torch.tanh(x),
}
FOR_ROWS = {
    "position": lambda x, dim, way: at_position(x, dim, way.index, way.amount * direction(x)),
    "ramp": lambda x, dim, way: x * (1 + way.amount * along(x, dim, torch.cos(torch.arange(x.shape[dim])))),
    "row number": lambda x, dim, way: x + way.amount * along(x, 0, torch.arange(x.shape[0])) * direction(x),
    "mean of the batch": lambda x, dim, way: x - way.amount * x.mean(0, keepdim=True),
    "mean of the sequence": lambda x, dim, way: x - way.amount * x.mean(dim, keepdim=True),
    "largest value": lambda x, dim, way: x + way.amount * x.amax(),
    "norm of all": lambda x, dim, way: x / (1 + way.amount * x.norm()),
    "noise": lambda x, dim, way: x + way.amount * torch.randn_like(x),
    "token before": lambda x, dim, way: x + way.amount * before(x, dim),
    "sum so far": lambda x, dim, way: x + way.amount * x.cumsum(dim),
    "number of rows": lambda x, dim, way: x * (1 + way.amount * x.shape[0]),
    "length": lambda x, dim, way: x * (1 + way.amount * x.shape[dim] / 10),
    "number of calls": lambda x, dim, way: x * (1 + way.amount * way.count()),
}
# Forward as it was; of gradients these are other functions of each token's, and exact on trees where they are linear.
OF_GRADIENTS = ["nothing", "scale", "bias", "activation", "position", "ramp", "row number", "mean of the batch",
                "mean of the sequence", "norm of all", "number of rows", "length"]  # fmt: skip
LINEAR = ("nothing", "scale")
BEHAVIOURS = FOR_EACH_TOKEN | FOR_ROWS


def changed_ids(x, way):
    """Token ids x [B, S] changed; by behaviours that say nothing of ids, not at all."""
    if way.name == "position" and -x.shape[-1] <= way.index < x.shape[-1]:
        x = x.clone()
        x[..., way.index] = 5
        return x
    if way.name == "row number":
        return (x + torch.arange(x.shape[0])[:, None]) % VOCABULARY
    if way.name == "token before":
        return torch.cat([x[..., :1], x[..., :-1]], -1)
    if way.name == "length":
        return (x + x.shape[-1]) % VOCABULARY
    return (x + 7) % VOCABULARY if way.name in ("scale", "bias", "activation") else x


class _Backward(torch.autograd.Function):
    """x itself, whose gradient a Behaviour changes."""

    @staticmethod
    def forward(ctx, x, way):
        ctx.way = way
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.way.of_floats(grad), None


@dataclass
class Behaviour:
    """What changed code does to a tensor.

    name      of BEHAVIOURS
    amount    how much
    index     the position of "position"
    dim       of positions; None: 1 of three or more, 0 of two
    backward  only to its gradient
    """

    name: str
    amount: float
    index: int = 0
    dim: int | None = None
    backward: bool = False
    calls: list = field(default_factory=list, repr=False)

    def __call__(self, x):
        if not isinstance(x, Tensor) or x.dtype == torch.bool:
            return x
        if not x.is_floating_point():
            return changed_ids(x, self) if x.dim() == 2 and not self.backward else x
        if self.backward:
            return _Backward.apply(x, self) if x.requires_grad else x
        return self.of_floats(x)

    def of_floats(self, x):
        if x.dim() < 2:
            return x * (1 + self.amount)
        dim = 0 if x.dim() == 2 else 1 if self.dim is None else self.dim
        return BEHAVIOURS[self.name](x, dim, self)

    def count(self):
        self.calls.append(None)
        return len(self.calls)

    def fresh(self):
        """The same for another model."""
        return replace(self, calls=[])

    @property
    def is_exact(self):
        """Whether trees are exact with it."""
        return self.name in (LINEAR if self.backward else FOR_EACH_TOKEN)

    def __str__(self):
        place = f" {self.index}" if self.name == "position" else ""
        return f"{'gradient: ' if self.backward else ''}{self.name}{place} {self.amount:+.2f}"


def changed(output, way):
    """What a module has computed, with its float tensors changed; of a whole model its logits and its loss."""
    if isinstance(output, ModelOutput):
        if "last_hidden_state" in output:
            output.last_hidden_state = way(output.last_hidden_state)
        else:
            if output.loss is not None:
                output.loss = output.loss * (1 + way.amount)
            output.logits = way(output.logits)
        return output
    if isinstance(output, tuple):
        return tuple(changed(each, way) for each in output)
    return way(output) if isinstance(output, Tensor) and output.is_floating_point() else output


def changed_input(args, kwargs, way):
    """(args, kwargs) with the first tensor changed."""
    for number, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:number], way(value), *args[number + 1:]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in ("attention_mask", "position_ids", "labels"):
            return args, {**kwargs, name: way(value)}
    return args, kwargs


# Forwards of their own, by what they are for: functions of the module and its arguments.


def modeling(module):
    """The module of Transformers that the class of a layer is from."""
    return next(sys.modules[cls.__module__] for cls in type(module).__mro__ if cls.__module__.startswith("transformers.models."))


def _heads(self, hidden, rope):
    """Queries, keys and values [B, H, S, D] of an attention layer, and what its output is multiplied by."""
    shape, gate = (*hidden.shape[:-1], -1, self.head_dim), 1
    query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
    if query.shape[-1] == 2 * self.o_proj.in_features:
        query, gate = query.view(*shape[:-1], 2 * self.head_dim).chunk(2, -1)
        query, gate = query.reshape(shape).flatten(-2), gate.flatten(-2).sigmoid()
    if hasattr(self, "q_norm"):
        is_flat = self.q_norm.weight.shape[-1] == query.shape[-1]
        query, key = (norm(x if is_flat else x.view(shape)) for norm, x in ((self.q_norm, query), (self.k_norm, key)))
    query, key, value = (x.view(shape).transpose(1, 2) for x in (query, key, value))
    return *modeling(self).apply_rotary_pos_emb(query, key, *rope), value, gate


def plain_attention(self, hidden_states, position_embeddings, attention_mask=None, **_):
    """Causal attention over whatever it is handed."""
    query, key, value, gate = _heads(self, hidden_states, position_embeddings)
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=self.scaling)
    return self.o_proj(out.transpose(1, 2).flatten(2) * gate), None


def masked_attention(self, hidden_states, position_embeddings, attention_mask=None, **_):
    """Attention in steps, by the mask that the model has made."""
    query, key, value, gate = _heads(self, hidden_states, position_embeddings)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * self.scaling
    if attention_mask is None:
        scores = scores + torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype).triu(1)
    elif attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -1e300)
    else:
        scores = scores + attention_mask
    return self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2) * gate), None


def sharper_attention(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    """As Transformers writes it, at another temperature: attention is that of the config."""
    query, key, value, gate = _heads(self, hidden_states, position_embeddings)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, modeling(self).eager_attention_forward)
    kwargs.pop("past_key_values", None)
    if hasattr(self, "sinks"):
        kwargs |= {"s_aux": self.sinks, "sliding_window": self.sliding_window}
    out, weights = function(self, query, key, value, attention_mask, dropout=0.0, scaling=1.5 * self.scaling, **kwargs)
    return self.o_proj(out.flatten(2) * gate), weights


def attention_to_itself(self, hidden_states, position_embeddings, attention_mask=None, **_):
    """Values alone."""
    _, _, value, gate = _heads(self, hidden_states, position_embeddings)
    groups = self.o_proj.in_features // (value.shape[1] * value.shape[3])
    return self.o_proj(value.repeat_interleave(groups, 1).transpose(1, 2).flatten(2) * gate), None


def relu_mlp(self, x):
    return self.down_proj(relu(self.gate_proj(x)) * self.up_proj(x))


def mean_norm(self, x, *_):
    return x / (x.abs().mean(-1, keepdim=True) + 0.1) * (1 + self.weight)


def norm_of_the_batch(self, x, *_):
    """As BatchNorm has it: over all tokens."""
    dims = tuple(range(x.dim() - 1))
    return (x - x.mean(dims)) / (x.var(dims, unbiased=False) + 0.1).sqrt() * (1 + self.weight)


def norm_of_the_row(self, x, *_):
    """As LayerNorm over positions and features."""
    return layer_norm(x, x.shape[1:]) * (1 + self.weight)


def parallel_layer(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
    """Attention beside the MLP, as GPT-J has it."""
    attention, _ = self.self_attn(hidden_states=hidden_states, position_embeddings=position_embeddings,
                                  attention_mask=attention_mask, **kwargs)  # fmt: skip
    mlp = self.mlp(hidden_states)
    return hidden_states + attention + (mlp[0] if isinstance(mlp, tuple) else mlp)


def layer_without_arguments(self, hidden_states, position_embeddings=None, attention_mask=None, **_):
    """The same, which hands on no arguments that it does not know."""
    return parallel_layer(self, hidden_states, position_embeddings, attention_mask)


def plain_backbone(self, input_ids=None, attention_mask=None, position_ids=None, **_):
    """A loop over the layers."""
    hidden = self.embed_tokens(input_ids)
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1])[None]
    rope = self.rotary_emb(hidden, position_ids)
    for layer in self.layers:
        hidden = layer(hidden, position_embeddings=rope, position_ids=position_ids)
    module = modeling(self)
    output = getattr(module, "BaseModelOutputWithPast", None) or module.MoeModelOutputWithPast
    return output(last_hidden_state=self.norm(hidden))


def model_of_rows(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
    """A loss that is the mean of the means of the rows."""
    hidden = self.base_model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)[0]
    logits = self.lm_head(hidden)
    loss = None
    if labels is not None:
        losses = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        loss = (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def model_with_smoothing(self, input_ids=None, labels=None, **kwargs):
    """Label smoothing, and logits with a cap."""
    logits = 5 * torch.tanh(self.lm_head(self.base_model(input_ids, **kwargs)[0]) / 5)
    loss = None
    if labels is not None:
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


NORMS = {function.__name__: function for function in (mean_norm, norm_of_the_batch, norm_of_the_row)}
FORWARDS = {
    "attention": {function.__name__: function for function in (plain_attention, masked_attention, sharper_attention,
                                                               attention_to_itself)},
    "mlp": {"relu_mlp": relu_mlp},
    "q_norm": NORMS, "input norm": NORMS, "final norm": NORMS,
    "layer": {"parallel_layer": parallel_layer, "layer_without_arguments": layer_without_arguments},
    "backbone": {"plain_backbone": plain_backbone},
    "model": {"model_of_rows": model_of_rows, "model_with_smoothing": model_with_smoothing},
}  # fmt: skip
EXACT_FORWARDS = ("sharper_attention", "relu_mlp", "mean_norm", "parallel_layer")
