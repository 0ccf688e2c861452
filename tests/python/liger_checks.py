# SPDX-License-Identifier: Apache-2.0
"""What is checked of patched models with Liger's kernels, which run in Triton's interpreter on a CPU.

    python liger_checks.py FOLDER     writes FOLDER/liger.json: {check: null, or its traceback}

ESPALIER_LIGER=all in the environment: more families, options, verify, Transformers' Trainer, and replaced classes.
"""

import copy
import functools
import importlib
import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
import liger_kernel.transformers
import liger_kernel.transformers.functional as functional
import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from trl.trainer import utils

import espalier
import espalier.trl
import test_trl
from espalier.hf import liger, patch, sharing, unpatch, verify


def on_cpus():
    """Makes the interpreter run Liger's kernels: floats are scalars of float32, as on a GPU; NumPy 2.4 makes integers of arrays
    without dimensions alone; libdevice has no interpreter."""
    implicit, patch_tensors = interpreter._implicit_cvt, interpreter._patch_lang_tensor

    def convert(argument):
        if not isinstance(argument, float):
            return implicit(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    def patched(tensor, scope, *more):
        patch_tensors(tensor, scope, *more)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    interpreter._implicit_cvt, interpreter._patch_lang_tensor = convert, patched
    for name in ("rms_norm", "layer_norm", "swiglu", "cross_entropy"):
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        if hasattr(module, "rsqrt"):
            module.rsqrt = lambda x: tl.math.rsqrt(x)  # noqa: PLW0108 (Triton adds an argument to its own functions)
        if hasattr(module, "tanh"):
            module.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


on_cpus()
apply_liger = liger_kernel.transformers._apply_liger_kernel_to_instance
FEW = {"rope": False, "rms_norm": False}  # kernels that take the interpreter longest, left out where others are meant

VOCABULARY = 61
MODEL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}  # fmt: skip
MOST = 2e-6  # relative, in float32
generator = torch.Generator().manual_seed(0)
TRUNK = torch.randint(1, VOCABULARY, (1, 4), generator=generator).expand(2, -1)
IDS = torch.cat([TRUNK, torch.randint(1, VOCABULARY, (2, 2), generator=generator)], 1)  # each token costs the interpreter seconds
NUM_ROWS, LENGTH = IDS.shape
UNLABELLED = 2  # first tokens of each row
LABELS = IDS.clone()
LABELS[:, :UNLABELLED] = -100
BATCH = {"input_ids": IDS, "labels": LABELS}
SHIFTED = nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
NUM_EDGES = len({tuple(row[:end]) for row in IDS.tolist() for end in range(UNLABELLED + 1, LENGTH + 1)})  # distinct


IS_WHOLE = os.environ.get("ESPALIER_LIGER") == "all"  # the long form
OPTIONS = [({"skip_logits": False}, True), ({"label_smoothing": 0.1}, False), ({"shift_labels": SHIFTED}, True)]  # (arguments, shared)
if IS_WHOLE:
    OPTIONS += [({"skip_logits": True}, True), ({"num_items_in_batch": 9}, True), ({"accum_dtype": torch.float32}, True),
                ({"return_token_accuracy": True}, False)]  # fmt: skip


def make(kind):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODEL)).train()


def results(model, **more):
    """Loss, and gradients by name."""
    model.zero_grad()
    output = model(**BATCH, **more)
    output.loss.backward()
    return output.loss.item(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_same(ours, theirs):
    assert abs(ours[0] - theirs[0]) <= MOST * abs(theirs[0]), (ours[0], theirs[0])
    everything = torch.stack([gradient.norm() for gradient in theirs[1].values()]).norm()
    for name, gradient in theirs[1].items():
        error = (ours[1][name] - gradient).norm() / max(gradient.norm(), 1e-2 * everything)
        assert error <= 4 * MOST, (name, error)


class Counts:
    """Inside, counts rows that Liger's fused loss computes, those that TRL's head computes, and pairs of a token and a label that
    ours computes, by patched models and by espalier.Step."""

    def __enter__(self):
        self.fused, self.of_trl, self.edges = [], [], []
        self.before = functional.liger_fused_linear_cross_entropy, utils._ChunkedLogProbFunction, espalier.ops.edge_logprobs

        def fused(hidden, *args, **kwargs):
            self.fused.append(len(hidden))
            return self.before[0](hidden, *args, **kwargs)

        fused.__signature__ = inspect.signature(self.before[0])

        def of_trl(hidden, *args):
            self.of_trl.append(len(hidden))
            return self.before[1].apply(hidden, *args)

        def edge_logprobs(hidden, weight, edge_row, *args, **kwargs):
            self.edges.append(len(edge_row))
            return self.before[2](hidden, weight, edge_row, *args, **kwargs)

        functional.liger_fused_linear_cross_entropy, espalier.ops.edge_logprobs = fused, edge_logprobs
        utils._ChunkedLogProbFunction = SimpleNamespace(apply=of_trl)
        return self

    def __exit__(self, *_):
        functional.liger_fused_linear_cross_entropy, utils._ChunkedLogProbFunction, espalier.ops.edge_logprobs = self.before


def results_of_step(model):
    """What `results` gives, by espalier.Step."""
    plan = espalier.plan(espalier.build(IDS.tolist()), token_budget=IDS.numel())
    model.zero_grad()
    step, total = espalier.Step(model, plan, loss_mask=(LABELS != -100).int().tolist()), 0.0
    for batch in step:
        loss = -step.logprobs(batch).sum() / step.num_terms
        step.backward(loss)
        total += loss.item()
    return total, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def the_two_patches_in_any_order(kind, **kernels):
    """kernels: as Liger takes them; each that is left out saves the interpreter time."""
    model = make(kind)
    theirs = copy.deepcopy(model)
    with_liger = functools.partial(apply_liger, **kernels)
    with_liger(theirs)
    expected = results(theirs)
    assert_same(expected, results(model))  # it is the loss of Transformers
    for is_liger_first in (True, False):
        ours = copy.deepcopy(model)
        for function in (with_liger, patch) if is_liger_first else (patch, with_liger):
            function(ours)
        if not is_liger_first:
            results(ours)  # the first batch still runs by Liger's forward
        with Counts() as counts:
            assert_same(results(ours), expected)
        assert (counts.fused, counts.edges) == ([], [NUM_EDGES]), (counts.fused, counts.edges)
        assert sharing(ours).ratio > 1.3
        with Counts() as counts:
            assert_same(results_of_step(ours), expected)
        assert (counts.fused, counts.edges) == ([], [NUM_EDGES]), (counts.fused, counts.edges)
        unpatch(ours)
        assert liger.is_fused(ours.forward)
        assert_same(results(ours), expected)


def llama():
    the_two_patches_in_any_order("llama", rope=IS_WHOLE)


def qwen3():
    the_two_patches_in_any_order("qwen3")


def qwen2():
    the_two_patches_in_any_order("qwen2")


def a_family_that_a_proof_decides_on():
    the_two_patches_in_any_order("olmo2", rms_norm=IS_WHOLE)


def options():
    """Those that change the loss, or return more, are Liger's alone; logits are those of all rows where they are wanted."""
    theirs = make("qwen3")
    ours = patch(copy.deepcopy(theirs))
    for model in (theirs, ours):
        apply_liger(model, **FEW)
    results(ours)
    plain = results(theirs)
    for more, is_shared in OPTIONS:
        expected = results(theirs, **more)
        with Counts() as counts:
            assert_same(results(ours, **more), expected)
        assert bool(counts.edges) == is_shared, more
        outputs = [model(**BATCH, **more) for model in (ours, theirs)]
        logits = [output.logits for output in outputs]
        assert (logits[0] is None) == (logits[1] is None) == (more.get("skip_logits") is not False)
        if logits[1] is not None:
            torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
        assert [output.token_accuracy for output in outputs].count(None) == (0 if "return_token_accuracy" in more else 2)
        if "label_smoothing" in more:  # the negative control of assert_same
            with pytest.raises(AssertionError):
                assert_same(expected, plain)
    for model in (theirs, ours):
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(**BATCH).logits, theirs(**BATCH).logits, rtol=1e-5, atol=1e-5)
        ids = [model.generate(IDS[:1], max_new_tokens=3, do_sample=False, pad_token_id=0) for model in (ours, theirs)]
        assert torch.equal(*ids)
        with pytest.raises(ValueError, match="skip_logits is True"):  # Liger's own
            ours(input_ids=IDS, skip_logits=True)


def it_is_verified():
    model = make("qwen3")
    apply_liger(model, rope=False)
    report = verify(model, BATCH)
    assert report.passed and report.no_float64, report


def trained(folder, when):
    """Losses and gradient norms of steps by Transformers' Trainer, and the Counts. when: "never", patched "before" the Trainer is
    made, or by espalier.trl.patch "after"."""
    model = make("qwen3")
    if when == "before":
        patch(model)
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=NUM_ROWS, max_steps=2, logging_steps=1, report_to=[],
                                  use_cpu=True, save_strategy="no", optim="sgd", learning_rate=0.05, seed=1, disable_tqdm=True,
                                  use_liger_kernel=True, liger_kernel_config=FEW)  # fmt: skip
    rows = [{name: value[number].tolist() for name, value in BATCH.items()} for number in range(NUM_ROWS)] * 3
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    if when == "after":
        espalier.trl.patch(trainer)
    with Counts() as counts:
        trainer.train()
    log = [record for record in trainer.state.log_history if "loss" in record]
    return [record[name] for record in log for name in ("loss", "grad_norm")], counts


def trainers(folder):
    expected, counts = trained(folder, "never")
    assert counts.fused == [NUM_ROWS * LENGTH] * 2 and not counts.edges
    for when in ("before", "after"):
        found, counts = trained(folder, when)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        assert counts.edges[-1] == NUM_EDGES and len(counts.fused) <= 1, (when, counts.fused, counts.edges)


def trainers_of_trl(folder):
    """Those of TRL keep their fused head, which runs on distinct tokens."""
    words = test_trl.small_words()
    for make_trainer in (test_trl.sft, test_trl.dpo, test_trl.grpo):

        def with_liger(model, words, settings, make_trainer=make_trainer):
            return make_trainer(model.float(), words, settings | {"use_liger_kernel": True, "liger_kernel_config": FEW})

        outcomes = []
        for change in (lambda trainer: trainer, espalier.trl.patch):
            with Counts() as counts:
                outcomes.append((test_trl.one_step(with_liger, words, folder, change), sum(counts.of_trl), counts.fused))
        (theirs, theirs_rows, _), (ours, ours_rows, _) = outcomes
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        assert not any(fused for *_, fused in outcomes) and 0 < ours_rows < 0.7 * theirs_rows, outcomes


def classes_are_replaced():
    """Last: it cannot be taken back."""
    model = make("qwen3")
    state = model.state_dict()
    expected = results(model)
    liger_kernel.transformers.apply_liger_kernel_to_qwen3()
    theirs = make("qwen3")
    theirs.load_state_dict(state)
    assert_same(results(theirs), expected)
    ours = patch(theirs)
    with Counts() as counts:
        assert_same(results(ours), expected)
    assert (counts.fused, counts.edges) == ([], [NUM_EDGES])


CHECKS = [llama, a_family_that_a_proof_decides_on, trainers_of_trl,
          *([options, it_is_verified, trainers, qwen3, qwen2, classes_are_replaced] if IS_WHOLE else [])]  # fmt: skip


def main(folder):
    torch.set_num_threads(1)
    said = {}
    for check in CHECKS:
        try:
            check(*([folder] if inspect.signature(check).parameters else []))
            said[check.__name__] = None
        except BaseException:
            said[check.__name__] = traceback.format_exc()
        Path(folder, "liger.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
