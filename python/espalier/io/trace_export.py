# SPDX-License-Identifier: Apache-2.0
"""Rows as traces of verifiers (verifiers 0.4.0, trace version 1): one Episode for each group, one tree in it.

Rows share a token in the tree if all its values are equal, so that nothing is lost; a node ends where rows diverge, and
where a range of sampled tokens ends. `info.espalier.rows` of the trace has the end node and the name of each row, also
for a row that is a prefix of another, for which a trace has no leaf. Other readers of traces see only the tree.

A trace has no fields for log-probabilities and advantages of tokens without loss, nor for expert routes: they are left
out and counted.
"""

from collections import Counter
from typing import Any

from ..rows.fields import ROW_NUMBERS

PER_TOKEN = ("loss", "logprobs", "ref_logprobs", "advantages")
ROW_FIELDS = ("trajectory_id", "group_id", "pair_id", "chosen", *ROW_NUMBERS, "advantage")
NODE_NAMES = {"logprobs": "logprobs", "ref_logprobs": "reference_logprobs", "advantages": "advantages"}
MOST_UNGROUPED_ROWS = 1024  # maximum rows without a group in one tree


class Exporter:
    """Converts a stream of rows to Episodes; consecutive rows of one group form one Episode."""

    def __init__(self):
        self.left_out: Counter[str] = Counter()
        self._rows, self._count = [], 0

    def add(self, row):
        """Adds one checked row; returns the Episodes that are complete."""
        done = []
        full = "group_id" not in row and len(self._rows) == MOST_UNGROUPED_ROWS
        if self._rows and (full or self._rows[0].get("group_id") != row.get("group_id")
                           or ("loss_weights" in row) != ("loss_weights" in self._rows[0])):
            done = self.finish()
        self._rows.append(row)
        return done

    def finish(self):
        """The Episodes of the remaining rows."""
        if not self._rows:
            return []
        rows, self._rows = self._rows, []
        self._count += 1
        return [self._episode(rows)]

    def _episode(self, rows):
        tree = _Tree()
        ends = [tree.add(self._entries(row)) for row in rows]
        numbers, nodes = tree.nodes("rl" if "loss_weights" in rows[0] else None)
        own = [{"node": numbers[id(end)]} | {name: row[name] for name in ROW_FIELDS if name in row}
               for row, end in zip(rows, ends)]
        group = rows[0].get("group_id")
        task = {"type": "Task", "data": {}} | ({"key": group} if group is not None else {})
        trace = {"version": 1, "id": f"espalier-{self._count}", "task": task, "agent": {"config": {}, "name": "agent"},
                 "nodes": nodes, "info": {"espalier": {"rows": own}}, "is_completed": True, "ok": True}
        rewards = {row.get("reward") for row in rows}
        if len(rewards) == 1 and None not in rewards:
            trace["rewards"] = {"reward": {"score": rewards.pop(), "weight": 1.0}}
        episode = {
            "id": f"espalier-{self._count}", "env": {"id": "espalier"}, "task": task, "ok": True, "traces": [trace]
        }
        return episode | ({"group": {"id": group}} if group is not None else {})

    def _entries(self, row):
        """The values of each token of a row: (id, loss, logprob, ref_logprob, advantage)."""
        tokens = len(row["input_ids"])
        loss = row.get("loss_weights") or row.get("loss_mask") or [0] + [1] * (tokens - 1)
        columns = [row["input_ids"], loss]
        for name in PER_TOKEN[1:]:
            values = row.get(name)
            if values is None:
                columns.append([None] * tokens)
                continue
            lost = sum(value not in (None, 0) for value, carries in zip(values, loss) if not carries)
            if lost:
                self.left_out[f"{name} of tokens without loss"] += lost
            columns.append([value if carries else None for value, carries in zip(values, loss)])
        for name in ("turn_rewards", "ref_topk_ids", "ref_topk_logprobs", "routed_experts"):
            if name in row:
                self.left_out[name] += 1
        return list(zip(*columns))


class _Node:
    def __init__(self, parent, entries):
        self.parent, self.entries, self.children = parent, entries, {}


class _Tree:
    """Rows as a tree of token sequences."""

    def __init__(self):
        self._root = _Node(None, [])

    def add(self, entries):
        """Adds a row; returns the node at whose end the row ends."""
        node, at = self._root, 0
        while at < len(entries):
            child = node.children.get(entries[at])
            if child is None:
                return self._grow(node, entries[at:])
            same = 0
            while same < len(child.entries) and at + same < len(entries) and child.entries[same] == entries[at + same]:
                same += 1
            node = child if same == len(child.entries) else self._split(child, same)
            at += same
        return node

    def _grow(self, node, entries):
        """Adds nodes for the entries; a new one begins where a range of tokens with loss ends."""
        begin = 0
        for at in range(1, len(entries) + 1):
            if at == len(entries) or (entries[at - 1][1] and not entries[at][1]):
                child = _Node(node, entries[begin:at])
                node.children[entries[begin]] = child
                node, begin = child, at
        return node

    def _split(self, node, at):
        """Moves the first `at` entries of a node to a new parent node."""
        front = _Node(node.parent, node.entries[:at])
        node.parent.children[node.entries[0]] = front
        node.parent, node.entries = front, node.entries[at:]
        front.children[node.entries[0]] = node
        return front

    def nodes(self, stream):
        """(number of each node by its identity, the nodes as JSON), parents before children. stream: the name of the
        loss weights; None: loss is a mask."""
        numbers: dict[int, int] = {}
        nodes: list[dict[str, Any]] = []
        waiting = list(reversed(self._root.children.values()))
        while waiting:
            node = waiting.pop()
            numbers[id(node)] = len(nodes)
            nodes.append(_json(node, numbers.get(id(node.parent)), stream))
            waiting.extend(reversed(node.children.values()))
        return numbers, nodes


def _json(node, parent, stream):
    ids, loss, *rest = (list(column) for column in zip(*node.entries))
    sampled = any(loss)
    record = {} if parent is None else {"parent": parent}
    record |= {"message": {"role": "assistant" if sampled else "user", "content": ""}, "sampled": sampled,
               "token_ids": ids, "mask": [bool(value) for value in loss]}
    for name, values in zip(PER_TOKEN[1:], rest):
        given = [value for value, carries in zip(values, loss) if carries]
        if given and None not in given:
            record[NODE_NAMES[name]] = given
    if stream and sampled:
        record["loss_weights"] = {stream: [float(value) for value in loss]}
    return record
