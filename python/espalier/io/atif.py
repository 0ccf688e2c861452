# SPDX-License-Identifier: Apache-2.0
"""ATIF trajectories (Harbor's Agent Trajectory Interchange Format, 1.7) as rows, or as chats if they have no token ids.

A trajectory is one JSON object with `schema_version`, `session_id` and `steps`. From steps of source `agent` with token
ids, prompt and completion in `metrics` are used: `prompt_token_ids, completion_token_ids, logprobs` (of the completion).
Consecutive steps whose prompts extend all earlier tokens form one row; a step whose prompt does not (the history was
rewritten, or another agent spoke) begins the next row, named SESSION/run-K. With per_turn every step is a separate row.

Trajectories without token ids become chats for `espalier prepare`.
"""

import json
from typing import Any

from ..commands.chats import shown
from ..errors import BadRow
from .parts import joined
from .rules import checked, token_ids

ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def rows(record, options):
    """Yields the rows of one trajectory. options.per_turn: one row per step of the agent."""
    runs: list[dict[str, Any]] = []
    left_out = 0
    for number, step in enumerate(record.each("steps")):
        if step.get("source") != "agent":
            continue
        try:
            turn = _turn(step)
        except BadRow as error:
            raise BadRow.within(f"steps[{number}]", error) from None
        if turn is None:
            left_out += 1
        elif runs and not options.per_turn and turn["input_ids"][:len(runs[-1]["input_ids"])] == runs[-1]["input_ids"]:
            runs[-1] = _extended(runs[-1], turn)
        else:
            runs.append(turn)
    if left_out:
        record.tally.notes["agent steps without token ids left out"] += left_out
    name, part = record.get("session_id"), "turn" if options.per_turn else "run"
    for number, run in enumerate(runs):
        run["trajectory_id"] = f"{name}/{part}-{number}" if name is not None and len(runs) > 1 else name
        yield checked(run)


def _turn(step):
    metrics = step.inside("metrics")
    if "completion_token_ids" not in metrics and "prompt_token_ids" not in metrics:
        return None
    prompt = token_ids(metrics.list("prompt_token_ids"), "metrics.prompt_token_ids")
    completion = token_ids(metrics.list("completion_token_ids"), "metrics.completion_token_ids")
    return joined(prompt, completion, [("metrics.logprobs", "logprobs", metrics.get("logprobs"))],
                  "completion_token_ids")


def _extended(run, turn):
    """The run followed by the turn's tokens. Log-probabilities are kept if both have them."""
    count = len(run["input_ids"])
    longer = {"input_ids": turn["input_ids"], "loss_mask": run["loss_mask"] + turn["loss_mask"][count:]}
    if ("logprobs" in run) != ("logprobs" in turn):
        raise BadRow("steps[].metrics.logprobs", "log-probabilities of all steps of a trajectory, or of none", "some")
    if "logprobs" in run:
        longer["logprobs"] = run["logprobs"] + turn["logprobs"][count:]
    return longer


def has_token_ids(record):
    steps = record.get("steps")
    return isinstance(steps, list) and any(isinstance(step, dict) and isinstance(step.get("metrics"), dict)
                                           and step["metrics"].get("completion_token_ids") for step in steps)


def chat_of(record):
    """The trajectory as a chat with `messages`, for `espalier prepare`; raises BadRow."""
    messages = []
    for number, step in enumerate(record["steps"] if isinstance(record.get("steps"), list) else []):
        role = ROLES.get(step.get("source", "")) if isinstance(step, dict) else None
        if role is None:
            raise BadRow(f"steps[{number}].source", "system, user or agent",
                         shown(step.get("source") if isinstance(step, dict) else step))
        message = {"role": role, "content": step.get("message")}
        calls = step.get("tool_calls") or []
        if calls:
            message["tool_calls"] = [_call(call, f"steps[{number}].tool_calls[{i}]") for i, call in enumerate(calls)]
        messages.append(message)
        observation = step.get("observation")
        for result in (observation.get("results") or []) if isinstance(observation, dict) else []:
            messages.append(
                {"role": "tool", "tool_call_id": result.get("source_call_id"), "content": result.get("content")})
    chat = {"messages": messages}
    if record.get("session_id") is not None:
        chat["trajectory_id"] = record["session_id"]
    return chat


def _call(call, name):
    if not isinstance(call, dict) or not isinstance(call.get("function_name"), str):
        raise BadRow(f"{name}.function_name", "a text",
                     shown(call.get("function_name") if isinstance(call, dict) else call))
    arguments = call.get("arguments") or {}
    return {"id": call.get("tool_call_id"), "type": "function", "function": {
        "name": call["function_name"],
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)}}


def is_trajectory(record):
    """Whether a record of a file is of this kind."""
    version = record.get("schema_version")
    return isinstance(version, str) and version.startswith("ATIF") and "steps" in record
