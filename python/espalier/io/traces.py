# SPDX-License-Identifier: Apache-2.0
"""Traces of verifiers and prime-rl (verifiers 0.4.0: verifiers/v1/{episode,trace,graph}.py; trace version 1) as rows.

Each line of `traces.jsonl` is an Episode: the traces of one rollout. A trace is a tree of message nodes, each with the
tokens that it adds; every leaf ends one trajectory, and its row is the path from the root. Fields used:

    group.id, else task.key or task.hash    -> group_id
    traces[].id                     -> trajectory_id, followed by /branch-K if the trace has several leaves
    traces[].rewards                the sum of score times weight -> reward
    traces[].nodes[]: parent, token_ids     the tree
    mask                            for each token: sampled by the model -> loss_mask
    logprobs, advantages, reference_logprobs        one for each token whose mask is true
    loss_weights.NAME               for each token -> loss_weights (as prime-rl's samples: espalier.io.samples)
    ok, agent.trainable, semantic_parents   mark what is not training data: see below

As in prime-rl (orchestrator/trajectories.py, August 2026), a sampled node in several branches carries loss only in the
first of them, unless shared_targets is "sum"; traces that failed, agents that are not trained and rejected attempts at
compaction give no rows. Everything left out is counted.
"""

from typing import Any

from ..rows.json_lines import shown
from ..errors import BadRow
from .rules import checked, number, same_length, token_ids, zero_one
from .samples import CROSS_ENTROPY, refuse_unnamed

VERSION = 1
NO_TOKENS = "traces without token ids left out (an evaluation through a plain API records none)"


def rows(record, options):
    """Yields the rows of one Episode, or of one trace. options: loss_weights (a stream or None), shared_targets
    ("once" or "sum"), include_failed."""
    if "nodes" in record:
        yield from _trace_rows(record, {"group_id": _group(record, {})}, options)
        return
    group = _group(record, record.inside("group"))
    for index, trace in enumerate(record.each("traces")):
        try:
            yield from _trace_rows(trace, {"group_id": group}, options)
        except BadRow as error:
            raise BadRow.within(f"traces[{index}]", error) from None


def _group(record, group):
    if "id" in group:
        return group.get("id")
    task = record.inside("task")
    return task.first_of("key", "hash")[1]


def _trace_rows(trace, common, options):
    if trace.inside("agent").get("trainable") is False:
        trace.tally.notes["traces of agents that are not trained left out"] += 1
        return
    if trace.get("ok") is False and not options.include_failed:
        trace.tally.notes["traces that failed left out (--include-failed includes them)"] += 1
        return
    if trace.get("version", VERSION) != VERSION:
        raise BadRow("version", f"traces of version {VERSION}", shown(trace.get("version")))
    nodes = _Nodes(trace, options)
    _refuse_images(trace, nodes)
    if not any(nodes.ids):
        trace.tally.notes[NO_TOKENS] += 1
        return
    name, own = trace.get("id"), trace.inside("info").inside("espalier")
    common = common | {"reward": _reward(trace)}
    if "rows" in own:  # written by `espalier export`, with the end of each row
        for row in own.get("rows"):
            end = row.get("node") if isinstance(row, dict) else None
            if type(end) is not int or not 0 <= end < len(nodes):
                raise BadRow("info.espalier.rows", "rows that end at a node of the trace", shown(row))
            yield checked(common | row | nodes.row(end, once=False))
        return
    leaves = nodes.leaves()
    for branch, leaf in enumerate(leaves):
        if nodes.is_abandoned(leaf):
            trace.tally.notes["branches that were attempts at compaction left out"] += 1
            continue
        row = nodes.row(leaf, once=options.shared_targets == "once")
        if row is None:
            trace.tally.notes["branches without additional sampled tokens left out"] += 1
            continue
        branch_name = f"{name}/branch-{branch}" if name is not None and len(leaves) > 1 else name
        yield checked(common | {"trajectory_id": branch_name} | row)


def _refuse_images(trace, nodes):
    """Raises BadRow for placeholder tokens of images and videos, which rows do not support."""
    placeholders = trace.get("mm_token_type_id_map", {})
    if isinstance(placeholders, dict) and placeholders:
        found = nodes.first_of({int(token) for token in placeholders if str(token).isdecimal()})
        if found is not None:
            raise BadRow("nodes[].token_ids", "text alone, since rows have tokens only",
                         f"token {found}, a placeholder of an image")


def _reward(trace):
    """The weighted sum, None if nothing was scored."""
    rewards = trace.get("rewards")
    if rewards is not None and not isinstance(rewards, dict):
        raise BadRow("rewards", "an object of rewards", shown(rewards))
    given = [(name, reward) for name, reward in (rewards or {}).items() if reward is not None]
    for name, reward in given:
        if not isinstance(reward, dict):
            raise BadRow(f"rewards.{name}", "an object with score and weight", shown(reward))
    return sum(
        number(f"rewards.{name}.score", reward.get("score")) *
        number(f"rewards.{name}.weight", reward.get("weight", 1.0)) for name, reward in given) if given else None


class _Nodes:
    """The message nodes of one trace. All arrays are checked against the tokens of their node."""

    def __init__(self, trace, options):
        self._nodes = trace.each("nodes")
        self._parents = [node.get("parent") for node in self._nodes]
        self.ids = [
            token_ids(node.get("token_ids", []), f"nodes[{i}].token_ids") for i, node in enumerate(self._nodes)
        ]
        self._masks = [self._mask(i) for i in range(len(self._nodes))]
        for i, parent in enumerate(self._parents):
            if parent is not None and (type(parent) is not int or not 0 <= parent < i):
                raise BadRow(f"nodes[{i}].parent", f"null or the index of an earlier node (0 to {i - 1})",
                             shown(parent))
        self._spread = {
            field: [self._spread_field(i, name, fill) for i in range(len(self._nodes))]
            for field, name, fill in (("logprobs", "logprobs", None), ("ref_logprobs", "reference_logprobs", None),
                                      ("advantages", "advantages", 0.0))
        }
        stream, self._weights = self._read_weights(options.loss_weights)
        if stream == CROSS_ENTROPY:
            self._spread = {}
        self._trained = set()

    def __len__(self):
        return len(self._nodes)

    def first_of(self, tokens):
        """The first of these tokens in any node; None if there is none."""
        return next((token for ids in self.ids for token in ids if token in tokens), None)

    def leaves(self):
        """Nodes without children, in order."""
        parents = set(self._parents)
        return [i for i in range(len(self._nodes)) if i not in parents]

    def is_abandoned(self, leaf):
        """Whether a leaf is an attempt at compaction that the harness did not continue."""
        if "compaction_attempt" not in self._links(leaf):
            return False
        return not any(leaf in self._links(i).get("compaction", ()) for i in range(len(self._nodes)))

    def _links(self, i):
        links: dict[Any, Any] = {}
        for link in self._nodes[i].get("semantic_parents", []):
            if isinstance(link, dict):
                links.setdefault(link.get("type"), []).append(link.get("node"))
        return links

    def row(self, end, once):
        """The row of the path that ends at a node. once: nodes that carry loss in an earlier row carry none in this one;
        None if no loss remains."""
        path = []
        node = end
        while node is not None:
            path.append(node)
            node = self._parents[node]
        path.reverse()
        loss = self._weights or self._masks
        carries = [i for i in path if any(loss[i])]
        trained = self._trained if once else set()
        fresh = [i for i in carries if i not in trained]
        if once and not fresh:
            return None
        self._trained.update(carries)
        for i in path if carries else ():
            if self._nodes[i].get("sampled") and not self.ids[i]:
                raise BadRow(f"nodes[{i}].token_ids", "the tokens of a sampled message", "none")
        row = {"input_ids": [token for i in path for token in self.ids[i]]}
        field = "loss_mask" if self._weights is None else "loss_weights"
        row[field] = [value if i in fresh else 0 for i in path for value in loss[i]]
        for field, values in self._spread.items():
            if any(values[i] is not None for i in path):
                fill = 0.0 if field == "advantages" else None
                row[field] = [value for i in path for value in values[i] or [fill] * len(self.ids[i])]
        return row

    def _mask(self, i):
        values = self._nodes[i].get("mask") or [False] * len(self.ids[i])
        name = f"nodes[{i}].mask"
        return zero_one(name, values, len(self.ids[i]), "the node")

    def _spread_field(self, i, name, fill):
        """A node's values for its sampled tokens, with `fill` on the others; None if it has none."""
        values = self._nodes[i].get(name)
        if not values:
            return None
        sampled = sum(self._masks[i])
        values = iter(same_length(f"nodes[{i}].{name}", values, sampled, "the node whose mask is true"))
        return [next(values) if loss else fill for loss in self._masks[i]]

    def _read_weights(self, chosen):
        """The name of the stream that is used and its weights by node; (None, None) if there is none."""
        streams: dict[str, dict[int, Any]] = {}
        for i, node in enumerate(self._nodes):
            weights = node.get("loss_weights", {})
            if not isinstance(weights, dict):
                raise BadRow(f"nodes[{i}].loss_weights", "an object of named weights", shown(weights))
            for name, values in weights.items():
                field = f"nodes[{i}].loss_weights.{name}"
                values = [number(field, value) for value in same_length(field, values, len(self.ids[i]), "the node")]
                streams.setdefault(name, {})[i] = values
        if chosen is None and len(streams) > 1:
            raise BadRow("nodes[].loss_weights", "one stream of weights, or --loss-weights to name one of them",
                         ", ".join(streams))
        name = chosen or next(iter(streams), None)
        refuse_unnamed(name, chosen, "nodes[].loss_weights")
        if name not in streams:
            return None, None
        weights = [streams[name].get(i, [0.0] * len(ids)) for i, ids in enumerate(self.ids)]
        if name == "rl":
            weights = [[a * b for a, b in zip(mask, values)] for mask, values in zip(self._masks, weights)]
        return name, weights
