# SPDX-License-Identifier: Apache-2.0
"""Converts common chat formats to OpenAI-style messages.

    messages         [{"role": ..., "content": ...}, ...]: unchanged
    conversations    ShareGPT: [{"from": "human", "value": ...}, ...], with an optional `system` text
    prompt, completion (or response, answer)
                     two texts: a user and an assistant message; or two lists of messages, which are joined
    instruction, output (with an optional `input`)
                     Alpaca: a user and an assistant message
"""

from ..errors import BadRow

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
         "model": "assistant", "bot": "assistant", "system": "system", "developer": "developer", "tool": "tool",
         "observation": "tool", "function_response": "tool", "ipython": "tool"}  # fmt: skip
COMPLETIONS = ("completion", "response", "answer")
TOKENS = "token ids, which are rows already: pass them to `espalier train`, `inspect` or `verify`"


def messages_of(row, shown):
    """The row's messages as an unchecked list; raises BadRow. `shown(value)` shortens values for error messages."""
    if "messages" in row:
        return row["messages"]
    for name in ("conversations", "conversation"):
        if isinstance(row.get(name), list):
            return _system(row) + [_of_sharegpt(turn, f"{name}[{i}]", shown) for i, turn in enumerate(row[name])]
    for name in COMPLETIONS:
        if "prompt" in row and name in row:
            return _system(row) + _joined(row, "prompt", name, shown)
    if "instruction" in row and "output" in row:
        return _system(row) + _of_alpaca(row, shown)
    raise BadRow("messages", "a non-empty list of chat messages", _without(row))


def _without(row):
    if "input_ids" in row:
        return TOKENS
    if "chosen" in row and "rejected" in row:
        return "a preference pair (`chosen`, `rejected`), which `espalier import --model DIR` converts to two chats"
    if "text" in row:
        return "text (`text`), which has no turns: docs/data-format.md says how to encode it"
    names = ", ".join(f"`{name}`" for name in list(row)[:8])
    return f"a line without `messages` (its fields: {names}{', ...' if len(row) > 8 else ''})" if row else "an empty object"


def _system(row):
    return [{"role": "system", "content": row["system"]}] if isinstance(row.get("system"), str) and row["system"] else []


def _of_sharegpt(turn, name, shown):
    if isinstance(turn, dict) and "role" in turn and "content" in turn:
        return turn  # some files call OpenAI's messages conversations
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise BadRow(name, "an object with `from` and `value`", shown(turn))
    role = ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise BadRow(f"{name}.from", f"one of {', '.join(ROLES)}", shown(turn["from"]))
    return {"role": role, "content": turn["value"]}


def _joined(row, prompt, completion, shown):
    sides = [row[prompt], row[completion]]
    if all(isinstance(side, list) for side in sides):
        return sides[0] + sides[1]
    if all(isinstance(side, str) for side in sides):
        return [{"role": "user", "content": sides[0]}, {"role": "assistant", "content": sides[1]}]
    raise BadRow(prompt, f"two texts, or two lists of messages, in `{prompt}` and `{completion}`",
                 f"{shown(sides[0])} and {shown(sides[1])}")


def _of_alpaca(row, shown):
    parts = [row["instruction"], row.get("input") or ""]
    for name, part in (("instruction", parts[0]), ("input", parts[1]), ("output", row["output"])):
        if not isinstance(part, str):
            raise BadRow(name, "a text", shown(part))
    return [{"role": "user", "content": "\n\n".join(part for part in parts if part)},
            {"role": "assistant", "content": row["output"]}]
