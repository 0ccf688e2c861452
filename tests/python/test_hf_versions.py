# SPDX-License-Identifier: Apache-2.0
"""Versions of Transformers that the package is not tested with, and layers that do not call what they called."""

import gc
import pickle
import subprocess
import sys

import pytest
import torch

import espalier
from espalier import kept
from espalier.errors import Unsupported
from espalier.hf import patch, patching, proof, verification, versions
from espalier.hf.families import FAMILIES, backbone_of, stock_class
from espalier.hf.small_copy import small_model
from hf_models import SINCE, VERSION, branching_rows, make_model, padded

KINDS = {"llama": "llama", "mistral": "mistral", "olmo3": "olmo3", "qwen2": "qwen2", "qwen3": "qwen3",
         "qwen3_moe": "qwen3_moe", "glm4_moe": "glm4_moe", "gpt_oss": "gpt_oss", "qwen3_next": "qwen3_next",
         "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe", "mamba2": "mamba2",
         "granitemoehybrid": "granitemoehybrid"}  # fmt: skip
PIN = f"; the tests cover Transformers {' and '.join(versions.TESTED)}: pip install 'transformers=={versions.TESTED[-1]}.*'"
HYBRIDS = [model_type for model_type, (_, mixer) in FAMILIES.items() if mixer]


def small_error(model_type):
    backbone = backbone_of(make_model(KINDS[model_type], torch.float32))
    return proof.error_of(small_model(stock_class(backbone), backbone.config), patching.attach_for_proof)[0]


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "_verdicts", {})


@pytest.fixture
def another_version(monkeypatch):
    monkeypatch.setattr(versions, "VERSION", "5.99.0")
    gc.collect()  # models of other tests
    assert not versions.is_tested()


@pytest.fixture
def stock_mixers(monkeypatch):
    """Layers call what they like."""
    monkeypatch.setattr(patching.Patch, "install_mixers", lambda *_: None)


def only_tested():
    if not versions.is_tested():
        pytest.skip(f"Transformers {versions.VERSION}: a proof decides for every family")


def test_the_installed_version_is_tested():
    assert KINDS.keys() == FAMILIES.keys()
    only_tested()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_small_models_are_exact(model_type):
    assert small_error(model_type) <= 1e-11


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_recurrences_that_run_through_the_preorder(model_type, stock_mixers, monkeypatch):
    """Negative control: without the count, numbers tell."""
    gc.collect()
    monkeypatch.setattr(patching, "check_followed", lambda *_: None)
    assert small_error(model_type) > 1e-2


def test_attention_that_sees_other_rows(monkeypatch):
    """Negative control."""
    init = patching.TreeRun.__init__

    def blind(run, *arguments):
        init(run, *arguments)
        run.subtree_end = torch.full_like(run.subtree_end, run.num_tokens)

    monkeypatch.setattr(patching.TreeRun, "__init__", blind)
    for model_type in FAMILIES.keys() - {"mamba2", *(name for name in SINCE if VERSION < SINCE[name])}:
        assert small_error(model_type) > 1e-3, model_type


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba2", "granitemoehybrid"])
def test_layers_that_call_something_else(kind, stock_mixers):
    only_tested()
    model = patch(make_model(kind, torch.float32))
    message = "recurrent layers: expected 2 calls of causal_conv1d_fn that follow the forest, received 0 with Transf"
    with pytest.raises(Unsupported, match=message):
        model(**padded(branching_rows()))
    plan = espalier.plan(espalier.build(branching_rows()), token_budget=200, strategy="tree-packing")
    step = espalier.Step(model, plan)
    with pytest.raises(Unsupported, match=message):
        for batch in step:
            step.logprobs(batch)


def forget():
    """As in another process, on another machine."""
    proof._verdicts.clear()
    for file in kept.folder("proofs").glob("*.json"):
        file.unlink()


def test_a_version_that_is_exact(another_version, monkeypatch):
    proven, error_of = [], proof.error_of
    monkeypatch.setattr(proof, "error_of", lambda *args: proven.append(error_of(*args)) or proven[-1])
    models = [make_model("qwen3_5", torch.float32) for _ in range(2)]
    with torch.inference_mode(), torch.device("meta"):
        patch(models[0])
    patch(models[1])
    assert len(proven) == 1 and proven[0][0] <= 1e-11
    forget()
    state = torch.get_rng_state()
    patch(models[0])
    assert torch.equal(torch.get_rng_state(), state) and len(proven) == 2
    forget()
    patch(make_model("qwen3_5", torch.float32), check=True)(**padded(branching_rows()))
    assert len(proven) == 2  # that batch has proven it


def test_a_version_that_is_wrong(another_version, stock_mixers):
    with pytest.raises(Unsupported) as refused:
        patch(make_model("qwen3_5", torch.float32))
    for part in ("expected a model for which trees are exact", "with Transformers 5.99.0", "small copy is refused: recurrent layers", "Qwen3_5TextModel"):
        assert part in str(refused.value)
    assert str(refused.value).endswith(PIN)
    model = make_model("qwen3_5", torch.float32)
    with pytest.raises(Unsupported, match="with Transformers 5.99.0"):
        espalier.Step(model, espalier.plan(espalier.build([[1, 2]]), token_budget=5, strategy="tree-packing"))
    assert not {"forward", "_espalier"} & model.model.__dict__.keys()
    patch(make_model("qwen3", torch.float32))(**padded(branching_rows()))


@pytest.mark.parametrize(("version", "ending"), [("5.99.0", PIN), (f"{versions.TESTED[0]}.1", "")])
def test_a_version_from_which_something_is_gone(version, ending):
    """Nothing can be imported; the message names a version with which it can."""
    code = ("import transformers; from transformers import modeling_layers; del modeling_layers.GradientCheckpointingLayer; import sys; "
            f"sys.modules['transformers'].__version__ = {version!r}; import espalier.hf")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "cannot import name 'GradientCheckpointingLayer'" in last and ("espalier.hf: expected" in last) == bool(ending)
    assert last.endswith(ending) or not ending


def test_numbers_that_are_wrong(another_version, stock_mixers, monkeypatch):
    monkeypatch.setattr(patching, "check_followed", lambda *_: None)
    with pytest.raises(Unsupported, match="a small copy is wrong on trees, by .*layers.0.linear_attn"):
        patch(make_model("qwen3_5", torch.float32))
    with pytest.raises(verification.VerificationError):
        patch(make_model("qwen3_5", torch.float32), check=True)(**padded(branching_rows()))


def test_models_of_other_processes(monkeypatch):
    data = pickle.dumps(patch(make_model("qwen3_5", torch.float32)))
    gc.collect()
    monkeypatch.setattr(versions, "VERSION", "5.99.0")
    monkeypatch.setattr(proof, "_verdicts", {})
    monkeypatch.setattr(proof, "error_of", lambda *_: (0.25, "norm.weight"))
    with pytest.raises(Unsupported, match="5.99.0, of which a small copy is wrong on trees, by 0.2.*none differs.*norm.weight"):
        pickle.loads(data)(**padded(branching_rows()))


def test_a_step_before_the_first_batch_is_checked():
    model = patch(make_model("qwen3", torch.float32), check=True)
    step = espalier.Step(model, espalier.plan(espalier.build([[1, 2]]), token_budget=5, strategy="tree-packing"))
    with pytest.raises(Unsupported, match="expected a first batch that has been verified"):
        next(iter(step))
    model(**padded(branching_rows()))
    for batch in step:
        step.backward(step.logprobs(batch).sum())
