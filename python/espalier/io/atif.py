# SPDX-License-Identifier: Apache-2.0
"""ATIF trajectories (Harbor's Agent Trajectory Interchange Format, 1.7) as rows, or as chats if they have no token ids.

A trajectory is one JSON object with `schema_version` and `steps`. From steps of source `agent` with token ids, prompt and
completion in `metrics` are used: `prompt_token_ids, completion_token_ids, logprobs` (of the completion). Consecutive steps
whose prompts extend all earlier tokens form one row; a step whose prompt does not (the history was rewritten, or another
agent spoke) begins the next row, named SESSION/run-K. With per_turn every step is a separate row. Steps that were copied
from an earlier trajectory (`is_copied_context`), and those that no model wrote (`llm_call_count` 0), are never trained.

Trajectories without token ids of both prompt and completion become chats for `espalier prepare`.
"""

from typing import Any

from ..errors import BadRow
from ..rows.json_lines import shown
from .fields import Fields
from .parts import joined
from .rules import checked, token_ids

ROLES = {"system": "system", "user": "user", "agent": "assistant"}
TOKENS = ("prompt_token_ids", "completion_token_ids")
CONTEXT = ("agent steps without loss: copied from another trajectory (is_copied_context), or written by no model "
           "(llm_call_count 0)")


def rows(record, options):
    """Yields the rows of one trajectory. options.per_turn: one row per step of the agent."""
    runs: list[dict[str, Any]] = []
    left_out = 0
    for number, step in enumerate(_steps(record)):
        if step.get("source") != "agent":
            continue
        if _is_context(step, f"steps[{number}]"):
            record.tally.notes[CONTEXT] += 1
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
    name, part = _name(record)[1], "turn" if options.per_turn else "run"
    for number, run in enumerate(runs):
        run["trajectory_id"] = f"{name}/{part}-{number}" if name is not None and len(runs) > 1 else name
        yield checked(run)


def _turn(step):
    metrics = step.inside("metrics")
    if any(metrics.get(name, []) == [] for name in TOKENS):
        return None
    prompt, completion = (token_ids(metrics.list(name), f"metrics.{name}") for name in TOKENS)
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


def _steps(trajectory):
    _expect("steps" in trajectory, "steps", "a list of objects", None)
    return _objects(trajectory, "steps", "steps")


def _is_context(step, place):
    """Whether a step of the agent is no turn of the model in this trajectory."""
    copied, calls = step.get("is_copied_context", False), step.get("llm_call_count")
    _expect(isinstance(copied, bool), f"{place}.is_copied_context", "true or false", copied)
    _expect(calls is None or type(calls) is int, f"{place}.llm_call_count", "an integer", calls)
    return copied or calls == 0


def _name(trajectory):
    """(field, name): a trajectory_id is of one document; several may have the same session_id."""
    return trajectory.first_of("trajectory_id", "session_id")


def has_token_ids(record):
    """Whether a step that is trained has the token ids of its prompt and of its completion."""
    steps = record.get("steps")
    return isinstance(steps, list) and any(isinstance(step, dict) and _has_token_ids(step) for step in steps)


def _has_token_ids(step):
    metrics = step.get("metrics")
    is_turn = step.get("source") == "agent" and step.get("is_copied_context") is not True and step.get("llm_call_count") != 0
    return is_turn and isinstance(metrics, dict) and all(metrics.get(name) for name in TOKENS)


def chat_of(record, tally=None):
    """The trajectory as a chat with `messages`, for `espalier prepare`; raises BadRow. tally: counts the fields."""
    trajectory = Fields(record, tally)
    steps = enumerate(_steps(trajectory))
    chat = {"messages": [message for number, step in steps for message in _messages(step, f"steps[{number}]")]}
    tools = _inside(trajectory, "agent", "agent").get("tool_definitions")
    if tools is not None:
        _expect(isinstance(tools, list), "agent.tool_definitions", "a list of tool schemas", tools)
        chat["tools"] = tools
    field, name = _name(trajectory)
    if field:
        _expect(isinstance(name, (str, int)) and not isinstance(name, bool), field, "text or an integer", name)
        chat["trajectory_id"] = name
    return chat


def _messages(step, place):
    """Yields the message of a step, and one for each result of its observation."""
    source = step.get("source")
    _expect(isinstance(source, str) and source in ROLES, f"{place}.source", "system, user or agent", source)
    message = {"role": ROLES[source], "content": _content(step, "message", f"{place}.message")}
    if source == "agent":
        thoughts = step.get("reasoning_content")
        _expect(isinstance(thoughts, (str, type(None))), f"{place}.reasoning_content", "a text", thoughts)
        if thoughts:
            message["reasoning_content"] = thoughts
        if _is_context(step, place):
            step.tally.notes[CONTEXT] += 1
            message["weight"] = 0
    calls = _objects(step, "tool_calls", f"{place}.tool_calls")
    if calls:
        message["tool_calls"] = [_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)]
    yield message
    results = _objects(_inside(step, "observation", f"{place}.observation"), "results", f"{place}.observation.results")
    for number, result in enumerate(results):
        content = _content(result, "content", f"{place}.observation.results[{number}].content")
        yield {"role": "tool", "tool_call_id": result.get("source_call_id"), "content": content}


def _content(fields, name, place):
    """A text, null, or a list of parts, which whoever reads chats checks."""
    content = fields.get(name)
    _expect(isinstance(content, (str, list, type(None))), place, "a text, null or a list of parts", content)
    return content


def _call(call, place):
    name, arguments = call.get("function_name"), call.get("arguments", {})
    _expect(isinstance(name, str), f"{place}.function_name", "a text", name)
    _expect(isinstance(arguments, (dict, str)), f"{place}.arguments", "an object", arguments)
    return {"id": call.get("tool_call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _inside(fields, name, place):
    """The fields of the object in this field; none if it is missing."""
    value = fields.peek(name)
    _expect(isinstance(value, (dict, type(None))), place, "an object", value)
    return fields.inside(name)


def _objects(fields, name, place):
    """The fields of each object of the list in this field; none if it is missing."""
    values = fields.peek(name)
    _expect(isinstance(values, (list, type(None))), place, "a list of objects", values)
    for number, value in enumerate(values or []):
        _expect(isinstance(value, dict), f"{place}[{number}]", "an object", value)
    return fields.each(name) if values else []


def _expect(is_right, name, expected, value):
    if not is_right:
        raise BadRow(name, expected, shown(value))


def is_trajectory(record):
    """Whether a record of a file is of this kind."""
    version = record.get("schema_version")
    return isinstance(version, str) and version.startswith("ATIF") and "steps" in record
