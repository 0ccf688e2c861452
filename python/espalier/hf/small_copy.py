# SPDX-License-Identifier: Apache-2.0
"""Small copies of models: the config of a model with small sizes and every kind of layer, and weights that make all of them
matter."""

import contextlib
import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..errors import in_one_line
from .config_view import original_of

VOCABULARY = 48
_FEW_LAYERS = 4  # models of no more keep theirs
_TRIED = (0, 4, 6, 8, 12, 16)  # how many first layers are kept beside one of each kind


class NotSmall(Exception):
    """A config of which no small copy can be made; the message says why."""


@dataclass(frozen=True)
class Scale:
    """Sizes of a copy. Another scale gives another copy of the same model."""

    hidden: int = 32
    heads: int = 4
    head_dim: int = 16  # where the config names one
    width: int = 24  # of MLPs
    window: int = 4  # of attention, in tokens; chunks are as long


# Names of sizes in configs -> sizes, whatever the model. Names that are not here fall under _PATTERNS.
def _sizes(scale: Scale) -> dict[str, int]:
    return dict(
        hidden_size=scale.hidden, d_model=scale.hidden, n_embd=scale.hidden, word_embed_proj_dim=scale.hidden,
        attention_hidden_size=scale.hidden, lru_width=scale.hidden, embedding_size=scale.hidden,
        num_attention_heads=scale.heads, n_heads=scale.heads, n_head=scale.heads, num_heads=scale.heads,
        attention_heads=scale.heads, swa_num_attention_heads=scale.heads, decoder_attention_heads=scale.heads,
        encoder_attention_heads=scale.heads,
        intermediate_size=scale.width, moe_intermediate_size=10, shared_expert_intermediate_size=14,
        shared_intermediate_size=14, intermediate_size_mlp=20,
        vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, unpadded_vocab_size=VOCABULARY,
        num_experts=6, num_local_experts=6, n_routed_experts=6, moe_num_experts=6, n_group=3, num_expert_group=3,
        topk_group=2, zero_expert_num=2,
        num_experts_per_tok=2, num_experts_per_token=2, moe_topk=2, moe_k=2, moe_top_k=2,
        n_shared_experts=1, num_shared_experts=1, moe_num_shared_experts=1, num_shared_expert=1,
        qk_nope_head_dim=8, qk_rope_head_dim=8, qk_head_dim=16, kv_lora_rank=12, q_lora_rank=12,
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_head_dim=8, linear_num_heads=4,
        mamba_n_heads=8, mamba_num_heads=8, n_mamba_heads=8, mamba_d_head=scale.hidden // 4,
        mamba_head_dim=scale.hidden // 4, mamba_headdim=scale.hidden // 4, mamba_d_ssm=2 * scale.hidden,
        mamba_d_state=6, ssm_state_size=6, state_size=6, time_step_rank=4, mamba_dt_rank=4,
        n_groups=2, mamba_n_groups=2, mamba_ngroups=2,
        hidden_size_per_layer_input=6, index_topk=3, index_n_heads=2, index_head_dim=16, max_position_embeddings=64,
        first_k_dense_replace=1, num_dense_layers=1, moe_layer_start_index=1,
    )  # fmt: skip


_LENGTHS = re.compile(r"^(sliding_window(_size)?|attention_chunk_size|window_size|local_attention|keep_window_size|"
                      r"attention_window_size|rel_extent|floor_scale|original_max_position_embeddings|"
                      r"log_scaling_n_floor|local_attn_chunk_length|lsh_attn_chunk_length)$")  # fmt: skip
_BLOCKS = re.compile(r"^(mamba_)?chunk_size$|^block_size$")  # of algorithms: no result depends on them
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks")
_LISTED = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "hybrid_layer_ids", "cross_attention_layers")  # numbers of layers
_NO_OPTION = re.compile(r"^_|^training$|idx$|layer_id|drop")
_KEPT = re.compile(r"kernel|period|offset|interval|pattern|_conv$|conv1d_width|version|seed|topk|_k$|_step$|expand|mult$|"
                   r"L_cache|factor|theta|_cycles|_loops|num_passes|_bits|_idx$")  # fmt: skip
_PATTERNS = ((re.compile(r"heads|groups"), 2), (re.compile(r"position|length|_len$|n_ctx"), 64),
             (re.compile(r"rank"), 6), (re.compile(r"size|dim|width|channels|inner|dff|d_ff|dim_ff"), 16))  # fmt: skip


def small_config(config: Any, layers: list[int], scale: Scale | None = None) -> Any:
    """A config of the class of `config` with small sizes, its options, and only these of its layers."""
    config = original_of(config)
    values = {name: value for name, value in config.to_dict().items()
              if name not in ("dtype", "torch_dtype", "architectures", "transformers_version")}  # fmt: skip
    shrunk = _Shrinking(values, getattr(config, "attribute_map", {}), layers, scale or Scale()).result()
    small = type(config).from_dict(shrunk)
    if getattr(config, "_attn_implementation", None) in ("eager", "sdpa"):  # the others have no float64
        small._attn_implementation = config._attn_implementation
    small._experts_implementation = "eager"  # the others have no float64
    return small


class _Shrinking:
    def __init__(self, values: dict[str, Any], names: Mapping[str, str], layers: list[int], scale: Scale) -> None:
        self.values, self.layers, self.scale = values, layers, scale
        self.general = {own: name for name, own in names.items()}
        self.sizes = _sizes(scale)
        self.num_layers = num_layers(values)

    def result(self) -> dict[str, Any]:
        small = {name: self.of(name, value) for name, value in self.values.items()}
        self._relate(small)
        return small

    def of(self, name: str, value: Any) -> Any:
        general = self.general.get(name, name)
        if name in _LISTED and isinstance(value, list):
            return [self.layers.index(number) for number in value if number in self.layers]
        if isinstance(value, list) and len(value) == self.num_layers > _FEW_LAYERS:
            return [self._of_layer(general, value[number], value) for number in self.layers]
        if name == "per_layer_config" and isinstance(value, dict):
            return {number: {key: self.of(key, part) for key, part in value[own].items()}
                    for number, own in self._numbered(value)}  # fmt: skip
        if isinstance(value, dict):
            return {key: self.of(key, part) for key, part in value.items()}
        if isinstance(value, float) and not isinstance(value, bool):
            return self._of_number(name, value)
        if isinstance(value, list) and name.endswith("multipliers"):
            return [self._of_number("multiplier", part) for part in value]
        if isinstance(value, list) and name.endswith("token_id"):
            return [2]
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        return self._of_integer(name, general, value)

    def _numbered(self, value: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
        for own in value:
            if int(own) in self.layers:
                number = self.layers.index(int(own))
                yield (f"{number:0{len(own)}d}" if isinstance(own, str) else number), own

    def _of_layer(self, name: str, value: Any, values: list[Any]) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or max(values) <= 8:
            return value
        if "heads" in name:
            return self.scale.heads if value == max(values) else self.scale.heads // 2
        return self.of(name, value)

    def _of_number(self, name: str, value: float) -> float:
        if name.endswith(("eps", "epsilon")):
            return 1e-2  # rounding is not what is to be seen
        if "drop" in name:
            return 0.0  # refused in training, whatever the model
        if "softcap" in name:
            return min(value, 2.0)  # so that it changes logits
        if "multiplier" in name and value and not 0.3 <= abs(value) <= 3:
            return math.copysign(0.7, value)
        if name in ("rope_theta", "rope_local_base_freq", "original_max_position_embeddings"):
            return value if name == "rope_theta" and value <= 500 else 500.0
        return float(self._of_integer(name, name, int(value))) if value > 64 and value.is_integer() else value

    def _of_integer(self, name: str, general: str, value: int) -> Any:
        if name in _LAYERS or general in _LAYERS:
            return len(self.layers) if value == self.num_layers else min(value, 2)
        if name.endswith(("_id", "_token_index")):
            return value if 0 <= value < VOCABULARY else 3
        if name == "rope_theta":
            return min(value, 500)
        if "drop" in name:
            return 0
        if name == "rotary_dim":
            return 8
        if _LENGTHS.match(name):
            return min(value, self.scale.window) if value > 0 else value
        if _BLOCKS.match(name):
            return min(value, 8)
        if general in ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_query_groups", "kv_n_heads"):
            return self._key_heads(value)
        if general in ("head_dim", "swa_head_dim", "attention_head_dim", "global_head_dim", "kv_channels", "d_head"):
            return self.scale.head_dim
        if general in self.sizes:
            return min(self.sizes[general], value) if value else value
        if value <= 8 or _KEPT.search(name):
            return value
        return next((min(size, value) for pattern, size in _PATTERNS if pattern.search(name)), value)

    def _name_of(self, general: str) -> str:
        """What the config calls it."""
        return next((own for own, name in self.general.items() if name == general and own in self.values), general)

    def _key_heads(self, value: int) -> int:
        heads = next((self.values[name] for name in self.values
                      if self.general.get(name, name) in ("num_attention_heads", "n_heads")), None)  # fmt: skip
        return self.scale.heads if value == heads else min(value, 2)

    def _relate(self, small: dict[str, Any]) -> None:
        """Sizes that follow from others in the model do so in the copy."""
        own = self.values
        heads, hidden, head_dim = (self._name_of(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
        if own.get(head_dim) and own[head_dim] * own.get(heads, 0) == own.get(hidden):
            small[head_dim] = small[hidden] // small[heads]
        if own.get("d_head") and own.get("d_model"):
            small["d_head"] = small["d_model"] // small["n_head"]
        if own.get("attention_hidden_size") and own["attention_hidden_size"] == 2 * own.get(hidden, 0):
            small["attention_hidden_size"] = 2 * small[hidden]
            small["attention_head_dim"] = small["attention_hidden_size"] // small[heads]
        if own.get("mamba_d_ssm") and own.get("mamba_d_head"):
            small["mamba_d_head"] = small["mamba_d_ssm"] // small["mamba_n_heads"]
        if own.get("head_dim") and "qk_rope_head_dim" in own:
            same = next((name for name in ("qk_rope_head_dim", "qk_head_dim", "v_head_dim")
                         if own["head_dim"] == own.get(name)), None)  # fmt: skip
            small["head_dim"] = small["qk_rope_head_dim"] if same is None else small[same]
        if own.get("v_head_dim"):
            parts = own.get("qk_nope_head_dim", 0) + own.get("qk_rope_head_dim", 0)
            keys = own.get("qk_head_dim") or parts or own.get("head_dim")
            small["v_head_dim"] = self.scale.head_dim if own["v_head_dim"] == keys else 8
        if own.get("linear_num_value_heads") and own["linear_num_value_heads"] == own.get("linear_num_key_heads"):
            small["linear_num_value_heads"] = small["linear_num_key_heads"]
        if isinstance(own.get("num_kv_shared_layers"), int) and self.num_layers > _FEW_LAYERS:
            begin = self.num_layers - own["num_kv_shared_layers"]
            small["num_kv_shared_layers"] = sum(number >= begin for number in self.layers)
        if isinstance(own.get("moe_layer_end_index"), int) and own["moe_layer_end_index"] > 0:
            small["moe_layer_end_index"] = len(self.layers) - 1
        if isinstance(own.get("max_window_layers"), int):
            small["max_window_layers"] = min(own["max_window_layers"], len(self.layers))
        for ropes in _dictionaries(small):
            if "mrope_section" in ropes:
                ropes["mrope_section"], ropes["partial_rotary_factor"] = [2, 1, 1], 8 / small.get("head_dim", 8)


def longest_window(values: Any) -> int:
    """The largest window or chunk that a config names, in tokens."""
    found = [value for part in _dictionaries(values) for name, value in part.items()
             if isinstance(value, int) and (_LENGTHS.match(str(name)) or _BLOCKS.match(str(name)))]  # fmt: skip
    return max(found, default=0)


def _dictionaries(tree: Any) -> Iterable[dict[Any, Any]]:
    if isinstance(tree, dict):
        yield tree
        for part in tree.values():
            yield from _dictionaries(part)


def num_layers(values: Mapping[str, Any]) -> int:
    """The number of layers that a config names, 0 where it names none."""
    return next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 0)


def small_model(cls: Any, config: Any, scale: Scale | None = None, seed: int = 0) -> Any:
    """A small copy, in float64 and in training mode, of a model of class `cls` with `config`, with a layer of every kind that
    the model has. Raises NotSmall where there is none."""
    with torch.device("meta"), _quiet():
        wanted = kinds_of_layers(cls(copy.deepcopy(original_of(config))))
    count = num_layers(original_of(config).to_dict())
    for layers in _choices_of_layers(original_of(config).to_dict(), count):
        try:
            torch.manual_seed(seed)
            with _quiet():
                model = cls(small_config(config, layers, scale))
        except Exception as failure:
            raise NotSmall(in_one_line(failure)) from failure
        if wanted <= kinds_of_layers(model):
            break
    else:
        raise NotSmall(f"kinds of layers that the first {_TRIED[-1]} layers lack")
    if sum(parameter.numel() for parameter in model.parameters()) > 8_000_000:
        raise NotSmall("sizes that the config does not name")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # heads of causal models have none
    draw_weights(model.double())
    return model.train()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, Transformers says nothing of configs that are unusual, as all of these are."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _choices_of_layers(values: dict[str, Any], count: int) -> Iterable[list[int]]:
    """Numbers of layers to keep: one of each kind that lists of the config tell apart, then more."""
    if count <= _FEW_LAYERS:
        yield list(range(count))
        return
    listed = [value for name, value in values.items()
              if name not in _LISTED and isinstance(value, list) and len(value) == count]  # fmt: skip
    named = [values[name] for name in _LISTED if isinstance(values.get(name), list)]
    own = values.get("per_layer_config")
    own = {int(key): part for key, part in own.items()} if isinstance(own, dict) else {}
    kinds: dict[str, int] = {}
    for number in range(count):
        kind = [value[number] for value in listed], [number in value for value in named], own.get(number)
        kinds.setdefault(repr(kind), number)
    seen: set[tuple[int, ...]] = set()
    for first in _TRIED:
        layers = tuple(sorted({*kinds.values(), *range(min(max(first, 2), count))}))
        if layers not in seen:
            seen.add(layers)
            yield list(layers)


def kinds_of_layers(model: Any) -> set[Any]:
    """What tells the layers of `model` apart: the classes of their modules, their options, and which numbers they have."""
    layers: dict[str, list[Any]] = {}
    for path, module in model.named_modules():
        found = re.match(r"(.*?\.\d+)(?:\.|$)(.*)", path)
        if found is None:
            continue
        options = tuple(sorted((name, value if isinstance(value, str) else str(bool(value)))
                               for name, value in vars(module).items()
                               if isinstance(value, int | str | None) and not _NO_OPTION.search(name)))  # fmt: skip
        part = re.sub(r"\d+", "*", found[2]), type(module).__name__, options
        layers.setdefault(found[1], []).append(part)
    return {tuple(sorted(set(parts), key=repr)) for parts in layers.values()}


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Random weights by which every path through a layer counts: as models are born, many hardly do."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel() if "conv" in name else parameter.shape[-1]
            parameter.normal_(std=1.2 / math.sqrt(fan_in))
        elif parameter.numel() and (name.endswith("bias") or parameter.min() == parameter.max()):
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point() and not buffer.any():
            buffer.normal_(std=0.1)
