# SPDX-License-Identifier: Apache-2.0
"""Rows and models that the papers' figures are drawn with."""

import json
import random
import re

from compare_transformers import CHATS, espalier
from model_shapes import QWEN3, QWEN3_5, QWEN3_MOE

# The proportions of Granite 4.0 H without experts: three Mamba-2 layers, then one of attention.
GRANITE_HYBRID = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_act": "silu", "hidden_size": 1024,
    "shared_intermediate_size": 3072, "intermediate_size": 3072, "num_local_experts": 0, "num_experts_per_tok": 0,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "mamba", "attention"], "num_attention_heads": 16, "num_key_value_heads": 4,
    "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "position_embedding_type": "nope",
    "attention_bias": False, "attention_dropout": 0.0, "vocab_size": 16384, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.02, "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 6.0, "pad_token_id": None,
}  # fmt: skip
FULL = {"qwen3": QWEN3, "qwen3_5": QWEN3_5, "qwen3_moe": QWEN3_MOE, "granite_hybrid": GRANITE_HYBRID}

# A quarter as wide, with heads of half the size or fewer heads, so that a CPU gets through thousands of tokens.
_WIDTHS = {"hidden_size": 256, "vocab_size": 4096}
SMALL = {
    "qwen3": QWEN3 | _WIDTHS | {"intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_5": QWEN3_5 | _WIDTHS | {"intermediate_size": 896, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128,
                                    "linear_num_key_heads": 4, "linear_num_value_heads": 4,
                                    "rope_parameters": QWEN3_5["rope_parameters"] | {"mrope_section": [6, 5, 5]}},
    "qwen3_moe": QWEN3_MOE | _WIDTHS | {"intermediate_size": 768, "moe_intermediate_size": 96, "num_attention_heads": 4,
                                        "num_key_value_heads": 2},
    "granite_hybrid": GRANITE_HYBRID | _WIDTHS | {"shared_intermediate_size": 768, "intermediate_size": 768,
                                                  "num_attention_heads": 4, "num_key_value_heads": 1, "mamba_n_heads": 8},
}  # fmt: skip


def model_folder(shape, name, scratch):
    """A Hugging Face folder with random weights."""
    folder = scratch / name
    (scratch / f"{name}.json").write_text(json.dumps(shape))
    espalier("init", "--config", scratch / f"{name}.json", "--out", folder, "--seed", 0)
    return folder


def group(prompt, answer, answers, vocab_size, seed=0):
    """Answers to one prompt, with what GRPO reads of them."""
    rng = random.Random(seed)
    tokens = lambda count: [rng.randrange(2, vocab_size) for _ in range(count)]
    shared, rows = tokens(prompt), []
    for number in range(answers):
        ids = shared + tokens(answer)
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * answer, "group_id": "0",
                     "advantage": (number - (answers - 1) / 2) / answers,
                     "logprobs": [0.0] * prompt + [-rng.uniform(5, 10) for _ in range(answer)]})  # fmt: skip
    return rows


def tree_of_ratio(ratio, tree_tokens, vocab_size, path, seed=0):
    """One prompt with 2 * ratio answers, so long that flat / tree tokens are `ratio`: with answers of L tokens, the prompt has
    2 L (ratio - 1). At a large ratio answers of one token are the smallest tree that there is. Loss on the answers."""
    rng = random.Random(seed)
    answer = max(1, round(tree_tokens / (4 * ratio - 2)))
    prompt = [rng.randrange(vocab_size) for _ in range(2 * answer * (ratio - 1))]
    with open(path, "w") as file:
        for first in rng.sample(range(vocab_size), 2 * ratio):  # answers differ from their first token on
            ids = [*prompt, first, *(rng.randrange(vocab_size) for _ in range(answer - 1))]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * len(prompt) + [1] * answer}) + "\n")


def tree_of_overlap(overlap, flat_tokens, vocab_size, path, seed=0):
    """64 trajectories of a tree of four levels, whose tokens are the part 1 - overlap of so many flat ones: the same number of
    leaves and of flat tokens at every overlap, as in Tree Training, section 3.1. Loss on the last quarter of the tokens."""
    espalier("synth", "-o", path, "--depth", 4, "--branching", 4, "--vocab-size", vocab_size, "--target-por", overlap,
             "--node-length", max(2, round((1 - overlap) * flat_tokens / 85)), "--loss-rate", 0.25, "--seed", seed)  # fmt: skip
    return [json.loads(line) for line in path.read_text().splitlines()]


def conversations(count, vocab_size):
    """Real conversations: for each its messages, (role, ids). A token is a word, a number or a mark, about four letters as with most
    tokenizers; words beyond the vocabulary share ids."""
    known, found = {}, []
    for line in CHATS.read_text().splitlines()[:count]:
        messages = []
        for message in json.loads(line)["messages"]:
            text = f"<{message['role']}> {message.get('content') or ''} {json.dumps(message.get('tool_calls') or '')}"
            words = re.findall(r" ?\w+|[^\w\s]|\s", text)
            messages.append((message["role"], [known.setdefault(word, len(known)) % (vocab_size - 1) + 1 for word in words]))
        found.append(messages)
    return found


def row_of(*parts):
    """A row of (ids, whether they carry loss)."""
    return {"input_ids": [token for ids, _ in parts for token in ids],
            "loss_mask": [int(trained) for ids, trained in parts for _ in ids]}  # fmt: skip


def turns_of(messages, most_tokens):
    """A row for each assistant turn, with loss on that turn."""
    history, rows = [], []
    for role, ids in messages:
        if role == "assistant" and len(history) + len(ids) <= most_tokens:
            rows.append(row_of((history, False), (ids, True)))
        history = history + ids
    return rows


def conversation_turns(count, vocab_size, most_tokens):
    """Rows of all turns of so many real conversations."""
    return [row for messages in conversations(count, vocab_size) for row in turns_of(messages, most_tokens)]
