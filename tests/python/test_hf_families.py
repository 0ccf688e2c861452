# SPDX-License-Identifier: Apache-2.0
"""Which families of models are patched: a proof by a small copy decides, and is sharp."""

import json
import runpy
import sys

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import espalier
from conftest import REPOSITORY
from espalier import kept
from espalier.errors import Unsupported
from espalier.hf import mixers, patch, patching, proof, verdicts, versions
from espalier.hf.families import backbone_of, stock_class
from espalier.hf.float64 import InFloat64
from espalier.hf.small_copy import NotSmall, Scale, draw_weights, kinds_of_layers, small_config, small_model
from hf_default_models import default_model
from hf_models import VERSION, alone, branching_rows, padded, sums_of, worst_error

CONVOLUTIONS = ["conv", "conv", "full_attention"]
EQUAL = ["bart", "cohere2", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite", "lfm2",
         "llama4_text", "ministral3", "mixtral", "nemotron_h", "olmo2", "olmo_hybrid", "olmoe", "phi3", "smollm3", "stablelm",
         "starcoder2", "zamba2"]  # fmt: skip
REFUSED = {
    "bloom": "wrong on trees.*: h.0.self_attention .BloomAttention",  # ALiBi
    "falcon_mamba": "layers.0.mixer .FalconMambaMixer",
    "kimi_linear": "layers.0.self_attn",
    "phimoe": "layers..*.mlp",  # routing at random
    "rwkv": "blocks.0.attention",
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No verdicts of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "_verdicts", {})


def settings_of(model_type):
    return {"layer_types": CONVOLUTIONS * 2, "num_hidden_layers": 6} if model_type == "lfm2" else {}


def skip_unless(verdict, model_type):
    """Skips where this version of Transformers has a record with another verdict."""
    path = REPOSITORY / f"docs/families/{transformers.__version__}.json"
    types = json.loads(path.read_text(encoding="utf-8"))["types"] if path.is_file() else {}
    found = types.get(model_type, {"verdict": "not there"})["verdict"] if types else verdict
    if found != verdict:
        pytest.skip(f"Transformers {transformers.__version__}: {model_type} is {found}")


@pytest.mark.parametrize("model_type", EQUAL)
def test_families_that_are_exact(model_type):
    skip_unless("equal", model_type)
    model = default_model(model_type, **settings_of(model_type))
    patch(model)
    model = small_model(stock_class(backbone_of(model)), backbone_of(model).config)
    assert proof.error_of(model, patching.attach_for_proof)[0] <= 1e-11


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_are_refused(model_type):
    skip_unless("refused", model_type)
    model = default_model(model_type, **settings_of(model_type))
    with pytest.raises(Unsupported, match=REFUSED[model_type]):
        patch(model)
    assert not {"forward", "_espalier"} & backbone_of(model).__dict__.keys()


@pytest.mark.parametrize("model_type", ["bloom", "falcon_mamba", "lfm2", "llama4_text", "minimax", "nemotron_h", "olmo_hybrid", "rwkv"])
def test_the_proof_is_sharp(model_type, monkeypatch):
    """Where nothing follows the forest but attention without chunks."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}")
    if model_type in ("lfm2", "nemotron_h") and VERSION < (5, 4):
        pytest.skip(f"Transformers {transformers.__version__}: a hook takes the place of its convolution, which needs a mixer")
    monkeypatch.setattr(mixers, "MIXERS", {})
    monkeypatch.setattr(patching.attention, "_chunk_of", lambda *_: 0)
    model = default_model(model_type, **settings_of(model_type))
    small = small_model(stock_class(backbone_of(model)), backbone_of(model).config)
    assert proof.error_of(small, patching.attach_for_proof)[0] > 1e-2


@pytest.mark.parametrize("model_type", ["mixtral", "gemma3_text", "olmo2"])
def test_models_with_weights_give_the_same_losses_and_gradients(model_type):
    """Beside the proof: with a head, as users train."""
    config = small_config(default_model(model_type).config, [0, 1], Scale(hidden=48, heads=6, window=3))
    config.vocab_size = 61

    def make():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).double().train()
        draw_weights(model)
        return model

    theirs = alone(make(), branching_rows())
    model = patch(make())
    with InFloat64():
        assert worst_error(sums_of(model, [padded(branching_rows())]), theirs) <= 1e-12


def looking_back(stock):
    """A forward whose output has something of the token before."""

    def forward(module, *args, **kwargs):
        output = stock(module, *args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        before = torch.cat([torch.zeros_like(first[..., :1, :]), first[..., :-1, :]], -2)
        mixed = first + 0.1 * before
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    return forward


@pytest.mark.parametrize("model_type, name, place", [
    ("olmo2", "Olmo2Attention", "layers.0.self_attn"),
    ("olmo2", "Olmo2MLP", "layers.0.mlp"),
    ("olmo2", "Olmo2RMSNorm", "layers.0.self_attn.q_norm"),
    ("mixtral", "MixtralExperts", "layers.0.mlp.experts"),
    ("gemma3_text", "Gemma3TextScaledWordEmbedding", "embed_tokens"),
])  # fmt: skip
def test_a_spoiled_layer_is_refused_by_name(model_type, name, place, monkeypatch):
    """Negative controls."""
    model = default_model(model_type)
    layer = getattr(sys.modules[type(model).__module__], name)
    monkeypatch.setattr(layer, "forward", looking_back(layer.forward))
    # Before 5.4 a decorator is around this forward: it cannot be carried over to a copy.
    is_wrapped = name == "Olmo2Attention" and VERSION < (5, 4)
    refusal = f"no small copy can be made .{name}.forward" if is_wrapped else f"the first layer whose output differs: {place}.* .{name}"
    with pytest.raises(Unsupported, match=refusal):
        patch(model)


def test_spoiled_attention_on_trees(monkeypatch):
    """Negative controls: other branches are seen, windows are not kept, positions are those of the order of the tokens."""

    def refused_with(change, place="layers.0.self_attn"):
        def init(run, *arguments):
            stock(run, *arguments)
            change(run)

        monkeypatch.setattr(patching.TreeRun, "__init__", init)
        monkeypatch.setattr(proof, "_verdicts", {})
        monkeypatch.setattr(verdicts, "read", lambda _key: None)
        with pytest.raises(Unsupported, match=f"differs: {place}"):
            patch(default_model("gemma3_text"))

    stock = patching.TreeRun.__init__
    refused_with(lambda run: setattr(run, "subtree_end", torch.full_like(run.subtree_end, run.num_tokens)))
    refused_with(lambda run: setattr(run, "position", torch.arange(run.num_tokens, dtype=torch.int32)), "rotary_emb")
    monkeypatch.setattr(patching.TreeRun, "__init__", stock)
    monkeypatch.setattr(proof, "_verdicts", {})
    patch(default_model("gemma3_text"))
    attend = patching.attention._BY_BACKEND["espalier"]
    monkeypatch.setitem(patching.attention._BY_BACKEND, "espalier", lambda run, asked: attend(run, asked._replace(window=0)))
    refused_with(lambda run: None)


def test_a_copy_has_every_kind_of_layer():
    """Windows in five of six layers, a dense layer before experts, layers without rope."""
    for model_type, settings in (("gemma3_text", {}), ("glm4_moe", {}), ("smollm3", {}), ("lfm2", settings_of("lfm2"))):
        backbone = backbone_of(default_model(model_type, **settings))
        small = small_model(stock_class(backbone), backbone.config)
        assert kinds_of_layers(backbone) <= kinds_of_layers(small) and len(kinds_of_layers(small)) > 1, model_type
        assert sum(parameter.numel() for parameter in small.parameters()) < 1_000_000
    assert small.config.layer_types.count("conv") >= 1


def test_once_for_each_configuration(monkeypatch):
    proven = []
    error_of = proof.error_of
    monkeypatch.setattr(proof, "error_of", lambda *args: proven.append(1) or error_of(*args))
    patch(default_model("olmo2"))
    patch(default_model("olmo2"))
    assert len(proven) == 1
    patch(default_model("olmo2", attention_bias=True))
    assert len(proven) == 2
    monkeypatch.setattr(proof, "_verdicts", {})  # another process
    patch(default_model("olmo2"))
    assert len(proven) == 2
    patch(default_model("llama"))
    count = 2 if versions.is_tested() else 3  # the tests cover it, with versions that they are run with
    assert len(proven) == count
    file = next(kept.folder("proofs").glob("olmo2-*.json"))
    assert json.loads(file.read_text()) == {"fault": None, "reference": "a small copy in float64"}
    for broken in kept.folder("proofs").glob("*.json"):
        broken.write_text("{")
    monkeypatch.setattr(proof, "_verdicts", {})
    patch(default_model("olmo2"))
    assert len(proven) == count + 1


def test_a_disk_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    patch(default_model("olmo2"))


def test_layers_without_float64(monkeypatch):
    """They are proven in float32."""
    layer = sys.modules[type(default_model("olmo2")).__module__].Olmo2MLP
    stock, seen = layer.forward, set()

    def forward(module, x):
        seen.add(x.dtype)
        if x.dtype == torch.float64:
            raise RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")
        return stock(module, x)

    monkeypatch.setattr(layer, "forward", forward)
    patch(default_model("olmo2"))
    assert seen == {torch.float64, torch.float32}
    monkeypatch.setattr(layer, "forward", looking_back(forward))
    monkeypatch.setattr(proof, "_verdicts", {})
    monkeypatch.setattr(verdicts, "read", lambda _key: None)
    with pytest.raises(Unsupported, match="differs: layers.0.mlp .Olmo2MLP"):
        patch(default_model("olmo2"))


def test_random_numbers_and_modes_stay():
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu"):
        patch(default_model("phi3"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def without_small_copies(monkeypatch):
    def refuse(*_):
        raise NotSmall("made so by a test")

    monkeypatch.setattr(proof, "small_model", refuse)


def real(model_type, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(default_model(model_type, **settings).config, [0, 1]))
    draw_weights(model)
    return model.eval()


def test_a_model_without_a_small_copy_proves_itself(without_small_copies):
    model, batch = real("mixtral"), padded([[5, 6, 7], [5, 6, 8]])
    batch = {name: value % 48 for name, value in batch.items() if name != "labels"}
    before = model(**batch).logits
    with pytest.warns(UserWarning, match="MixtralModel is proven on the model itself in float32.*made so by a test"):
        patch(model)
    torch.testing.assert_close(model(**batch).logits, before)
    assert espalier.hf.sharing(model).batches == 1
    with pytest.raises(Unsupported, match="the model itself has no weights yet"):
        patch(default_model("mixtral"))


def test_a_model_that_refutes_itself(without_small_copies):
    model = real("bloom")
    with pytest.raises(Unsupported, match="the model itself is wrong on trees, by"):
        patch(model)
    assert not {"forward", "_espalier"} & backbone_of(model).__dict__.keys()


def test_a_window_that_no_row_would_fill(without_small_copies):
    model = real("gemma3_text")
    model.config.sliding_window = 5000
    for layer in model.model.layers:
        layer.self_attn.sliding_window = layer.self_attn.sliding_window and 5000
    with pytest.raises(Unsupported, match="would need rows longer than a window or chunk of 5000 tokens"):
        patch(model)


def test_a_step_takes_heads_that_are_plain():
    """A scale of cohere's and a softcap of gemma2's are not in the log-probabilities of a Step."""
    plan = espalier.plan(espalier.build([[5, 6, 7], [5, 6, 8]]), token_budget=9, strategy="tree-packing")
    for model_type, is_plain in (("phi3", True), ("cohere", False)):
        step = espalier.Step(real(model_type), plan)
        for batch in step:
            if is_plain:
                step.backward(step.logprobs(batch).sum())
                continue
            with pytest.raises(Unsupported, match="received a CohereForCausalLM, which changes them"):
                step.logprobs(batch)
            break


@pytest.mark.parametrize("model_type", ["gpt2", "phi3"])
def test_verification_of_other_families(model_type):
    batch = padded([[*range(5, 40), 8, 9], [*range(5, 40), 10], [*range(11, 40)]])  # so that errors are means of many
    report = espalier.hf.verify(real(model_type), {name: value % 48 for name, value in batch.items() if name != "labels"})
    assert report.passed and report.flips is None


def test_a_step_takes_layers_that_run_once():
    """hrm_text runs its layers in cycles: in a partition, descendants would read the keys of the last."""
    if "hrm_text" not in CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no hrm_text")
    rows = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 12, 13, 14], [5, 6, 7, 8, 12, 15, 16]]
    plan = espalier.plan(espalier.build(rows), token_budget=6)
    with pytest.raises(Unsupported, match="expected layers that run once, received layer"):
        for batch in (step := espalier.Step(real("hrm_text"), plan)):
            step.backward(step.logprobs(batch).sum())


RECORDS = sorted((REPOSITORY / "docs/families").glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_records(path):
    """Nothing is silently different, and what is refused says why."""
    record = json.loads(path.read_text())
    types = record["types"]
    assert record["different"] == 0 and record["equal"] + record["refused"] == len(types)
    for entry in types.values():
        assert entry["error"] <= 1e-6 if entry["verdict"] == "equal" else entry["why"]
    assert len(RECORDS) == 5


def test_the_page_is_that_of_the_records():
    page = runpy.run_path(str(REPOSITORY / "scripts/families.py"))["page"]()
    assert page == (REPOSITORY / "docs/families.md").read_text()


def test_the_script_finds_what_the_proof_lets_through(monkeypatch):
    """Negative control: with a proof that passes everything, bloom is silently different, and the script says so."""
    script = runpy.run_path(str(REPOSITORY / "scripts/families.py"))
    assert script["judged"]("bloom")["verdict"] == "refused"
    monkeypatch.setattr(patching, "check_family", lambda *_: None)
    record = script["judged"]("bloom")
    assert record["verdict"] == "different" and record["error"] > 0.1
