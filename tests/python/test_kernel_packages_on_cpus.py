# SPDX-License-Identifier: Apache-2.0
"""Models on a CPU beside libraries of kernels for GPUs: what a patched model needs none of works, and all else names the layer and the
library. Stand-ins fail as kernels of Triton do without a GPU; Liger is the real one, where it is installed."""

import contextlib
import copy
import importlib
import os
import subprocess
import sys
import textwrap
import types

import peft
import pytest
import torch
from transformers import Trainer, TrainingArguments

import espalier
from conftest import REPOSITORY
from espalier.errors import Unsupported
from espalier.hf import patch, plain_layers, proof, sharing, tokenwise, verification, verify, verdicts
from espalier.hf.gpu_kernels import naming_layers, what_needs_a_gpu
from espalier.hf.small_copy import NotSmall
from hf_models import branching_rows, make_model, padded, sums_of, worst_error
from wrappers import path_with

NO_GPU = "0 active drivers ([]). There should only be one."
SAID = r"runs kernels of {}, which fail on a CPU \(RuntimeError: 0 active drivers .*\); move the model to a GPU, or run it without them"
# kind -> functions that libraries have, where Transformers has a choice, and the first layer that calls one
RECURRENT = {
    "qwen3_5": ({"torch_chunk_gated_delta_rule": "fla"}, r"layers\.0\.linear_attn \(Qwen3_5GatedDeltaNet\)"),
    "mamba2": ({"mamba2_chunk_scan": "mamba_ssm", "mamba2_split_conv1d_scan_combined": "mamba_ssm"}, r"layers\.0\.mixer \(Mamba2Mixer\)"),
    "granitemoehybrid-dense": ({"causal_conv1d_fn": "causal_conv1d"}, r"layers\.\d\.mamba \(GraniteMoeHybridMambaLayer\)"),
}  # fmt: skip


def library(name, body=f"raise RuntimeError({NO_GPU!r})"):
    """A module of this name whose function `kernel` has this body."""
    module = types.ModuleType(name)
    exec(f"def kernel(*args, **kwargs):\n    {body}", vars(module))
    return module


def install(monkeypatch, model, functions):
    """Makes functions of the module of a model those of libraries, as Transformers does where these are installed."""
    module = sys.modules[type(model).__module__]
    for name, package in functions.items():
        function = getattr(module, name)
        while function is not None and not function.__code__.co_qualname.startswith(plain_layers._CHOOSER):
            function = getattr(function, "__wrapped__", None)
        if function is None:
            pytest.skip("this version of Transformers chooses in another way")
        cells = dict(zip(function.__code__.co_freevars, function.__closure__))
        monkeypatch.setattr(cells["implementation"], "cell_contents", library(package).kernel)
        monkeypatch.setattr(cells["applicable_params"], "cell_contents", ("args", "kwargs"))


@pytest.fixture(params=RECURRENT)
def recurrent(request, monkeypatch):
    """(model that fails unpatched, its batch, what it gives where no library is installed, what to say of it)."""
    model, batch = make_model(request.param, torch.float32), padded(branching_rows())
    functions, layer = RECURRENT[request.param]
    expected = sums_of(model, rows_of(batch))
    install(monkeypatch, model, functions)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(**batch)
    return model, batch, expected, f"{layer} {SAID.format(next(iter(functions.values())))}"


def rows_of(batch):
    """Each row of a padded batch as a batch of its own."""
    lengths = batch["attention_mask"].sum(1).tolist()
    return [{"input_ids": ids[:length].unsqueeze(0), "labels": ids[:length].unsqueeze(0)}
            for ids, length in zip(batch["input_ids"], lengths)]  # fmt: skip


def without_plain_layers(monkeypatch, module):
    monkeypatch.setattr(module, "by_torch_on_cpus", lambda _device: contextlib.nullcontext())


def test_recurrent_layers(recurrent):
    model, batch, expected, _ = recurrent
    assert worst_error(sums_of(patch(model), [batch]), expected) < 1e-5
    assert sharing(model).ratio > 1.5


def test_verify(recurrent, monkeypatch):
    """With a negative control: a comparison with layers as they are."""
    model, batch, _, said = recurrent
    for patched in (model, patch(copy.deepcopy(model))):
        report = verify(patched, batch)
        assert report.passed and report.no_float64 is None, report
    patch(model, check=True)(**batch).loss.backward()
    without_plain_layers(monkeypatch, verification)
    with pytest.raises(Unsupported, match=f"espalier.hf.verify: .*{said}") as raised:
        verify(model, batch)
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("recurrent", ["qwen3_5"], indirect=True)
def test_a_trainer_that_checks(recurrent, tmp_path):
    model, batch, *_ = recurrent
    settings = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, max_steps=2, report_to=[], use_cpu=True,
                                 save_strategy="no", logging_steps=1, disable_tqdm=True)  # fmt: skip
    rows = [{name: value[number] for name, value in batch.items()} for number in range(len(batch["input_ids"]))]
    trainer = Trainer(patch(model, check=True), settings, train_dataset=rows)
    trainer.train()
    assert [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_steps(recurrent):
    model, batch, expected, _ = recurrent
    step = espalier.Step(model, espalier.plan(espalier.build([row["input_ids"][0].tolist() for row in rows_of(batch)]),
                                              token_budget=24, strategy="partition"))  # fmt: skip
    total = 0.0
    for micro_batch in step:
        loss = -step.logprobs(micro_batch).sum()
        step.backward(loss)
        total += loss.item()
    assert worst_error((total, {name: each.grad for name, each in model.named_parameters()}), expected) < 1e-5


@pytest.mark.parametrize("recurrent", ["qwen3_5"], indirect=True)  # PEFT takes no adapters of convolutions
def test_adapters(recurrent, monkeypatch):
    """Their layers are tested while the model runs unpatched. With a negative control: layers as they are."""
    model, batch, _, said = recurrent
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["in_proj_qkv"], init_lora_weights=False))
    with monkeypatch.context() as control:
        without_plain_layers(control, tokenwise)
        with pytest.raises(Unsupported, match=f"espalier.hf.patch: .*{said}"):
            patch(copy.deepcopy(model))(**batch)
    patch(model)(**batch).loss.backward()
    assert verify(model, batch).passed


def test_proofs(recurrent, monkeypatch):
    """By a small copy, and where there is none on the model itself. With a negative control: layers as they are."""
    model, batch, expected, said = recurrent
    monkeypatch.setattr(proof, "is_known", lambda _backbone: False)
    monkeypatch.setattr(proof, "_verdicts", {})
    assert worst_error(sums_of(patch(copy.deepcopy(model)), [batch]), expected) < 1e-5

    def none(*_args, **_kwargs):
        raise NotSmall("for this test")

    monkeypatch.setattr(proof, "_verdicts", {})
    monkeypatch.setattr(verdicts, "read", lambda _key: None)
    monkeypatch.setattr(proof, "small_model", none)
    model = model.bfloat16()
    with pytest.warns(UserWarning, match="is proven on the model itself in bfloat16"):
        patch(copy.deepcopy(model))
    without_plain_layers(monkeypatch, proof)
    with pytest.raises(Unsupported, match=f"^espalier.hf.patch: {said}"):
        patch(model)


# Libraries that replace code of a model, as Liger does.

REPLACED = {
    "input norm": (lambda model: model.model.layers[1].input_layernorm, r"layers\.1\.input_layernorm \(Qwen3RMSNorm\)"),
    "mlp": (lambda model: model.model.layers[0].mlp, r"layers\.0\.mlp \(Qwen3MLP\)"),
    "attention": (lambda model: model.model.layers[0].self_attn, r"layers\.0\.self_attn \(Qwen3Attention\)"),
}


def replace(module, kernels):
    """Lets a module compute by a library, which hands over to what it replaces where there is a GPU."""
    stock = type(module).forward
    kernels.stock = stock
    exec("def forward(self, *args, **kwargs):\n    kernel()\n    return stock(self, *args, **kwargs)", vars(kernels))
    module.forward = types.MethodType(kernels.forward, module)


@pytest.mark.parametrize("what", REPLACED)
def test_replaced_code(what, monkeypatch):
    """Refused by name, wherever it is met first; nothing is kept of it. With a negative control: kernels that run."""
    place, layer = REPLACED[what]
    kept = []
    monkeypatch.setattr(verdicts.kept, "write", lambda *values: kept.append(values))
    monkeypatch.setattr(proof, "_verdicts", {})
    batch = padded(branching_rows())
    model, later, plain = (make_model("qwen3", torch.float32) for _ in range(3))
    replace(place(model), library("speedy_kernels"))
    said = f"^espalier.hf.patch: {layer} {SAID.format('speedy_kernels')}"
    for act in (lambda: patch(copy.deepcopy(model))(**batch), lambda: verify(model, batch),
                lambda: patch(copy.deepcopy(model), check=True)(**batch)):  # fmt: skip
        with pytest.raises(Unsupported, match=said) as raised:
            act()
        assert raised.value.__suppress_context__
    replace(place(patch(later)), library("speedy_kernels"))
    with pytest.raises(Unsupported, match=said):
        later(**batch)
    assert not kept and not proof._verdicts
    replace(place(model), library("speedy_kernels", "return None"))
    assert worst_error(sums_of(patch(model), [batch]), sums_of(plain, rows_of(batch))) < 1e-5
    assert sharing(model).ratio > 1.5


def test_a_fault_of_the_code_is_kept(monkeypatch):
    """The negative control of what is not kept: attention that looks at the length of its batch."""
    kept, batch = [], padded(branching_rows())
    monkeypatch.setattr(verdicts.kept, "write", lambda *values: kept.append(values))
    monkeypatch.setattr(proof, "_verdicts", {})
    model = make_model("qwen3", torch.float32)
    kernels = library("speedy_kernels")
    exec("def forward(self, hidden_states, *args, **kwargs):\n"
         "    return stock(self, hidden_states * hidden_states.shape[1], *args, **kwargs)", vars(kernels))  # fmt: skip
    kernels.stock = type(model.model.layers[0].self_attn).forward
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(kernels.forward, layer.self_attn)
    with pytest.raises(Unsupported, match="expected layers for which trees are exact"):
        patch(model)(**batch)
    assert kept


def test_functions_of_kernel_packages(monkeypatch):
    """A family of which a small copy runs kernels, without any change by others."""
    model = make_model("qwen3", torch.float32)
    module = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    monkeypatch.setattr(proof, "is_known", lambda _backbone: False)
    monkeypatch.setattr(proof, "_verdicts", {})
    monkeypatch.setattr(module, "apply_rotary_pos_emb", library("fla").kernel)
    with pytest.raises(Unsupported, match=rf"^espalier.hf.patch: layers\.0\.self_attn \(Qwen3Attention\) {SAID.format('fla')}"):
        patch(model)
    assert not proof._verdicts


@pytest.mark.parametrize("body, package, is_ours", [
    (f"raise RuntimeError({NO_GPU!r})", "speedy_kernels", True),
    ("raise RuntimeError('Expected x.is_cuda() to be true, but got false.')", "speedy_kernels", True),
    ("raise ValueError('Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)')", "speedy_kernels", True),
    ("raise ValueError('a fault of its own')", "speedy_kernels", False),
    (f"raise RuntimeError({NO_GPU!r})", "torch", False),
    ("raise MemoryError('no memory')", "speedy_kernels", False),
])  # fmt: skip
def test_which_failures_are_named(body, package, is_ours):
    model = make_model("qwen3", torch.float32)
    replace(model.model.norm, library(package, body))
    with pytest.raises(Exception) as raised, naming_layers("this test"):
        model(torch.tensor([[1, 2]]))
    assert isinstance(raised.value, Unsupported) == is_ours
    if is_ours:
        assert str(raised.value).startswith(f"this test: model.norm (Qwen3RMSNorm) runs kernels of {package}, which fail on a CPU (")


def test_failures_elsewhere_are_not_named():
    """Those outside of any model, and of a model that is not on the CPU alone."""
    kernels = library("speedy_kernels")
    with pytest.raises(RuntimeError) as raised:
        kernels.kernel()
    assert what_needs_a_gpu(raised.value) is None
    model = make_model("qwen3", torch.float32)
    replace(model.model.norm, kernels)
    model.lm_head.to("meta")
    with pytest.raises(RuntimeError) as raised:
        model(torch.tensor([[1, 2]]))
    assert what_needs_a_gpu(raised.value) is None


LIGER = """
    import sys
    import torch, espalier
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo2", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=64, eos_token_id=1, pad_token_id=0)).train()
    if "liger" in sys.argv:
        from liger_kernel.transformers import apply_liger_kernel_to_olmo2
        apply_liger_kernel_to_olmo2(model=model)
    for act in (espalier.hf.patch, lambda model: espalier.hf.verify(model, {"input_ids": torch.tensor([[3, 4, 5], [3, 4, 6]])})):
        try:
            act(model)
            print("taken")
        except espalier.InputError as error:
            print(error)
"""


@pytest.mark.nightly
def test_liger_on_a_cpu(tmp_path):
    """Its refusal is not kept: a later process without it is not refused."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "python"), path_with("liger_kernel")]),
                                "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)

    def said(*words):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(LIGER), *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    lines = said("liger")
    assert len(lines) == 2, lines
    for line in lines:
        assert line.startswith("espalier.hf.patch: layers.0.self_attn") and "runs kernels of liger_kernel, which fail on a CPU" in line
    assert said() == ["taken", "taken"]
