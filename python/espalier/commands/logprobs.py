# SPDX-License-Identifier: Apache-2.0
"""`espalier logprobs`: log-probabilities, entropies and top-k tokens, computed on the shared trees."""

import itertools
import json

from ..errors import InputError
from .command import run_work
from .console import count_of, printable
from .model_command import Work
from .parser import DATA, OUTPUT, PLAN_FLAGS, CommandParser, present_values, real, whole

DESCRIPTION = """\
Write the log-probability of every token, computed on the shared trees; with
--entropies and --top-k also entropies and the most likely tokens.
"""

EPILOG = """\
The output has the rows of the data, in the same order. Fields, with an entry for
each token:
  logprobs       null for the first token, which nothing predicts
  entropies      with --entropies: of the distribution that the token is drawn
                 from, in nats; null for the first
  topk_ids       with --top-k K: the K most likely token ids at that place, in
                 descending order; [] for the first
  topk_logprobs  their log-probabilities
With --as-reference it has the complete rows of the data, for train and verify,
with ref_logprobs and with --top-k also ref_topk_ids and ref_topk_logprobs.

Example, distillation:
  espalier logprobs --model TEACHER --data rows.jsonl --as-reference --top-k 64 -o taught.jsonl
  espalier train --model DIR --data taught.jsonl --objective opd --ref-topk rest --out run
"""


def parser():
    """All flags."""
    made = CommandParser("logprobs", DESCRIPTION, EPILOG)
    made.group(DATA)
    made.model()
    made.flag("adapter", "Adapter of the model, a PEFT folder", "DIR", path="folder")
    made.data()
    made.flag("temperature", "Divide logits by this. Without it: by the `temperature` of each row, or 1 where it has none; but "
                "those of --top-k by 1", "X", real(1e-3))  # fmt: skip
    made.group(OUTPUT)
    made.flag("out", "JSONL file to write: trajectory_id (or row number), logprobs (the first null), and what other flags add; "
                "with --as-reference also packed .safetensors", "FILE", letter="-o", path="file", required=True)  # fmt: skip
    made.flag("entropies", "Write the entropy of each token's distribution, in nats, at the same temperature")
    made.flag("top-k", "Write this many of the most likely tokens of each distribution and their log-probabilities (0: none)",
                "N", whole(), default="0")  # fmt: skip
    made.flag("as-reference", "Write the rows of the data with the log-probabilities as those of a reference or teacher: "
                "ref_logprobs, and with --top-k also ref_topk_ids and ref_topk_logprobs")  # fmt: skip
    made.machine()
    made.plan()
    made.others()
    return made


def _check_as_reference(rows):
    """Raises InputError where rows have the fields that --as-reference writes."""
    row, field = 0, "ref_topk_ids"
    if rows.ref_topk_ids is None:
        if rows.ref_logprobs is None:
            return
        present = rows.present.get("ref_logprobs")  # None: all rows have it
        row, field = 0 if present is None else int(present.argmax()), "ref_logprobs"
    name = rows.trajectory_id[row] if rows.trajectory_id else ""
    raise InputError(f"trajectory {name or row} (row {row}) has `{field}` already: expected none with --as-reference, "
                     "which writes them")  # fmt: skip


def _as_reference(rows, logprobs, ids, values):
    """The rows with what a model says of them."""
    from ..native import core

    columns = rows.__getstate__()
    del columns["sources"]
    columns["ref_logprobs"] = logprobs
    if ids.shape[1] > 0:
        columns.update(ref_topk=ids.shape[1], ref_topk_ids=ids.reshape(-1), ref_topk_logprobs=values.reshape(-1))
    return core.trajectories_of_columns(columns)


def _listing(rows, logprobs, ids, values, entropies):
    """Lines of JSON. Numbers are printed with no more digits than they have."""
    names, ends = rows.trajectory_id, rows.offsets.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        name = json.dumps((names[row] if names else "") or row, ensure_ascii=False)
        line = f'{{"trajectory_id":{name},"logprobs":{_numbers("null", logprobs[begin + 1 : end])}'
        if len(entropies) > 0:
            line += f',"entropies":{_numbers("null", entropies[begin + 1 : end])}'
        if ids.shape[1] > 0:
            lists = ["[]", *(f"[{','.join(map(str, each))}]" for each in ids[begin + 1 : end].tolist())]
            line += f',"topk_ids":[{",".join(lists)}],"topk_logprobs":'
            line += f"[{','.join(['[]', *(_numbers(None, each) for each in values[begin + 1 : end])])}]"
        yield line + "}\n"


def _numbers(first, array):
    return f"[{','.join([*([first] if first else []), *map(str, array)])}]"


def work(arguments, process, group=None):
    """Raises InputError.

    Args:
        arguments: The values of flags.
        process: In which the work is done.
        group: The ranks that divide it. Default: this process alone.
    """
    if arguments.as_reference and arguments.entropies:
        raise InputError("--as-reference: cannot be combined with --entropies, because rows have no such field")
    here, top_k = Work("logprobs", process, group), arguments.top_k or 0
    if not arguments.as_reference:
        here.check_file(arguments.out)  # to fail now rather than after hours
    engine = here.engine(arguments.model, present_values(arguments, (*PLAN_FLAGS, "dtype", "device", "threads")))
    if top_k > engine._engine.vocab_size:
        raise InputError(f"--top-k {top_k}: expected at most the model's vocab_size, {engine._engine.vocab_size}")
    if arguments.adapter:
        engine.use(engine.new_adapter(adapter=arguments.adapter))
    rows = here.rows(arguments)
    if arguments.as_reference:
        _check_as_reference(rows)
    with here.progress("logprobs") as progress:
        *found, encoded = engine._distributions(
            rows, k=top_k, temperature=arguments.temperature, entropies=bool(arguments.entropies),
            progress=lambda done, total: progress.update(done / total, ""))  # fmt: skip
    if not here.tells:
        return
    import numpy as np

    from ..rows.files import write

    dtype = np.float64 if arguments.dtype == "float64" else np.float32
    token_logprobs, ids, values, entropies = (each if each.dtype == np.int32 else each.astype(dtype) for each in found)
    if arguments.as_reference:
        write(arguments.out, _as_reference(rows, token_logprobs, ids, values))
    else:
        here.write_file(arguments.out, _listing(rows, token_logprobs, ids, values, entropies))
    here.print(f"{printable(arguments.out)}: {count_of(len(rows), 'row')}, {count_of(rows.num_tokens, 'flat token')} from "
               f"{encoded:,} encoded\n")  # fmt: skip


def parse(arguments):
    """The values of flags."""
    return parser().parse(arguments)


def main(arguments):
    """Runs the command and returns its exit status."""
    return run_work("logprobs", parse, work, arguments)
