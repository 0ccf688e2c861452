#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Other ways to train on the same rows, in one run: tokens, time and error of a step on one model.

    pip install prefix_grouper==0.0.1.post1 trl
    pip install --no-deps flash-pref==0.1.1
    python bench/papers/peers.py --art DIR/art/megatron/prefix_tree_packing.py
    python bench/papers/peers.py --full --device cuda --dtype bfloat16

A step is forward and backward over all rows, without optimiser. All sides have the same weights and the same loss terms, and take turns
round by round; times are ratios to Transformers of the same round. The error is that of all gradients together, relative to those of
Transformers in float64 with every row by itself. A side with more than four times the error of Transformers stops the command.

- Transformers: every row by itself, in batches of the fastest size (bench/transformers_step.py);
- append-only merging: the same without rows that others extend (bench/papers/append_only.py);
- PrefixGrouper: the prompt of a group once. It runs where all rows are answers to one prompt;
- flash-preference: likewise for any number of prompts with equally many answers, but for attention, which it computes row by row unless it
  has FlashAttention. Version 0.1.1 expects layers of Transformers 4, which `layers_as` imitates;
- TRL: the packed row of AsyncGRPO, with its gathered keys (bench/trl_tree_packing.py);
- path vectors: the tree as one row, whose mask is made of a bit for every node on a path, as in Prompt Trees; dense, and on a GPU by
  FlexAttention, too;
- ART: `prefix_tree_pack` of OpenPipe ART at a limit of depth, with the same attention as path vectors. bench/papers/packed_tokens.py
  says where the file for --art comes from;
- Espalier, patched model: `espalier.Step` on the model of Transformers;
- Espalier, own trainer: `espalier.Engine`.

Dense masks go through scaled_dot_product_attention. FlexAttention does not train on a CPU (PyTorch 2.11). A side that is not installed, or
cannot take the rows, is left out and named.
"""

import contextlib
import functools
import importlib.metadata
import itertools
import statistics
import sys
import time
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import espalier as package
from compare_transformers import Failure
from espalier.hf.float64 import InFloat64
from gpu_measure import say
from papers import append_only, figure, packed_tokens, real_workloads, workloads
from patched_model import StepSide
from transformers_step import Trajectory, TransformersSide, make_batches
from trl_tree_packing import TreePackingSide

SCRIPT = "peers.py"
# Of the error of Transformers' gradients, relative, and of the errors of others over that: more is no rounding.
TOLERANCE, MOST_ERROR = {"float32": 1e-4, "bfloat16": 0.1}, 4
BATCH_SIZES = (1, 2, 4, 8)
# Attention of Transformers.
MASKED, FLEX, GROUPED = "tree_by_mask", "tree_by_flex_attention", "prefix_grouper_by_aten"


class NotHere(Exception):
    """Why a side does not run."""


def trajectories_of(rows):
    weights = lambda row: row.get("loss_weights", row.get("loss_mask"))
    return [Trajectory(row["input_ids"], [float(weight) for weight in weights(row)]) for row in rows]


def terms_of(trajectories, sources, total=None):
    """Places [R] of predicting tokens in a packed row, targets [R], and shares [R] of the loss in float64. sources: the places of each
    trajectory. total: of the loss weights, by default those of the trajectories."""
    total = total or sum(sum(each.weights[1:]) for each in trajectories)
    found = [(int(places[t - 1]), each.ids[t], each.weights[t] / total)
             for each, places in zip(trajectories, sources, strict=True) for t in range(1, len(each.ids)) if each.weights[t] > 0]  # fmt: skip
    places, targets, shares = zip(*found, strict=True)
    return torch.tensor(places), torch.tensor(targets), torch.tensor(shares, dtype=torch.float64)


def loss_of(model, hidden, terms):
    """hidden: [N, d]."""
    places, targets, shares = terms
    logits = model.get_output_embeddings()(hidden.index_select(0, places))
    return (torch.nn.functional.cross_entropy(logits, targets, reduction="none") * shares.to(logits.dtype)).sum()


class Plain:
    """Transformers in batches. rows: all, or those that are left after merging."""

    def __init__(self, side, rows):
        self.side = side
        trajectories = trajectories_of(rows)
        size = side.choose_batch_size(trajectories, BATCH_SIZES, 2048, 1 << 20, lambda text: None)
        self.batches = make_batches(trajectories, size)
        self.tokens = sum(batch.tokens for batch in self.batches)

    def step(self):
        return self.side.step(self.batches).loss


def merged(side, rows):
    found = append_only.merge(rows, linear=True)
    if not found.dropped:
        raise NotHere("no row extends another")
    return Plain(side, found.rows)


class Trl:
    def __init__(self, side, rows):
        try:
            self.packed = TreePackingSide(side, trajectories_of(rows))
        except ImportError as error:
            raise NotHere(str(error)) from None
        self.tokens = self.packed.tokens

    def step(self):
        return self.packed.step()[1]


class OneRow:
    """Rows packed into one, with the peer's attention, which gets `tree`. terms: from terms_of, places among `hidden`."""

    def __init__(self, side, attention, tree, input_ids, position_ids, terms):
        """input_ids, position_ids: [1, T]."""
        self.model, self.attention, self.tree, self.terms = side.model, attention, tree, terms
        self.tokens = input_ids.numel()
        self.inputs = {"input_ids": input_ids, "position_ids": position_ids}

    def hidden(self, states):
        """[N, d] of the model's [1, T, d]."""
        return states[0]

    def step(self):
        model = self.model
        model.zero_grad(set_to_none=True)
        stock = model.config._attn_implementation
        model.set_attn_implementation(self.attention)
        states = model.base_model(**self.inputs, use_cache=False, tree=self.tree).last_hidden_state
        loss = loss_of(model, self.hidden(states), self.terms)
        loss.backward()
        model.set_attn_implementation(stock)
        return loss.item()


def path_bits(parent):
    """[N, W] a bit for each node on the path of every node, 63 to a word. parent: of every node, at a root itself or -1."""
    count = len(parent)
    paths = torch.zeros(count, -(-count // 63), dtype=torch.int64, device="cpu")
    for number in range(count):
        if 0 <= parent[number] < number:
            paths[number] = paths[parent[number]]
        paths[number, number // 63] |= 1 << (number % 63)
    return paths


def mask_of(node, parent):
    """[1, 1, T, T] whether a token sees another. node: [T] of every token. parent: as for path_bits."""
    paths = path_bits(parent).to(node.device)
    on_path = (paths[node][:, node // 63] >> (node % 63)) & 1
    return on_path.bool().tril()[None, None]


def flex_mask(node, parent):
    """The same as a function for FlexAttention."""
    paths = path_bits(parent).to(node.device)[node]
    word, bit = node // 63, node % 63
    return lambda batch, head, query, key: (((paths[query, word[key]] >> bit[key]) & 1) == 1) & (query >= key)


def masked_attention(module, query, key, value, attention_mask, *, tree, scaling=None, **kwargs):
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, tree, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def flex_attention(module, query, key, value, attention_mask, *, tree, scaling=None, **kwargs):
    out = _compiled_flex_attention()(query, key, value, block_mask=tree, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


@functools.cache
def _compiled_flex_attention():
    from torch.nn.attention import flex_attention as library

    return torch.compile(library.flex_attention, dynamic=False)


def flex_path_vectors(side, rows):
    if side.model.device.type == "cpu":
        raise NotHere("FlexAttention does not train on a CPU")
    from torch.nn.attention.flex_attention import create_block_mask

    def block_mask(node, parent):
        return create_block_mask(flex_mask(node, parent), None, None, len(node), len(node), device=node.device)

    return path_vectors(side, rows, FLEX, block_mask)


def path_vectors(side, rows, attention=MASKED, make_mask=None):
    """make_mask: mask_of by default."""
    forest = package.build(rows)
    begin, parent, sources = forest.node_begin, forest.parent, []
    for node in forest.end_node:
        path = []
        while node >= 0:
            path.append(np.arange(begin[node], begin[node + 1]))
            node = parent[node]
        sources.append(np.concatenate(path[::-1]))
    lengths = np.diff(begin)
    nodes = torch.tensor(np.repeat(np.arange(len(lengths)), lengths))
    positions = torch.tensor(np.repeat(forest.position - begin[:-1], lengths) + np.arange(forest.tree_tokens))
    tokens = torch.tensor(forest.tokens.astype(np.int64))
    return OneRow(side, attention, (make_mask or mask_of)(nodes, parent), tokens[None], positions[None],
                  terms_of(trajectories_of(rows), sources))  # fmt: skip


def art(side, rows, file, depth):
    if file is None:
        raise NotHere("--art was not given")
    pack = packed_tokens.module_of_art(file).prefix_tree_pack([torch.tensor(row["input_ids"]) for row in rows], max_depth=depth)
    number = {segment.group_id: place for place, segment in enumerate(pack.segments)}
    parent = [number[segment.parent_id] for segment in pack.segments]  # a root's is the root
    nodes = torch.tensor([number[group] for group in pack.group_ids[0].tolist()])
    return OneRow(side, MASKED, mask_of(nodes, parent), pack.tokens, pack.position_ids,
                  terms_of(trajectories_of(rows), pack.positions_by_sequence))  # fmt: skip


class Grouped(OneRow):
    """PrefixGrouper, as its own page shows it. FlashAttention's causal call with padding is done by scaled_dot_product_attention."""

    def __init__(self, side, rows):
        try:
            from prefix_grouper import PrefixGrouper
        except ImportError as error:
            raise NotHere(str(error)) from None
        trajectories = trajectories_of(rows)
        prompt = next((t for t, weight in enumerate(trajectories[0].weights) if weight > 0), 0)
        shared = trajectories[0].ids[:prompt]
        if not prompt or any(each.ids[:prompt] != shared or any(each.weights[:prompt]) for each in trajectories):
            raise NotHere("the rows are not answers to one prompt")
        longest = max(len(each.ids) for each in trajectories) - prompt
        answers = torch.tensor([each.ids[prompt:] + [0] * (longest - len(each.ids) + prompt) for each in trajectories])
        mask = torch.tensor([[t < len(each.ids) - prompt for t in range(longest)] for each in trajectories])
        prefix_mask, places = torch.ones(1, prompt, dtype=torch.bool), torch.arange(prompt + longest)
        grouper = PrefixGrouper.from_ungrouped_masks(prefix_mask, mask, len(rows))
        input_ids = grouper.concat_input(torch.tensor([shared]), prefix_mask, answers, mask)
        position_ids = grouper.concat_input(places[None, :prompt], prefix_mask, places[prompt:].repeat(len(rows), 1), mask)
        # The prompt's last token stands before every answer.
        sources = [[0] * (prompt - 1) + [row * (longest + 1) + t for t in range(longest + 1)] for row in range(len(rows))]
        super().__init__(side, GROUPED, grouper, input_ids, position_ids, terms_of(trajectories, sources))

    def hidden(self, states):
        return self.tree.split_output(states, include_prefix_last=1)[2].flatten(0, 1)


def grouped_attention(module, query, key, value, attention_mask, *, tree, scaling=None, **kwargs):
    def attend(query, key, value, padding):
        size = query.shape[2], key.shape[2]
        causal = torch.ones(size, dtype=torch.bool).tril(size[1] - size[0])
        mask = None if size[0] == size[1] else causal & padding[:, None, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    return tree.forward(attend, query, key, value), None


@contextlib.contextmanager
def layers_as(model, change):
    """With `change` applied to what layers return."""
    layers = model.base_model.layers
    with contextlib.ExitStack() as patches:
        for layer in layers:
            forward = layer.forward
            changed = lambda *args, forward=forward, **kwargs: change(forward(*args, **kwargs))
            patches.enter_context(unittest.mock.patch.object(layer, "forward", changed))
        yield


class FlashPreference:
    """flash-preference, as its own page shows it."""

    def __init__(self, side, rows):
        try:
            from flash_pref import shared_prefix
            from flash_pref.shared_prefix import get_prefix_lens
        except ImportError as error:
            raise NotHere(str(error)) from None
        trajectories = trajectories_of(rows)
        prompts = [each.ids[: next(t for t, weight in enumerate(each.weights) if weight > 0)] for each in trajectories]
        sizes = {len(list(answers)) for _, answers in itertools.groupby(prompts)}
        if len(sizes) > 1 or sizes == {1}:
            raise NotHere("the rows are not equally many answers to each prompt")
        self.model, self.shared_prefix, self.group_size = side.model, shared_prefix, sizes.pop()
        lengths = [len(each.ids) for each in trajectories]
        longest = max(lengths)
        self.input_ids = torch.tensor([each.ids + [0] * (longest - len(each.ids)) for each in trajectories])
        self.mask = torch.tensor([[1] * length + [0] * (longest - length) for length in lengths])
        shared = get_prefix_lens(self.input_ids, self.mask.sum(-1), self.group_size, interleaved=False)
        self.tokens = sum(lengths) - (self.group_size - 1) * int(shared.sum())
        self.terms = terms_of(trajectories, [range(row * longest, (row + 1) * longest) for row in range(len(rows))])

    def step(self):
        model = self.model
        model.zero_grad(set_to_none=True)
        # Layers of Transformers 4 return tuples, which version 0.1.1 expects.
        shared = self.shared_prefix(model, input_ids=self.input_ids, attention_mask=self.mask, group_size=self.group_size)
        with layers_as(model, lambda hidden: (hidden,)), shared, layers_as(model, lambda hidden: hidden[0]):
            states = model.base_model(input_ids=self.input_ids, use_cache=False).last_hidden_state
            loss = loss_of(model, states.flatten(0, 1), self.terms)
            loss.backward()
        return loss.item()


for name, attention in {MASKED: masked_attention, FLEX: flex_attention, GROUPED: grouped_attention}.items():
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda **kwargs: None)


class Patched:
    def __init__(self, side, rows):
        self.own = StepSide(side, trajectories_of(rows))
        self.tokens = package.build(rows).tree_tokens

    def step(self):
        return self.own.step()[1]


class Trainer:
    """The engine in C++, on a copy of the weights."""

    def __init__(self, side, rows, folder, args):
        self.rows = package.trajectories(
            [{name: row[name] for name in ("input_ids", "loss_mask", "loss_weights") if name in row} for row in rows]
        )
        self.tokens = package.build(rows).tree_tokens
        self.engine = package.Engine(folder, dtype=args.dtype, device=args.device, threads=args.threads, token_budget=self.tokens,
                                     strategy="tree-packing", checkpoint_activations="none")  # fmt: skip

    def step(self):
        self.engine.zero_gradients()
        return self.engine.forward_backward(self.rows)["loss"]

    def gradients(self):
        return {name: torch.as_tensor(value) for name, value in self.engine.gradients().items()}


def exact_gradients(folder, trajectories, device):
    """{name: gradient} of Transformers in float64, every row by itself."""
    side = TransformersSide(folder, "float64")
    side.model.to(device)
    total = sum(sum(each.weights[1:]) for each in trajectories)
    for each in trajectories:
        if any(each.weights[1:]):
            with InFloat64():
                hidden = side.model.base_model(input_ids=torch.tensor([each.ids]), use_cache=False).last_hidden_state[0]
                loss_of(side.model, hidden, terms_of([each], [range(len(each.ids))], total)).backward()
    return {name: parameter.grad for name, parameter in side.model.named_parameters()}


def error_of(own, exact):
    """Relative to all gradients together; both {name: gradient}."""
    difference = sum(((own[name].double() - value) ** 2).sum() for name, value in exact.items())
    return (difference / sum((value**2).sum() for value in exact.values())).sqrt().item()


def sides_of(side, rows, folder, args):
    """{name: (version, how to make it)}."""
    return {
        "Transformers": (version("transformers"), lambda: Plain(side, rows)),
        "append-only merging": (version("transformers"), lambda: merged(side, rows)),
        "PrefixGrouper": (version("prefix_grouper"), lambda: Grouped(side, rows)),
        "flash-preference": (version("flash_pref"), lambda: FlashPreference(side, rows)),
        "TRL": (version("trl"), lambda: Trl(side, rows)),
        "path vectors": (version("torch"), lambda: path_vectors(side, rows)),
        "path vectors, FlexAttention": (version("torch"), lambda: flex_path_vectors(side, rows)),
        f"ART, depth {args.depth}": (args.art_version, lambda: art(side, rows, args.art, args.depth)),
        "Espalier, patched model": (package.__version__, lambda: Patched(side, rows)),
        "Espalier, own trainer": (package.__version__, lambda: Trainer(side, rows, folder, args)),
    }


def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measured(args, name, rows, folder, side):
    """A row of the table for every side that runs."""
    exact = exact_gradients(folder, trajectories_of(rows), args.device)
    sides, versions = {}, {}
    for title, (version, make) in sides_of(side, rows, folder, args).items():
        try:
            sides[title], versions[title] = make(), version
        except NotHere as reason:
            say(f"{name}: {title} is left out: {reason}")
    clock = time.process_time if args.cpu_seconds else time.perf_counter
    seconds, errors = {title: [] for title in sides}, {}
    for number in range(-1, args.rounds):  # one round before those that count
        for title, own in sides.items() if number % 2 == 0 else reversed(sides.items()):
            begin = clock()
            own.step()
            if number >= 0:
                seconds[title].append(clock() - begin)
            found = own.gradients() if isinstance(own, Trainer) else {each: p.grad for each, p in side.model.named_parameters()}
            errors[title] = error_of(found, exact)
            most = MOST_ERROR * errors["Transformers"] if "Transformers" in errors and title != "Transformers" else TOLERANCE[args.dtype]
            if not errors[title] <= most:
                raise Failure(f"{name}: {title}: gradients differ from those of float64 by {errors[title]:.2e}, expected at most {most:.2e}")
        say(f"{name}: round {number + 1}" + "".join(f", {title} {each[-1]:.3f} s" for title, each in seconds.items() if each))
    flat = sum(len(row["input_ids"]) for row in rows)
    for title, own in sides.items():
        ratios = [base / each for base, each in zip(seconds["Transformers"], seconds[title], strict=True)]
        yield {"rows": name, "side": title, "version": versions[title], "flat_tokens": flat, "encoded_tokens": own.tokens,
               "seconds": statistics.median(seconds[title]), "speed_up": statistics.median(ratios), "low": min(ratios), "high": max(ratios),
               "error": errors[title], "error_over_transformers": errors[title] / errors["Transformers"]}  # fmt: skip


def data_sets(args, scratch):
    small, full = args.quick, args.full
    lengths = (128, 8) if small else (4096, 256) if full else (1024, 64)
    pairs = real_workloads.pairs(workloads.conversations(4 if full else 1, 4096))
    return {"nine answers to a prompt": workloads.group(*lengths, 9, 4096),
            "turns of conversations": workloads.conversation_turns(1 if small else 8 if full else 2, 4096, 1500 if small else 2000),
            "rollouts": packed_tokens.rollouts(scratch)[: 12 if small else None],
            "preference pairs": pairs[: 4 if small else None]}  # fmt: skip


def draw(args, scratch):
    torch.set_num_threads(args.threads)
    folder = workloads.model_folder((workloads.FULL if args.full else workloads.SMALL)["qwen3"], "qwen3", scratch)
    side = TransformersSide(folder, args.dtype)
    side.model.to(args.device)
    rows = []
    with torch.device(args.device):
        for name, each in data_sets(args, scratch).items():
            rows += measured(args, name, each, folder, side)
    return figure.Figure("peers", rows, {})


def main(argv=None):
    parser = figure.flags(SCRIPT, __doc__)
    add = parser.add_argument
    add("--art", type=Path, metavar="FILE", help="prefix_tree_packing.py of OpenPipe ART (default: leave it out)")
    add("--art-version", default="0.5.23", metavar="V", help="version of that file (default: %(default)s)")
    add("--depth", type=int, default=4, metavar="N", help="limit of depth for ART (default: %(default)s)")
    figure.device_flags(parser, "more rows, a prompt of 4,096 tokens and a model four times as wide: for a GPU")
    return figure.main(SCRIPT, parser, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
