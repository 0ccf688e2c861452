# SPDX-License-Identifier: Apache-2.0
"""The formats, and detection of a record's format by the names of its fields."""

from collections.abc import Callable
from dataclasses import dataclass

from ..chats.shapes import is_preference, is_prompt_completion, is_sharegpt
from ..errors import InputError
from . import areal, atif, nemo_rl, plain_rows, samples, skyrl, slime, tinker, traces, trl, verl


@dataclass(frozen=True)
class Format:
    """A format of records. rows(Fields, Options) yields checked rows; None: the records are text for `espalier
    prepare`."""

    name: str
    fields: str  # by which it is detected, for messages
    matches: Callable
    rows: Callable | None


def _has(*names, one_of=()):
    """Whether a record has these fields, and one of others."""
    return lambda record: all(name in record for name in names) and (not one_of or any(name in record for name in one_of))


FORMATS = {entry.name: entry for entry in (
    Format("traces", "`traces` or `nodes`",
           lambda record: any(isinstance(record.get(name), list) for name in ("traces", "nodes")), traces.rows),
    Format("samples", "`token_ids` and `mask` or `loss_mask`", _has("token_ids", one_of=("mask", "loss_mask")), samples.rows),
    Format("nemo-rl", "`token_ids` and `token_loss_mask`", _has("token_ids", "token_loss_mask"), nemo_rl.rows),
    Format("verl", "`responses` and `attention_mask`", _has("responses", one_of=("attention_mask", "response_mask")), verl.rows),
    Format("skyrl", "`prompt_token_ids` and `response_ids`", _has("prompt_token_ids", "response_ids"), skyrl.rows),
    Format("areal", "`input_ids`, `loss_mask` and `versions`", _has("input_ids", "versions", "loss_mask"), areal.rows),
    Format("slime", "`tokens` and `response_length`", _has("tokens", "response_length"), slime.rows),
    Format("tinker", "`model_input` and `loss_fn_inputs`", _has("model_input", "loss_fn_inputs"), tinker.rows),
    Format("trl", "`prompt_ids` and `completion_ids` or `chosen_ids`",
           _has("prompt_ids", one_of=("completion_ids", "chosen_ids")), trl.rows),
    Format("atif", "`schema_version` ATIF and `steps`", atif.is_trajectory, atif.rows),
    Format("rows", "`input_ids`", _has("input_ids"), plain_rows.rows),
    Format("messages", "`messages`", lambda record: record.get("messages") is not None, None),
    Format("sharegpt", "`conversations`", is_sharegpt, None),
    Format("prompt-completion", "`prompt` and `completion`", is_prompt_completion, None),
    Format("preference", "`chosen` and `rejected`", is_preference, None),
)}
# Other values of --from: a library or file type that comprises several formats.
FAMILIES = {"trl": ("trl", "rows", "messages", "prompt-completion", "preference"), "parquet": tuple(FORMATS),
            "skyrl": ("skyrl", "rows")}
NAMES = (*FORMATS, "parquet")
# Records of the first format also match the second.
_INCLUDES = {"areal": "rows", "verl": "rows", "preference": "sharegpt"}
# Texts under other names, as `question` and `answer`, often stand beside what a record is about.
_CERTAIN = ({"instruction", "output"}, *({"prompt", name} for name in ("completion", "response", "answer")))


def format_of(record, where, wanted=None):
    """The format of a record. wanted: the value of --from. Raises InputError if none or several fit."""
    candidates = FAMILIES.get(wanted, (wanted,) if wanted else tuple(FORMATS))
    found = [name for name in candidates if FORMATS[name].matches(record)]
    found = [name for name in found if name not in [_INCLUDES.get(other) for other in found]]
    if len(found) > 1 and not any(names <= record.keys() for names in _CERTAIN):
        found = [name for name in found if name != "prompt-completion"]
    if found and (len(found) == 1 or wanted in ("trl", "skyrl")):
        return FORMATS[found[0]]  # token ids come first in a family: they are exact
    if found:
        kinds = " and ".join(f"{name} ({FORMATS[name].fields})" for name in found)
        flags = " or ".join(f"--from {name}" for name in found)
        raise InputError(
            f"{where}: expected a record of one format, received one that fits {kinds}: choose one with {flags}")
    last = f"{candidates[-1]} (with {FORMATS[candidates[-1]].fields})" if len(candidates) == 1 else candidates[-1]
    expected = " or ".join(filter(None, (", ".join(candidates[:-1]), last)))
    raise InputError(f"{where}: expected a record of {expected}, received {_described(record)}")


def _described(record):
    names = list(record)
    if {"input", "output", "score"} <= set(names):
        return ("a dump of texts (`input`, `output`, `score`), as verl's trainer.rollout_data_dir has: token ids "
                "cannot be made of them exactly; pass the batch to espalier.io.from_verl in the trainer instead")
    if {"role", "content"} <= set(names):
        return "a message outside of a record: `jq -c '{messages: .}' FILE > chats.jsonl` makes a record of a list of them"
    lists = [name for name in names if isinstance(record[name], list) and record[name] and isinstance(record[name][0], dict)]
    if len(lists) == 1 and len(names) < 4:
        return f"a record of records: `jq -c '.{lists[0]}[]' FILE > chats.jsonl` makes a line of each"
    if "text" in names:
        return "text (`text`), which has no turns: docs/data-format.md says how to encode it"
    if not names:
        return "an empty object"
    shown = ", ".join(f"`{name}`" for name in names[:8])
    return (f"a record with {shown}{', ...' if len(names) > 8 else ''}: docs/importing.md lists the fields of each format; "
            "rename those of the file, for example with `jq -c '{prompt: .FIELD, completion: .OTHER}' FILE > chats.jsonl`")
