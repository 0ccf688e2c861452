# SPDX-License-Identifier: Apache-2.0
"""Patched models that are copied, pickled and handed to other processes."""

import copy
import functools
import importlib
import io
import multiprocessing
import pickle

import pytest
import torch

from espalier.errors import Unsupported
from espalier.hf import patch, sharing, unpatch
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from espalier.hf.patching import patch_of
from hf_models import alone, branching_rows, make_model, padded, sums_of, worst_error

EXACT = 1e-12


@functools.cache
def expected(kind):
    return alone(make_model(kind), branching_rows())


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


COPIES = {"deepcopy": copy.deepcopy, "torch.save": saved, "pickle": pickled}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gpt_oss"])
def test_copies_are_patched(kind, how):
    """And stand alone: the first model may be unpatched, changed, or gone."""
    theirs, model = expected(kind), patch(make_model(kind))
    twin = COPIES[how](model)
    unpatch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    del model
    with InFloat64():
        assert worst_error(sums_of(twin, [padded(branching_rows())]), theirs) <= EXACT
    assert sharing(twin).batches == 1
    assert worst_error(alone(unpatch(twin), branching_rows()), theirs) == 0
    assert type(twin.config) is type(backbone_of(twin).config)


def test_routers_that_have_replayed():
    model, batch = patch(make_model("qwen3_moe", torch.float32)), padded(branching_rows())
    routes = torch.full((*batch["input_ids"].shape, 2, 3), -1)
    loss = model(**batch, routed_experts=routes).loss
    for how in COPIES.values():
        twin = how(model)
        assert torch.equal(twin(**batch, routed_experts=routes).loss, loss)
        unpatch(twin)
        assert not any(module._forward_hooks for module in twin.modules())


def test_a_check_that_is_still_to_come():
    """Copies check their own first batch."""
    for how in COPIES.values():
        model = patch(make_model("qwen3", torch.float32), check=True)
        twin = how(model)
        assert patch_of(backbone_of(twin)).unchecked() is twin and patch_of(backbone_of(model)).unchecked() is model
        twin(**padded(branching_rows()))
        assert patch_of(backbone_of(twin)).unchecked is None and patch_of(backbone_of(model)).unchecked is not None


def test_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(patch(make_model("qwen3", torch.float32)), peft.LoraConfig(target_modules=["q_proj"]))
    loss = model(**padded(branching_rows())).loss
    for how in COPIES.values():
        assert torch.equal(how(model)(**padded(branching_rows())).loss, loss)


def _loss_of(model, batch, answers):
    answers.put((model(**batch).loss.item(), sharing(model).batches))


def test_a_process_of_its_own():
    """As torch.multiprocessing and Ray start them."""
    model, batch = patch(make_model("qwen3_5", torch.float32)), padded(branching_rows())
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_loss_of, args=(model, batch, answers))
    process.start()
    loss, batches = answers.get(timeout=300)
    process.join()
    assert loss == pytest.approx(model(**batch).loss.item(), rel=1e-6) and batches == 1


def test_replicas_of_data_parallel(monkeypatch):
    """Its forward copies a model to GPUs; here the copies of tensors are left out, for which there would have to be
    some."""
    module = importlib.import_module("torch.nn.parallel.replicate")  # torch.nn.parallel has a function of this name
    monkeypatch.setattr(module, "_get_device_index", lambda device, _optional: device)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", lambda tensors, devices, detach=False: [tensors] * 2)
    model = make_model("qwen3", torch.float32)
    assert len(module.replicate(model, [0, 1])) == 2
    with pytest.raises(Unsupported, match="nn.DataParallel: expected a patched model on one GPU for each process"):
        module.replicate(patch(model), [0, 1])
    assert len(module.replicate(unpatch(model), [0, 1])) == 2
    with pytest.raises(Unsupported, match="nn.DataParallel: expected one process for each GPU.*give model.module"):
        patch(torch.nn.DataParallel(model))


def test_continuous_batching():
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    model, cache = patch(make_model("qwen3", torch.float32)).eval(), object.__new__(PagedAttentionCache)
    with torch.no_grad(), pytest.raises(Unsupported, match=r"continuous batching \(generate_batch\): expected an unpatch"):
        model(input_ids=torch.tensor([[5, 6]]), cache=cache, use_cache=False)


def test_a_config_made_by_the_class_of_a_view_is_none():
    """As Transformers before 5.10 make one to save a config."""
    model = make_model("qwen3", torch.float32)
    own = type(model.config)
    view = patch(model).model.config
    assert type(view) is not own and type(type(view)(vocab_size=7)) is own and type(view)(vocab_size=7).vocab_size == 7
    assert type(type(view).from_dict(view.to_dict())) is own
