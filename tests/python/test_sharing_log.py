# SPDX-License-Identifier: Apache-2.0
"""What training shares, in the log of Transformers' Trainer and of users' own loops, and the warning where it is nothing."""

import copy
import warnings

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from espalier.errors import Unsupported
from espalier.hf import SharingCallback, SharingMeter, VerificationError, checked_patch, log_sharing, patch, sharing
from espalier.hf.patching import patch_of
from hf_models import make_model

PROMPT, ANSWERS = list(range(20)), 8


def rows_of(prompts=2):
    """ANSWERS rows for each prompt, one prompt after another."""
    return [[prompt + 1] + PROMPT + [40 + answer, 41] for prompt in range(prompts) for answer in range(ANSWERS)]


def collate(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


class Reporter(TrainerCallback):
    """As those of TensorBoard and Weights & Biases: called before the callbacks of the user."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **_):
        self.lines.append(dict(logs))


def make_trainer(folder, rows, size, callbacks=(), model=None, **more):
    settings = dict(output_dir=str(folder), per_device_train_batch_size=size, num_train_epochs=1, logging_steps=1,
                    report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)  # fmt: skip
    trainer = Trainer(patch(model or make_model("qwen3", torch.float32)), TrainingArguments(**settings | more),
                      train_dataset=[{"input_ids": row} for row in rows], data_collator=collate, eval_dataset=[
                          {"input_ids": row} for row in rows[:2]], callbacks=list(callbacks))  # fmt: skip
    trainer._get_train_sampler = lambda dataset=None: range(len(rows))
    return trainer


def lines_of(trainer):
    return [line for line in trainer.state.log_history if "loss" in line]


def test_lines_of_a_trainer(tmp_path):
    """Of the steps since the line before, without evaluation."""
    reporter = Reporter()
    trainer = make_trainer(tmp_path, rows_of(4), 4, logging_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.callback_handler.callbacks.insert(0, reporter)
    assert log_sharing(trainer) is log_sharing(trainer)
    trainer.train()
    flat, tree = 2 * 4 * 23, 2 * (21 + 4 * 2)
    expected = {"espalier/tokens": flat, "espalier/encoded_tokens": tree, "espalier/ratio": flat / tree}
    lines = lines_of(trainer)
    assert len(lines) == 4 and all(expected.items() <= line.items() for line in lines)
    assert [line for line in reporter.lines if "espalier/ratio" in line] == [
        {name: value for name, value in line.items() if name != "step"} for line in lines]  # fmt: skip
    assert not any("espalier/ratio" in line for line in trainer.state.log_history if "loss" not in line)


def test_as_one_of_the_callbacks(tmp_path):
    trainer = make_trainer(tmp_path, rows_of(2), 8, callbacks=[SharingCallback()])
    trainer.train()
    assert [line["espalier/ratio"] > 4 for line in lines_of(trainer)] == [True, True]
    assert patch_of(trainer.model.model).meter is None  # it does not count further


def interleaved(prompts=32):
    rows = rows_of(prompts)
    return [rows[place * ANSWERS + answer] for answer in range(2) for place in range(prompts)]


def trained_with_warnings(trainer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return [str(warning.message) for warning in caught if str(warning.message).startswith("espalier")]


@pytest.mark.parametrize("prompts", [32, 16])  # more micro-batches than are watched, and fewer
def test_rows_in_an_order_that_shares_nothing(tmp_path, prompts):
    trainer = make_trainer(tmp_path, interleaved(prompts), 4, callbacks=[SharingCallback()])
    said = trained_with_warnings(trainer)
    assert len(said) == 1
    assert "It is the order of the rows" in said[0] and "espalier.hf.group_sampler" in said[0]
    assert "share 1.8" in said[0] if prompts == 16 else True


def test_rows_that_have_nothing_in_common(tmp_path):
    rows = [[number, *PROMPT] for number in range(32)]
    said = trained_with_warnings(make_trainer(tmp_path, rows, 4, callbacks=[SharingCallback()]))
    assert len(said) == 1 and "The rows have no prefixes in common" in said[0]


def test_rows_that_share(tmp_path):
    assert trained_with_warnings(make_trainer(tmp_path, rows_of(16), 8, callbacks=[SharingCallback()])) == []


def test_generations_that_are_taken_apart():
    model = patch(make_model("qwen3", torch.float32))
    meter = SharingMeter(model, num_generations=8)
    with pytest.warns(UserWarning, match="The generations of a prompt are in different.*keep_groups=True.*num_generations=8"):
        for k in range(16):
            model(input_ids=torch.tensor(interleaved()[4 * k:4 * k + 4]))
    assert meter.metrics()["espalier/ratio"] == 1


def test_verification_of_the_first_batch(tmp_path, monkeypatch):
    """Which does not count."""
    trainer = make_trainer(tmp_path, rows_of(2), 8, callbacks=[SharingCallback(verify=True)])
    verified, verify = [], checked_patch.verify

    def watched(model, batch):
        verified.append(batch["input_ids"].shape)
        return verify(model, batch)

    monkeypatch.setattr(checked_patch, "verify", watched)
    trainer.train()
    assert verified == [(8, 23)]
    assert [line["espalier/tokens"] for line in lines_of(trainer)] == [8 * 23] * 2


def test_a_first_batch_that_is_wrong(tmp_path, monkeypatch):
    from espalier.hf import attention

    trainer = make_trainer(tmp_path, rows_of(2), 8, callbacks=[SharingCallback(verify=True)])
    right = attention._BY_BACKEND["espalier"]
    monkeypatch.setitem(attention._BY_BACKEND, "espalier", lambda *arguments: 1.01 * right(*arguments))
    with pytest.raises(VerificationError, match="expected errors of at most 2 times"):
        trainer.train()


def test_a_model_that_is_not_patched(tmp_path):
    from espalier.hf import unpatch

    trainer = make_trainer(tmp_path, rows_of(1), 8, callbacks=[SharingCallback()])
    unpatch(trainer.model)
    with pytest.raises(Unsupported, match="expected a patched model, received one that is not; call espalier.hf.patch"):
        trainer.train()


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    from accelerate.tracking import GeneralTracker

    class Tracker(GeneralTracker):
        name, requires_logging_directory, tracker = "memory", False, None

        def __init__(self):
            super().__init__()
            self.lines = []

        def store_init_configuration(self, values):
            pass

        def log(self, values, step, **_):
            self.lines.append((step, values))

    tracker = Tracker()
    accelerator = accelerate.Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("run")
    model = patch(make_model("qwen3", torch.float32))
    loader = torch.utils.data.DataLoader([{"input_ids": row} for row in rows_of(2)], 8, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), loader)
    meter = SharingMeter(model)
    assert meter.metrics() == {}
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(**batch)  # evaluation does not count
        accelerator.log({"loss": loss.item(), **meter.metrics()}, step=step)
    assert [line["espalier/tokens"] for _, line in tracker.lines] == [8 * 23] * 2
    assert [line["espalier/encoded_tokens"] for _, line in tracker.lines] == [21 + 16] * 2
    assert sharing(model).flat_tokens == 4 * 8 * 23
    accelerator.end_training()


def test_copies_do_not_count():
    model = patch(make_model("qwen3", torch.float32))
    meter, twin = SharingMeter(model), None
    twin = copy.deepcopy(model)
    twin(input_ids=torch.tensor(rows_of(1)))
    assert meter.metrics() == {} and patch_of(twin.model).meter is None
