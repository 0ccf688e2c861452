# SPDX-License-Identifier: Apache-2.0
"""The plugins for other trainers, against stand-ins of the interfaces that these document; with the packages themselves in
test_trainer_packages.py."""

import functools
import importlib
import importlib.util
import subprocess
import sys

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

from conftest import REPOSITORY
from espalier import hf
from espalier.errors import Unsupported
from hf_models import make_model

ROWS = [{"input_ids": [*range(20), 40 + answer, 41]} for answer in range(8)]


@pytest.fixture(autouse=True)
def trainer_as_it_was(monkeypatch):
    for name in ("train", "call_model_init"):
        monkeypatch.setattr(Trainer, name, getattr(Trainer, name))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes modules that can be imported for the time of a test: package({"a.b": source})."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def write(sources):
        for name, text in sources.items():
            path = tmp_path.joinpath(*name.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("axolotl", "verl") or name.startswith("espalier.plugins"):
            del sys.modules[name]


def make_trainer(folder, model=None):
    def collate(rows):
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids}

    settings = TrainingArguments(str(folder), per_device_train_batch_size=4, max_steps=5, logging_steps=1, report_to=[], use_cpu=True,
                                 save_strategy="no", disable_tqdm=True)  # fmt: skip
    return Trainer(model or make_model("qwen3"), settings, train_dataset=ROWS, data_collator=collate)


def norms(trainer):
    return [line["grad_norm"] for line in trainer.state.log_history if "loss" in line]


def trained(trainer):
    trainer.train()
    return norms(trainer)


AXOLOTL = """
class BasePlugin:
    def register(self, cfg): pass
    def get_input_args(self): pass
    def post_trainer_create(self, cfg, trainer): pass
    def post_train(self, cfg, model): pass
"""


def test_axolotl(package, tmp_path, capsys):
    """The manager imports the class by its name, merges its keys, and calls it after the trainer is made and after training."""
    pytest.importorskip("pydantic")
    package({"axolotl.integrations.base": AXOLOTL})
    home, _, name = "espalier.plugins.axolotl.EspalierPlugin".rpartition(".")
    plugin = getattr(importlib.import_module(home), name)()
    home, _, name = plugin.get_input_args().rpartition(".")
    keys = getattr(importlib.import_module(home), name)
    assert keys(espalier_check=True).model_dump()["espalier_check"] and set(keys.model_fields) == {
        f"espalier_{each}" for each in ("backend", "check", "skip_logits", "keep_groups")}  # fmt: skip
    theirs = trained(make_trainer(tmp_path))
    plugin.register({})
    trainer = make_trainer(tmp_path)
    plugin.post_trainer_create(keys(espalier_backend="sdpa").model_dump(), trainer)
    assert trained(trainer) == pytest.approx(theirs, rel=1e-6) and len(theirs) == 5
    plugin.post_train({}, trainer.model)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("espalier")]
    assert said == ["espalier: Trainer trains Qwen3Model on trees of tokens", "espalier: 5 batches, 440 tokens, 140 encoded: 3.14x"]


def imported_by_swift(path, name):
    """As ms-swift's import_external_file does it."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def test_swift(tmp_path, capsys):
    path = subprocess.run([sys.executable, "-m", "espalier.plugins.swift"], capture_output=True, text=True, check=True,
                          cwd=REPOSITORY / "python").stdout.strip()  # fmt: skip
    theirs = trained(make_trainer(tmp_path))
    for name in ("_swift_external_1", "_swift_external_2"):
        imported_by_swift(path, name)

    class Seq2SeqTrainer(transformers.Seq2SeqTrainer):  # as ms-swift's, which has its own train()
        def train(self, *args, **kwargs):
            return super().train(*args, **kwargs)

    plain = make_trainer(tmp_path)
    trainer = Seq2SeqTrainer(plain.model, transformers.Seq2SeqTrainingArguments(**plain.args.to_dict()), train_dataset=ROWS,
                             data_collator=plain.data_collator)  # fmt: skip
    assert trained(trainer) == pytest.approx(theirs, rel=1e-6)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("espalier")]
    assert said == ["espalier: Seq2SeqTrainer trains Qwen3Model on trees of tokens", "espalier: 5 batches, 440 tokens, 140 encoded: 3.14x"]


FACTORY = """
from functools import WRAPPER_ASSIGNMENTS, wraps

def get_custom_gradient_checkpointing_func(gradient_checkpointing_func):
    @wraps(gradient_checkpointing_func, assigned=WRAPPER_ASSIGNMENTS + ("__self__",))
    def custom_gradient_checkpointing_func(func, *args, **kwargs):
        args[0].requires_grad_(True)
        return gradient_checkpointing_func(func, *args, **kwargs)
    return custom_gradient_checkpointing_func
"""


SWIFT_CHECKPOINT = """
import functools

def always(checkpoint, use_reentrant_):
    @functools.wraps(checkpoint)
    def checkpoint_of_swift(*args, use_reentrant=None, **more):
        return checkpoint(*args, use_reentrant=use_reentrant_, **more)

    return checkpoint_of_swift
"""


def by_llama_factory(is_reentrant):
    """It wraps PyTorch's, with reentry by default and without it by use_reentrant_gc: false."""
    names = {"__name__": "llamafactory.model.model_utils.checkpointing"}
    exec(FACTORY, names)
    return names["get_custom_gradient_checkpointing_func"](functools.partial(checkpoint, use_reentrant=is_reentrant))


def by_swift(is_reentrant):
    """It replaces PyTorch's function, and sets use_reentrant whatever it is called with."""
    names = {"__name__": "swift.trainers.mixin"}
    exec(SWIFT_CHECKPOINT, names)
    return functools.partial(names["always"](checkpoint, is_reentrant), use_reentrant=not is_reentrant)


@pytest.mark.parametrize("function_of", [by_llama_factory, by_swift])
def test_checkpointing_of_trainers(function_of):
    def checkpointed(is_reentrant):
        model = make_model("qwen3")
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function_of(is_reentrant))
        return model

    with pytest.raises(Unsupported, match="expected use_reentrant=False, received True"):
        hf.patch(checkpointed(True))
    ids = torch.tensor([row["input_ids"] for row in ROWS])
    models = [checkpointed(False), hf.patch(checkpointed(False))]
    for model in models:
        model(input_ids=ids, labels=ids).loss.backward()
    for mine, theirs in zip(*(model.parameters() for model in models)):
        assert (mine.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()
    assert hf.sharing(models[1]).ratio > 3


VERL = """
def apply_monkey_patch(model, ulysses_sp_size=1, use_remove_padding=True, use_fused_kernels=False, fused_kernels_backend=None):
    model.by_verl = True
"""
ENGINE = "from verl.models.transformers.monkey_patch import apply_monkey_patch\n"


@pytest.mark.parametrize("is_loaded", [True, False])
def test_verl(package, is_loaded, capsys):
    """Whether the engine has imported apply_monkey_patch before the library or does so afterwards."""
    package({"verl.models.transformers.monkey_patch": VERL, "verl.engine": ENGINE, "verl.late": ENGINE})
    if is_loaded:
        importlib.import_module("verl.engine")
    importlib.import_module("espalier.plugins.verl")
    importlib.reload(sys.modules["espalier.plugins.verl"])
    for name in ("verl.engine", "verl.late"):
        model = make_model("qwen3")
        importlib.import_module(name).apply_monkey_patch(model=model, use_remove_padding=True, ulysses_sp_size=1)
        assert model.by_verl and hf.sharing(model).batches == 0
        with pytest.raises(SystemExit):
            importlib.import_module(name).apply_monkey_patch(make_model("qwen3"), 2)
    said = capsys.readouterr().err.splitlines()
    assert said == 2 * ["espalier: Qwen3ForCausalLM runs on trees of tokens",
                        "espalier: ulysses_sequence_parallel_size: expected 1, received 2: a rank sees parts of rows alone"]  # fmt: skip


def test_packed_rows_as_verl_has_them():
    """input_ids and position_ids [1, N] without a mask; logits are divided in place by the temperature."""
    model, other = make_model("qwen3"), hf.patch(make_model("qwen3"))
    ids = torch.tensor([sum((row["input_ids"] for row in ROWS), [])])
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in ROWS]).unsqueeze(0)
    found = []
    for each in (model, other):
        logits = each(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits.squeeze(0)
        logits.div_(0.7)
        logprobs = torch.log_softmax(logits.float(), -1).gather(1, torch.roll(ids, -1, 1).squeeze(0)[:, None])
        logprobs.sum().backward()
        found.append([parameter.grad for parameter in each.parameters()])
    for mine, theirs in zip(*found):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()  # RMSNorm rounds to float32
    assert hf.sharing(other).ratio > 3
    with pytest.raises(Unsupported, match="prefix_grouper"):
        other(input_ids=ids, position_ids=positions, prefix_grouper=object())
