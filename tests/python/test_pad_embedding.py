# SPDX-License-Identifier: Apache-2.0
"""The row of the input embedding that belongs to pad_token_id: trained here, not by Transformers; with
--freeze-pad-embedding as there."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import espalier as package
import transformers_reference as reference
from conftest import seed_of
from engines import EXACT, engine_of, transformers_gradients, worst_error
from small_models import COMMON, MODELS, MORE_FAMILIES, random_rows, write_rows

PAD = 7
EMBEDDING = "model.embed_tokens.weight"
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
FROZEN = pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])


LLAMA = dict(model_type="llama", rope_theta=10000.0, **COMMON)


def init_model(espalier, folder, tied=True, config=LLAMA):
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": PAD, "tie_word_embeddings": tied}))
    espalier("init", "--config", folder / "config.json", "--out", folder / "model", "--seed", seed_of(3),
             "--dtype", "float64")  # fmt: skip
    return folder / "model"


def rows_with_pad():
    """Rows in which the token ends every turn."""
    rows = random_rows(2, "sft")
    for row in rows:
        for position in range(2, len(row["input_ids"]), 3):
            row["input_ids"][position] = PAD
    return rows


def expected_gradients(model, rows, frozen):
    """Of Transformers, whose embedding has a padding_idx or has lost it."""

    def loss_of(theirs):
        assert theirs.get_input_embeddings().padding_idx == PAD
        if not frozen:
            theirs.get_input_embeddings().padding_idx = None
        return reference.sft_loss(theirs, rows)

    return transformers_gradients(model, loss_of)


def engine_gradients(model, rows, **options):
    engine = engine_of(model, **options)
    return engine.forward_backward(rows)["loss"], engine.gradients()


@TIED
@FROZEN
def test_gradients_are_those_of_transformers(espalier, tmp_path, tied, frozen):
    model, rows = init_model(espalier, tmp_path, tied), rows_with_pad()
    loss, gradients = engine_gradients(model, rows, freeze_pad_embedding=frozen)
    expected_loss, expected = expected_gradients(model, rows, frozen)
    assert loss == pytest.approx(expected_loss, rel=EXACT)
    assert worst_error(gradients, expected) <= EXACT
    assert bool(gradients[EMBEDDING][PAD].any()) == (tied or not frozen)  # a tied head trains it all the same
    _, others = expected_gradients(model, rows, not frozen)
    assert worst_error(gradients, others) > 1e-3
    del gradients[EMBEDDING], others[EMBEDDING]
    assert worst_error(gradients, others) <= EXACT


@pytest.mark.parametrize("kind", [kind for kind in MODELS | MORE_FAMILIES if kind != "qwen3_5-composite"])
def test_every_family_is_as_in_transformers(espalier, tmp_path, kind):
    """Also those that have no padding_idx."""
    config = (MODELS | MORE_FAMILIES)[kind]
    model, rows = init_model(espalier, tmp_path, config["tie_word_embeddings"], config), rows_with_pad()
    loss, gradients = engine_gradients(model, rows, freeze_pad_embedding=True)
    expected_loss, expected = transformers_gradients(model, lambda theirs: reference.sft_loss(theirs, rows))
    assert loss == pytest.approx(expected_loss, rel=EXACT)
    embedding = lambda found: {name: gradient for name, gradient in found.items() if "embed" in name}
    assert worst_error(embedding(gradients), embedding(expected)) <= EXACT


@FROZEN
def test_the_command_says_and_does_the_same(espalier, tmp_path, frozen):
    model, rows = init_model(espalier, tmp_path, tied=False), rows_with_pad()
    data = write_rows(tmp_path / "rows.jsonl", rows)
    flags = ["--freeze-pad-embedding"] if frozen else []
    common = ["--model", model, "--data", data, "--token-budget", 24]
    report = json.loads(espalier("verify", *common, *flags, "--json").stdout)
    assert report["passed"] and report["pad_token_id"] == PAD and report["freeze_pad_embedding"] is frozen
    said = espalier("verify", *common, *flags).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("input embedding of the pad token")]
    assert f"{PAD}: {'not trained, as in Transformers' if frozen else 'trained'}" in line
    run = tmp_path / "run"
    train = ["train", *common, "--out", run, "--dtype", "float64", "--optimizer", "sgd", "--learning-rate", 1,
             "--max-grad-norm", 0]  # fmt: skip
    espalier(*train, *flags, "--steps", 1)
    assert f"freeze-pad-embedding = {json.dumps(frozen)}" in (run / "config.toml").read_text()
    before = load_file(model / "model.safetensors")[EMBEDDING]
    after = load_file(run / "checkpoints/step_1/model.safetensors")[EMBEDDING]
    assert torch.equal(before[PAD], after[PAD]) is frozen
    assert not torch.equal(before, after)
    others = [] if frozen else ["--freeze-pad-embedding"]
    refused = espalier(*train, *others, "--steps", 2, "--resume", check=False)
    assert refused.returncode == 1
    assert f"freeze-pad-embedding was {json.dumps(frozen)}" in refused.stderr
    espalier(*train, *flags, "--steps", 2, "--resume")


def test_a_model_without_a_pad_token_is_trained_whole(espalier, tmp_path):
    model, rows = init_model(espalier, tmp_path), rows_with_pad()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    assert AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().padding_idx is None
    _, gradients = engine_gradients(model, rows, freeze_pad_embedding=True)
    _, expected = engine_gradients(model, rows)
    assert all((gradients[name] == expected[name]).all() for name in expected)
    report = espalier("verify", "--model", model, "--data", write_rows(tmp_path / "rows.jsonl", rows), "--json").stdout
    assert json.loads(report)["pad_token_id"] is None


def test_the_option_is_in_the_list():
    default, meaning = package.Engine.options()["freeze_pad_embedding"]
    assert default in ("", "false") and "pad_token_id" in meaning
