# SPDX-License-Identifier: Apache-2.0
"""Random changes of models by other people's code, each made to a model as it is and to a patched one.

A patched model has to give the numbers of the unpatched one, or refuse. `python tests/python/model_changes.py --cases 10000
--seed 1 --jobs 2` tries so many changes, prints a table by what is changed and how, and lists those where it does neither;
`--only "mlp/hook/17"` runs one of them.
"""

import argparse
import copy
import functools
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import conftest  # noqa: F401, finds the package
import espalier
from changed_functions import FUNCTIONS, draw_adapter, draw_attention, draw_function, draw_loss, draw_weights
from changed_modules import (ATTRIBUTES, HAVING, MODELS, MODULES, RECURRENT, WAYS, Change, Place, Redraw, base_of, by_attribute,
                             modules_of)  # fmt: skip
from espalier.errors import Unsupported
from espalier.hf import patching
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from hf_models import FORMS, make_model
from small_models import MORE_FAMILIES

EXACT = 1e-9
LEAKING = (*RECURRENT, "gpt_oss")  # where packed rows see each other in Transformers, so that each row alone is the truth
RATE = 0.01  # of the steps between batches
WEIGHTS_OF = ("projection", "linear of the mlp", "head", "embedding", "convolution")
PAIRS = [
    *[(kind, way) for kind in MODULES for way in WAYS if (kind, way) not in {("model", "wrapper"), ("rotary", "gradient hook")}],
    *[(kind, "attribute") for kind in ATTRIBUTES],
    *[(kind, "weights") for kind in WEIGHTS_OF],
    *[(name, "replaced") for name in FUNCTIONS],
    ("loss", "own"), ("attention function", "registered"), ("attention function", "overridden"),
    ("adapter", "lora"), ("adapter", "lora changed"), ("adapter", "any method"),
]  # fmt: skip
OF_LOSSES = ("model", "loss", "functional.cross_entropy", "fixed_cross_entropy", "ForCausalLMLoss", "load_balancing_loss_func")


@dataclass
class Case:
    """A change, and what is done with it.

    when     "before" patching, "after" it, or after a "step"
    removed  taken back after a step
    form     of batches: "equal" rows without a mask, padded on the "right" or "left", or "packed"
    reading  of logits: "alone", without labels; "with" the loss; or only read: "before" backward, "after" it, or "late", after
             the step
    """

    pair: tuple
    seed: int
    kind: str
    change: Change
    when: str
    removed: bool
    form: str
    reading: str
    positions: bool
    steps: int
    unpatched: bool
    draws: int
    rng: random.Random = field(repr=False, default=None)

    @property
    def name(self):
        return f"{'/'.join(self.pair)}/{self.seed}"

    def __str__(self):
        more = [self.form, f"logits {self.reading}", "positions" if self.positions else "", "removed" if self.removed else "",
                "unpatched at the end" if self.unpatched else ""]  # fmt: skip
        return f"{self.name}: {self.kind}, {self.change.text}, {self.when}, {', '.join(filter(None, more))}"


def drawn_change(pair, rng):
    """(models, change) of a pair."""
    what, how = pair
    if what in FUNCTIONS:
        return draw_function(what, rng)
    if what == "loss":
        return draw_loss(rng)
    if what == "attention function":
        return draw_attention(how, rng)
    if what == "adapter":
        return draw_adapter(how, rng)
    draw = {"attribute": by_attribute, "weights": draw_weights, **WAYS}[how]
    return HAVING.get(what, MODELS), draw(Place(what, rng), rng)


def draw_case(pair, seed, draws=0):
    rng = random.Random(f"{'/'.join(pair)}/{seed}/{draws}")
    models, change = drawn_change(pair, rng)
    kind = rng.choice(models)
    form = rng.choice(["equal", "right", "left", "packed"])
    said = lambda *words: any(word in change.text for word in words)
    of_the_batch = pair[0] in (*OF_LOSSES, "backbone", "head") or said("parameter hook", "accumulation hook")
    has_state = said("number of calls", "spectral norm")
    if (has_state and form in ("left", "packed")) or (of_the_batch and form == "packed" and kind in LEAKING):
        form = "right"  # rows alone say nothing
    removed = change.can_be_removed and rng.random() < 0.35
    when = rng.choice(["before", "before", "after", "step"])
    reading = rng.choice(["alone", "with", "before", "after", *([] if change.is_noise else ["late"])])
    return Case(pair, seed, kind, change, when, removed, form, reading, positions=rng.random() < 0.4, steps=rng.choice([1, 1, 2]),
                unpatched=rng.random() < 0.2, draws=draws, rng=rng)  # fmt: skip


# Models and batches


@functools.cache
def _pristine(kind):
    if kind in MORE_FAMILIES:
        config = dict(MORE_FAMILIES[kind])
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).double().train()
    return make_model(kind)


def new_model(case):
    model = copy.deepcopy(_pristine(case.kind))
    for name, value in case.change.settings.items():
        if name == "_attn_implementation":
            model.set_attn_implementation(value)
        else:
            setattr(model.config, name, value)
    return model


def draw_batch(case):
    """Rows with prefixes in common, of which the first two are equal."""
    rng = case.rng
    tokens = lambda n: [rng.randrange(61) for _ in range(n)]
    trunk = tokens(rng.randrange(4, 9))
    left, right = trunk + tokens(rng.randrange(1, 6)), trunk + tokens(rng.randrange(1, 6))
    longer, longest, apart = (tokens(rng.randrange(*sizes)) for sizes in ((1, 6), (1, 8), (2, 15)))
    rows = [left + longer, left + tokens(2), right + longest, apart]
    if case.form == "equal":
        length = min(map(len, rows[:3]))
        rows = [row[:length] for row in rows[:3]] + [tokens(length)]
    rows.insert(0, rows[0])
    torch.manual_seed(rng.randrange(2**31))
    batch = FORMS[case.form if case.form != "equal" else "right"](rows)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    if case.form == "equal":
        del batch["attention_mask"]
    if case.positions and case.form != "packed" and case.kind != "mamba2":
        batch["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if case.reading == "alone":
        del batch["labels"]
    return Batch({**batch, "use_cache": False}, mask, rows, rng.randrange(2**31))


@dataclass
class Batch:
    """Tensors of a batch; mask [B, S], where tokens are; the rows; a seed of all that is drawn while a model runs."""

    tensors: dict
    mask: torch.Tensor
    rows: list
    seed: int

    def rows_alone(self):
        """A batch of each row, without padding, and the places of its tokens in this one."""
        places, begin = self.mask.flatten().nonzero().flatten(), 0
        for row in self.rows:
            ids = torch.tensor([row])
            tensors = {"input_ids": ids, "use_cache": False}
            if "labels" in self.tensors:
                tensors["labels"] = ids.clone()
                tensors["labels"][:, 0] = -100
            yield Batch(tensors, torch.ones_like(ids, dtype=torch.bool), [row], self.seed), places[begin:begin + len(row)]
            begin += len(row)


@dataclass
class Numbers:
    """What a step gives: loss, logits [N, V] of the tokens, and gradients by name; output is that of the model."""

    loss: torch.Tensor
    logits: torch.Tensor | None
    gradients: dict
    output: object = None

    def read(self, batch):
        if self.logits is None:
            self.logits = self.output.logits[batch.mask].detach()


def _weights(batch, places=None):
    generator = torch.Generator().manual_seed(batch.seed)
    weights = torch.randn(batch.mask.numel(), 61, dtype=torch.float64, generator=generator)
    return weights[batch.mask.flatten() if places is None else places]


def step(model, batch, reading, weights=None):
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(batch.seed)
    weights = _weights(batch) if weights is None else weights
    with InFloat64():
        output = model(**batch.tensors)
        logits = None
        if reading in ("alone", "with", "before"):
            logits = output.logits[batch.mask]
        if reading == "alone":
            loss = (logits * weights).sum()
        else:
            loss = output.loss + (0.05 * (logits * weights).sum() if reading == "with" else 0)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        numbers = Numbers(loss.detach(), None if logits is None else logits.detach(), gradients, output)
        if reading == "after":
            numbers.read(batch)
    return numbers


def step_alone(model, batch, reading):
    """The same of each row as its own batch."""
    labels = sum(len(row) - 1 for row in batch.rows)
    losses, logits, sums = [], [], {}
    for each, places in batch.rows_alone():
        share = (len(each.rows[0]) - 1) / labels if "labels" in batch.tensors else 1
        if share == 0:
            continue
        found = step(model, each, reading, _weights(batch, places) / (share if reading == "with" else 1))
        found.read(each)
        losses.append(share * found.loss)
        logits.append(found.logits)
        for name, gradient in found.gradients.items():
            if gradient is not None:
                sums[name] = sums.get(name, 0) + share * gradient
    return Numbers(sum(losses), torch.cat(logits), {name: sums.get(name) for name in dict(model.named_parameters())})


def apart(ours, theirs):
    """(error, what) of the worst of a loss, logits and gradients, relative."""

    def relative(x, y, least=0.0):
        if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
            return 0.0 if torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) else float("inf")
        return ((x - y).norm() / max(y.norm(), least, 1e-30)).item()

    found = [(relative(ours.loss, theirs.loss, 1e-3), "loss")]
    if ours.logits is not None:
        if ours.logits.shape != theirs.logits.shape:
            return float("inf"), f"logits {list(ours.logits.shape)} for {list(theirs.logits.shape)}"
        found.append((relative(ours.logits, theirs.logits), "logits"))
    present = {name: gradient for name, gradient in theirs.gradients.items() if gradient is not None}
    everything = torch.stack([gradient.norm() for gradient in present.values()] or [torch.zeros(())]).norm().item()
    for name, parameter in ours.gradients.items():
        other, mine = theirs.gradients.get(name), parameter
        if other is None and mine is None:
            continue
        zeros = torch.zeros_like(mine if other is None else other)
        pair = (zeros if mine is None else mine, zeros if other is None else other)
        found.append((relative(*pair, 1e-2 * everything), f"gradient of {name}"))
    return max(found)


# Judging a case


@dataclass
class Result:
    """status: shared, alone, unshared, refused or wrong; faults: what is wrong; text: of the refusal."""

    pair: tuple
    name: str
    text: str
    is_exact: bool
    status: str = ""
    faults: list = field(default_factory=list)
    message: str = ""
    is_named: bool = True
    is_quiet: bool = False  # not shared, and no warning says so
    seconds: float = 0.0


class Trial:
    """A model as it is, and one that is patched, both changed."""

    def __init__(self, case, sabotage=None):
        self.case, self.change, self.sabotage = case, case.change, sabotage
        self.theirs, self.ours = new_model(case), new_model(case)
        self.result = Result(case.pair, case.name, str(case), case.change.is_exact)
        self.is_patched, self.undo, self.backbone, self.refusal = False, [], None, ""

    def fault(self, phase, text):
        self.result.faults.append(f"{phase}: {text}")

    def patch(self, phase, must=False):
        try:
            espalier.hf.patch(self.ours)
            self.is_patched, self.refusal = True, ""
            self.backbone = backbone_of(self.ours)
        except Unsupported as refusal:
            self.refusal = str(refusal)
            if must:
                self.fault(phase, f"patch refuses: {refusal}")
        except Exception as error:
            self.refusal = "another error"
            self.fault(phase, f"patch raises {type(error).__name__}: {error}")

    def install(self):
        try:
            if self.change.wrap is not None:
                self.theirs, self.ours = map(self.change.wrap, (self.theirs, self.ours))
            alone = self.change.is_global or self.sabotage == "the patched model alone"
            self.undo = [self.change.install(model) for model in ([self.ours] if alone else [self.theirs, self.ours])]
        except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as error:
            raise Redraw(f"{type(error).__name__}: {error}") from error

    def remove(self):
        while self.undo:
            self.undo.pop()()

    def tokens(self):
        if not self.is_patched:
            return 0, 0
        found = espalier.hf.sharing(self.backbone)
        return found.flat_tokens, found.tree_tokens

    def phase(self, name, must_share=False):
        """Runs a batch through both; returns the status."""
        case, batch = self.case, draw_batch(self.case)
        alone = None
        try:
            if (case.kind in LEAKING and case.form == "packed") or (case.form == "left" and not case.positions):
                alone = step_alone(self.theirs, batch, case.reading)
            theirs = step(self.theirs, batch, case.reading)
            if not torch.isfinite(theirs.loss):
                raise Redraw("the loss is not finite")
        except Redraw:
            raise
        except Exception as error:
            raise Redraw(f"unpatched: {type(error).__name__}: {error}") from error
        before = self.tokens()
        try:
            ours = step(self.ours, batch, case.reading)
            self.update(theirs)
            theirs.read(batch)
            self.read_late(ours, batch)
        except Unsupported as refusal:
            if not self.is_patched:
                self.fault(name, f"refused by patch, and raises afterwards: {refusal}")
            self.refusal = str(refusal)
            self.forget()
            return self.judged(name, "refused", must_share)
        except Exception as error:
            self.fault(name, f"raises {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return "wrong"
        self.refusal = self.refusal if not self.is_patched else ""
        flat, tree = (after - number for after, number in zip(self.tokens(), before))
        status = "shared" if tree < flat else "unshared"
        truths = {"": theirs}
        if alone is not None and self.is_patched:
            truths = {"alone": alone} if case.form == "packed" else {"": theirs, "alone": alone}
        errors = {key: apart(ours, truth) for key, truth in truths.items()}
        key = min(errors, key=lambda key: errors[key][0])
        if not errors[key][0] <= EXACT:
            if self.is_excused(status, ours, theirs, batch):
                return self.judged(name, status if self.is_patched else "refused", must_share)
            self.fault(name, f"{status}: error {errors[key][0]:.1e} of the {errors[key][1]}"
                             + ("" if self.is_patched else " of a model that is not patched"))  # fmt: skip
            return "wrong"
        if not self.is_patched:
            status = "refused"
        return self.judged(name, status, must_share)

    @staticmethod
    def read_late(ours, batch):
        """Logits that are read after a step of the weights may be refused."""
        try:
            with InFloat64():
                ours.read(batch)
        except Unsupported:
            ours.logits = None

    def judged(self, name, status, must_share):
        if must_share and status != "shared":
            self.fault(name, f"expected to be shared, received {status} {self.refusal}")
        return status

    def is_excused(self, status, ours, theirs, batch):
        """Whether numbers may differ: code that counts its calls may have been tried before; and where tokens have noise of their
        own, equal rows differ, as unpatched."""
        if "number of calls" in self.change.text and status == "unshared":
            return True
        if not self.change.is_noise or ours.logits is None:
            return self.change.is_noise and status == "unshared"
        size = len(batch.rows[0])

        def differ(logits):
            return ((logits[:size] - logits[size:2 * size]).abs().max() > 1e-9).item()

        return differ(ours.logits) == differ(theirs.logits)

    def update(self, theirs):
        """The same step of both models, with clipped gradients."""
        present = {name: gradient for name, gradient in theirs.gradients.items() if gradient is not None}
        rate = RATE / max(1.0, torch.stack([gradient.norm() for gradient in present.values()]).norm().item())
        with torch.no_grad():
            for model in (self.theirs, self.ours):
                for name, parameter in model.named_parameters():
                    if name in present:
                        parameter.sub_(rate * present[name])

    def forget(self):
        """Takes back what a forward pass of the unpatched model alone has changed of its weights."""
        with torch.no_grad():
            for theirs, ours in zip(self.theirs.parameters(), self.ours.parameters(), strict=True):
                theirs.copy_(ours)


def judge(case, sabotage=None):
    """The Result of a case. Raises Redraw where it says nothing."""
    begin, trial = time.perf_counter(), Trial(case, sabotage)
    with ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stack.callback(trial.remove)
        words = words_of(case, trial)
        if case.when == "before":
            trial.install()
            trial.patch("changed")
        else:
            trial.patch("unchanged", must=True)
            if case.when == "step":
                trial.phase("unchanged", must_share=True)
            trial.install()
        refused_by_patch = trial.refusal
        result = trial.result
        if sabotage == "attention":
            stack.enter_context(sabotaged_attention())
        statuses = [trial.phase("changed") for _ in range(case.steps)]
        result.status = "wrong" if result.faults or "wrong" in statuses else statuses[-1]
        result.message = refused_by_patch or trial.refusal
        result.is_named = result.status != "refused" or any(word in result.message.lower() for word in words)
        result.is_quiet = result.status == "unshared" and not any("espalier" in str(each.message) for each in caught)
        if case.removed:
            after_removal(trial)
        if case.unpatched and trial.is_patched:
            try:
                espalier.hf.unpatch(trial.ours)
                trial.is_patched, trial.refusal = False, ""
                trial.phase("unpatched")
            except Unsupported:
                pass
    if result.faults:
        result.status = "wrong"
    result.seconds = time.perf_counter() - begin
    return result


def after_removal(trial):
    """The next batch after a change is taken back."""
    if trial.case.when == "before" and trial.case.pair[0] in ("backbone", "model") and trial.is_patched:
        espalier.hf.unpatch(trial.ours)  # forwards of both stand in the same place
        trial.is_patched = False
    trial.remove()
    trial.refusal = ""
    if not trial.is_patched:
        trial.patch("removed", must=True)
    if trial.is_patched:
        trial.phase("removed", must_share=True)


def words_of(case, trial):
    """Some of which stand in the message of a refusal: names of what is changed."""
    what, _ = case.pair
    words = [what.lower(), case.change.text.split(" ")[0].split(",")[0].lower()]
    if what in MODULES:
        for module in modules_of(trial.ours, what):
            name = next(name for name, each in base_of(trial.ours).named_modules() if each is module)
            words += [type(module).__name__.lower(), *([name.lower(), name.rpartition(".")[2].lower()] if name else [])]
    return [word for word in words if word]


class sabotaged_attention:
    """Inside, tokens of patched models see other branches."""

    def __enter__(self):
        self.stock = stock = patching.TreeRun.__init__

        def init(run, *arguments):
            stock(run, *arguments)
            run.subtree_end = torch.full_like(run.subtree_end, run.num_tokens)

        patching.TreeRun.__init__ = init

    def __exit__(self, *_):
        patching.TreeRun.__init__ = self.stock


def result_of(pair, seed, sabotage=None):
    """The Result of the case of a pair and a seed, drawn anew where it says nothing."""
    for draws in range(30):
        try:
            return judge(draw_case(pair, seed, draws), sabotage)
        except Redraw:
            continue
        except Exception as error:
            case = draw_case(pair, seed, draws)
            return Result(pair, case.name, str(case), False, "wrong", [f"the test itself: {type(error).__name__}: {error}"])
    return None


# The command


def table(results):
    """Lines by what is changed and how: numbers of cases."""
    counts = defaultdict(Counter)
    for result in results:
        found = counts[result.pair]
        found[result.status] += 1
        found["unnamed"] += not result.is_named
        found["quiet"] += result.is_quiet
        found["lost"] += result.is_exact and result.status in ("unshared", "refused")
    names = ("shared", "unshared", "refused", "wrong", "quiet", "unnamed", "lost")
    lines = [f"{'changed':30} {'how':15}" + "".join(f"{name:>9}" for name in names)]
    total = Counter()
    for pair in sorted(counts, key=PAIRS.index):
        total += counts[pair]
        lines.append(f"{pair[0]:30} {pair[1]:15}" + "".join(f"{counts[pair][name] or '.':>9}" for name in names))
    lines.append(f"{'all':46}" + "".join(f"{total[name]:>9}" for name in names))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", action="append", help="a case, or pairs by a pattern: 'mlp/hook/17', 'mlp/.*'")
    parser.add_argument("--refusals", action="store_true", help="list refusals with their messages, too")
    arguments = parser.parse_args()
    jobs = jobs_of(arguments)
    results, begin, said = [], time.perf_counter(), time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache, spawn.Pool(arguments.jobs, prepare_process, (cache,)) as pool:
        for result in filter(None, pool.imap_unordered(result_of_job, jobs, chunksize=4)):
            results.append(result)
            show(result, arguments.refusals, len(jobs) < 50)
            if time.perf_counter() - said > 30:
                said = time.perf_counter()
                print(f"{len(results)} of {len(jobs)} cases, {said - begin:.0f} s", file=sys.stderr, flush=True)
    print(table(results))
    wrong = sum(bool(result.faults) for result in results)
    print(f"{len(results)} cases, {wrong} wrong, {time.perf_counter() - begin:.0f} s")
    return int(wrong > 0)


def jobs_of(arguments):
    """(pair, seed) of each case to be tried."""
    if arguments.only and all(re.fullmatch(r".*/\d+", name) for name in arguments.only):
        return [(tuple(name.split("/")[:2]), int(name.split("/")[2])) for name in arguments.only]
    pairs = [pair for pair in PAIRS if any(re.fullmatch(name, "/".join(pair)) for name in arguments.only or [".*"])]
    return [(pairs[number % len(pairs)], arguments.seed * 1_000_000 + number // len(pairs)) for number in range(arguments.cases)]


def show(result, refusals, everything):
    if result.faults:
        print(f"WRONG {result.text}\n      " + "\n      ".join(result.faults), flush=True)
    elif everything or result.is_quiet or (refusals and result.status == "refused"):
        print(f"{result.status} {result.text}\n      {result.message}", flush=True)


def prepare_process(cache):
    os.environ["XDG_CACHE_HOME"] = cache
    torch.set_num_threads(1)


def result_of_job(job):
    return result_of(*job)


if __name__ == "__main__":
    sys.exit(main())
