# SPDX-License-Identifier: Apache-2.0
"""`espalier sample`: completions of prompts, as rows with behaviour log-probabilities."""

import json
from pathlib import Path

from ..options import SamplingParams
from .command import run_work
from .console import count_of, printable
from .model_command import Work
from .parser import DATA, OUTPUT, CommandParser, present_values, real, whole

DESCRIPTION = """\
Sample completions of prompts, whose shared prefixes are encoded once, as rows with
behaviour log-probabilities.
"""

EPILOG = """\
The prompt of a row is its tokens before the first one with loss. If no token or the
first token has loss, as in rows without a mask, it is the whole row. `espalier
prepare` makes such rows from chats. With --whole-rows it is always the whole row.

logprobs are those of the sampled tokens at --temperature over the whole vocabulary,
regardless of --top-k and --top-p; at temperature 0 they are those at temperature 1.
Rows have temperature, top_k and top_p where these are not 1, 0 and 1: training
computes log-probabilities at the temperature of the row.
The same command samples the same rows.
"""

OWN = ("samples", "max_new_tokens", "temperature", "top_k", "top_p", "prompt_logprobs", "seed", "whole_rows", "batch_size",
       "token_budget")  # fmt: skip
CHECKED = {"strategy": "partition", "token_budget": 4096}  # how log-probabilities are computed again


def parser():
    """All flags."""
    made = CommandParser("sample", DESCRIPTION, EPILOG)
    made.group(DATA)
    made.model()
    made.data()
    made.group("Sampling")
    for name, read in (("samples", whole(1)), ("max-new-tokens", whole(1)), ("temperature", real(0)), ("top-k", whole()),
                       ("top-p", real(0, 1))):  # fmt: skip
        made.option("sampling", name, read)
    made.flag("stop-id", "Token ids that end a completion, which keeps them. Without it: eos_token_id of "
                "generation_config.json, or else of config.json", "N", whole(most=(1 << 31) - 1), several=True)  # fmt: skip
    made.flag("ignore-stop-ids", "Do not stop at stop ids: always sample --max-new-tokens tokens")
    made.option("sampling", "whole-rows")
    made.option("sampling", "prompt-logprobs")
    made.flag("seed", "Random seed. Each completion has its own random stream, by the number of its prompt's row and its "
                "number among the completions", "N", whole(most=(1 << 64) - 1), default="0")  # fmt: skip
    made.group(OUTPUT)
    made.flag("out", "Rows to write: .jsonl (also .gz, .zst) or .safetensors", "FILE", letter="-o", path="file", required=True)
    made.flag("text", "Print the completions as text, using the model's tokenizer.json")
    made.flag("json", "Print JSON")
    made.flag("check", "Recompute the log-probabilities of the first N rows with the forward pass of training and print how "
                "much they differ (0: none)", "N", whole(), default="16")  # fmt: skip
    made.machine()
    made.option("sampling", "batch-size", whole(1))
    made.option("sampling", "token-budget", whole(1))
    made.others()
    return made


def _sampled(engine, given_rows, options, work):
    """The rows that `Engine.sample` makes, with progress."""
    tokens, most = 0, options.get("max_new_tokens", SamplingParams().max_new_tokens)
    with work.progress("sampling") as progress:

        def count(new):
            nonlocal tokens
            tokens += len(new)

        def tell(finished, completions):
            # Completions may end before they have all the tokens that they may have.
            progress.update(max(finished, tokens / most) / completions,
                            f"{finished:,} of {count_of(completions, 'completion')}, {count_of(tokens, 'token')}")  # fmt: skip

        return engine._sample(given_rows, None, options, tell, count)


def _new_tokens(rows, given_rows, arguments):
    """How many tokens of each row are sampled."""
    import numpy as np

    if arguments.whole_rows:
        return np.diff(rows.offsets) - np.repeat(np.diff(given_rows.offsets), arguments.samples or 1)
    return np.add.reduceat(rows.loss_weights > 0, rows.offsets[:-1], dtype=np.int64)


def _mismatch(engine, rows, new_tokens, count, work):
    """How the sampler's log-probabilities of the first rows differ from those of the forward pass of training."""
    import numpy as np

    from ..rows.files import trajectories

    offsets = rows.offsets[: count + 1]
    end = int(offsets[-1])
    columns = {} if rows.temperature is None else {"temperature": rows.temperature[:count]}
    first = trajectories({"offsets": offsets, "input_ids": rows.input_ids[:end], **columns})
    with work.progress("checking") as progress:
        computed = engine._distributions(first, progress=lambda done, total: progress.update(done / total, ""))[0]
    is_new = np.concatenate([np.arange(size) >= size - new for size, new in zip(np.diff(offsets), new_tokens, strict=False)])
    differences = np.abs(rows.logprobs[:end] - computed)[is_new]
    return {"rows": len(first), "tokens": len(differences), "largest": float(differences.max(initial=0)),
            "mean": float(differences.mean()) if len(differences) else 0.0}  # fmt: skip


def _texts(rows, new_tokens, vocabulary):
    """Names, numbers of tokens and texts of completions."""
    offsets, texts = vocabulary
    for row, (end, new) in enumerate(zip(rows.offsets[1:].tolist(), new_tokens.tolist(), strict=True)):
        ids = [id for id in rows.input_ids[end - new : end].tolist() if id < len(offsets) - 1]
        text = b"".join(texts[offsets[id] : offsets[id + 1]] for id in ids).decode(errors="replace")
        yield printable(rows.trajectory_id[row]), new, "\n".join(map(printable, text.split("\n")))


def work(arguments, process, group=None):
    """Raises InputError.

    Args:
        arguments: The values of flags.
        process: In which the work is done.
        group: The ranks that divide it. Default: this process alone.
    """
    from ..printed.rows import sample_text
    from ..vocabulary import token_bytes

    here, options = Work("sample", process, group), present_values(arguments, OWN)
    vocabulary = token_bytes(Path(arguments.model) / "tokenizer.json") if arguments.text else None
    here.check_file(arguments.out)  # to fail now rather than after hours
    engine = here.engine(arguments.model, {**CHECKED, **present_values(arguments, ("dtype", "device", "threads"))})
    given_rows = here.rows(arguments)
    stop_ids = [] if arguments.ignore_stop_ids else arguments.stop_id or engine._engine.stop_ids()
    if not stop_ids and not arguments.ignore_stop_ids:
        here.warn(f"{arguments.model}: has no end-of-text token: every completion has --max-new-tokens tokens")
    rows = _sampled(engine, given_rows, {**options, "stop_ids": stop_ids}, here)
    counts = dict(engine._engine.sampling_counts())  # of this rank
    new_tokens = _new_tokens(rows, given_rows, arguments)
    sampled_tokens, truncation = int(new_tokens.sum()), here.sum(counts["truncation"])
    if arguments.top_k or arguments.top_p not in (None, 1.0):
        here.warn(f"logprobs are those of all tokens, not of those that --top-k and --top-p leave, which are "
                  f"{truncation / max(1, sampled_tokens):.3g} nats higher on average")  # fmt: skip
    if here.tells:
        from ..rows.files import write

        write(arguments.out, rows)
    report = {"prompts": len(given_rows), "completions": len(rows),
              "stopped": sum(int(id) in stop_ids for id in rows.input_ids[rows.offsets[1:] - 1]),
              "flat_prompt_tokens": rows.num_tokens - sampled_tokens,
              "encoded_prompt_tokens": here.sum(counts["encoded_prompt_tokens"]), "sampled_tokens": sampled_tokens,
              **{name: counts[name] for name in ("decode_steps", "prompt_seconds", "decode_seconds")}}  # fmt: skip
    checked = min(16 if arguments.check is None else arguments.check, len(rows))
    if checked > 0:
        report["mismatch"] = _mismatch(engine, rows, new_tokens, checked, here)
    if arguments.json:
        here.print(json.dumps(report, indent=2) + "\n")
    else:
        texts = list(_texts(rows, new_tokens, vocabulary)) if vocabulary else []
        here.print(sample_text(report, printable(arguments.out), texts))


def parse(arguments):
    """The values of flags."""
    made = parser()
    values = made.parse(arguments)
    if values.text and values.json:
        made.error("--json: cannot be combined with --text")
    return values


def main(arguments):
    """Runs the command and returns its exit status."""
    return run_work("sample", parse, work, arguments)
