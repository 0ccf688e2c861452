#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which causal language models of the installed Transformers train on trees: docs/families/VERSION.json.

    python scripts/families.py [TYPE ...] [--output FILE]
    python scripts/families.py --page        # docs/families.md anew, from the files that are there

Each model type is given to espalier.hf.patch as its default config has it, without weights, so that the proof decides: it is
"equal", or "refused" with the reason. Then, whatever the proof says, another random model of the type with other sizes, on
other rows, patched without the proof, is compared with itself unpatched, loss and gradients with the head: its error stands
beside. "different" is a type that the proof passes and the comparison does not; there must be none, and the exit code says so.
"""

import argparse
import json
import random
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import espalier.hf
from espalier.errors import InputError, Unsupported
from espalier.hf import patching
from espalier.hf.families import backbone_of, composite_of
from espalier.hf.float64 import InFloat64
from espalier.hf.small_copy import NotSmall, Scale, small_model

MOST = 1e-6  # relative error of a loss or gradient that is equal
OTHER = Scale(hidden=48, heads=6, head_dim=16, width=20, window=3)
OTHERS = {"mimo_v2_flash": replace(OTHER, heads=8)}  # layers with windows have twice as many key heads, four of these

ENCODERS = ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer",
            "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod")
HEAD = torch.randn(256, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))  # for models without one
# What default configs lack: a model cannot be made without, or has one kind of layer alone.
SETTINGS = {
    **{name: {"is_decoder": True} for name in ENCODERS},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2": {"layer_types": (["conv", "conv", "full_attention"] * 11)[:32]},
    "lfm2_moe": {"layer_types": (["conv", "conv", "full_attention"] * 11)[:32]},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}


def rows_of(rng):
    """Rows that branch at several depths, right after the beginning as well, repeat, and stand alone."""
    tokens = lambda count: [rng.randrange(5, 40) for _ in range(count)]
    trunk, stem = tokens(5), tokens(1)
    left = trunk + tokens(4)
    return [left + tokens(2), left + tokens(1), left + tokens(3), trunk + tokens(2), trunk + tokens(1), stem + tokens(1),
            stem + tokens(6), tokens(9), tokens(3), left]  # fmt: skip


def batch_of(rows):
    length = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, :len(row)], mask[number, :len(row)] = torch.tensor(row), 1
    return ids, mask


def loss_of(model, ids, mask=None):
    """The sum of -log p over all tokens but the first of each row."""
    more = {} if mask is None else {"attention_mask": mask}
    output = model(input_ids=ids, use_cache=False, **more)
    logits = output.logits if "logits" in output else output.last_hidden_state @ HEAD[:output.last_hidden_state.shape[-1]]
    logprobs = torch.log_softmax(logits[:, :-1].double(), -1)
    found = -logprobs.gather(2, ids[:, 1:, None]).squeeze(2)
    return (found if mask is None else found * mask[:, 1:]).sum()


def error_of(model, rng):
    """The largest relative error of the loss and of the gradient of a parameter."""
    rows = rows_of(rng)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with InFloat64():
        alone = sum(loss_of(model, torch.tensor([row])) for row in rows)
        theirs = torch.autograd.grad(alone, parameters, allow_unused=True)
        patching.attach_for_proof(backbone_of(model))
        together = loss_of(model, *batch_of(rows))
        ours = torch.autograd.grad(together, parameters, allow_unused=True)
    whole = torch.stack([gradient.norm() for gradient in theirs if gradient is not None]).norm()
    errors = [abs(together - alone) / abs(alone)]
    for mine, other in zip(ours, theirs):
        if mine is not None or other is not None:
            zero = torch.zeros_like(mine if other is None else other)
            mine, other = zero if mine is None else mine, zero if other is None else other
            errors.append((mine - other).norm() / other.norm().clamp(min=1e-2 * whole))
    worst = max(float(error) for error in errors)
    return worst if all(error == error for error in errors) else float("nan")


def one_line(failure):
    return " ".join(str(failure).split())[:300]


def default_model(config):
    """Without weights."""
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config)
        except AttributeError:  # older versions do not look for the part of a config that is for text
            return AutoModelForCausalLM.from_config(config.get_text_config())


def judged(model_type):
    """The record of a type."""
    try:
        model = default_model(CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {})))
    except Exception as failure:
        return {"verdict": "refused", "why": f"no model of the default config: {type(failure).__name__}: {one_line(failure)}"}
    began = time.perf_counter()
    try:
        espalier.hf.patch(model.eval())  # dropout is refused in training, whatever the model
        record = {"verdict": "equal"}
    except Unsupported as refusal:
        record = {"verdict": "refused", "why": one_line(refusal)}
    record["seconds"] = round(time.perf_counter() - began, 2)
    try:
        compared = model if composite_of(model) is None else backbone_of(model)
        other = small_model(type(compared), compared.config, OTHERS.get(model_type, OTHER), seed=5)
        record["error"] = float(f"{error_of(other, random.Random(3)):.1e}")
    except (InputError, NotSmall) as refusal:
        record["without_proof"] = one_line(refusal)
    except Exception as failure:
        record["without_proof"] = f"{type(failure).__name__}: {one_line(failure)}"
    if record["verdict"] == "equal" and not record.get("error", 1) <= MOST:
        record["verdict"] = "different" if "error" in record else "refused"
        record.setdefault("why", record.get("without_proof", "the comparison differs"))
    return record


FOLDER = Path("docs/families")
PAGE = """# Families of models

`espalier.hf.patch` takes a model if a [proof by a small copy](transformers.md#proof-of-the-family) finds trees exact for it. This is the
record of all causal language models of Transformers, by `scripts/families.py`: each type as its default config has it, and compared once
more beside the proof, as another random model with other sizes on other rows. Errors are relative, of losses and gradients in float64.

{counts}

A type that is refused may be taken with other options, and one that is equal be refused with others: the proof looks at the config of
your model. Reasons in full are in `docs/families/`.

| `model_type` | {heads} | refused by |
|---|{lines}---|
{rows}
"""


def page():
    """docs/families.md as the records have it."""
    records = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
    versions = sorted(records, key=lambda version: [int(part) for part in version.split(".")])
    counts = [f"- Transformers {version}: {records[version]['equal']} types equal, {records[version]['refused']} refused, "
              f"{records[version]['different']} silently different." for version in versions]
    rows = []
    for name in sorted({name for record in records.values() for name in record["types"]}):
        found = [records[version]["types"].get(name) for version in versions]
        cells = ["-" if entry is None else "equal" if entry["verdict"] == "equal" else "refused" for entry in found]
        last = next(entry for entry in reversed(found) if entry is not None)
        rows.append(f"| `{name}` | {' | '.join(cells)} | {short(last.get('why', ''))} |")
    return PAGE.format(counts="\n".join(counts), heads=" | ".join(versions), lines="---|" * len(versions), rows="\n".join(rows))


def short(why):
    """The reason in a few words."""
    if "the first layer whose output differs" in why:
        place = why.rpartition("differs: ")[2]
        return f"the gradient of `{place.rpartition(' ')[2]}`" if "none differs" in place else f"`{place}`"
    for part, words in (("rope_type", "rope by the length of the batch"),
                        ("received a forward without a forest", "attention that is not handed the forest"),
                        ("no model of the default config", "no model of the default config"),
                        ("expected the function", "functions that this version lacks"), ("follow the forest", "layers that call other functions"),
                        ("no small copy can be made", "no small copy can be made"), ("small copy fails", "a small copy fails")):
        if part in why:
            return words
    return why[:80].replace("|", "/")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", default=[])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if arguments.page:
        Path("docs/families.md").write_text(page())
        return 0
    logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    types = arguments.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    records = {}
    for model_type in types:
        records[model_type] = record = judged(model_type)
        print(f"{model_type:24} {record['verdict']:9} {record.get('error', ''):<8} {record.get('seconds', ''):<6} "
              f"{record.get('why', '')[:150]}", flush=True)
    counts = {verdict: sum(record["verdict"] == verdict for record in records.values())
              for verdict in ("equal", "refused", "different")}
    print(f"Transformers {transformers.__version__}: {counts}")
    output = arguments.output or (None if arguments.types else FOLDER / f"{transformers.__version__}.json")
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        whole = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], **counts, "types": records}
        output.write_text(json.dumps(whole, indent=1) + "\n")
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
