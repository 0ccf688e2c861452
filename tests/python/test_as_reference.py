# SPDX-License-Identifier: Apache-2.0
"""logprobs --as-reference: rows that training takes, with what a teacher says of them."""

import pytest

import transformers_reference as reference
from small_models import random_rows, write_rows
from test_reference_model import metrics, rows_of, teacher  # noqa: F401

K = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = rows_of(3)
    rows[0]["turn_rewards"] = [rows[0].pop("reward")]
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def run(espalier, teacher, data, out, *flags, check=True):
    return espalier("logprobs", "--model", teacher, "--data", data, "--as-reference", "-o", out, *flags, check=check)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst", "safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_those_of_the_data_with_the_listing(espalier, teacher, data, tmp_path, suffix, dtype):
    flags = ["--dtype", dtype, "--top-k", K]
    run(espalier, teacher, data, tmp_path / f"taught.{suffix}", *flags)
    espalier("logprobs", "--model", teacher, "--data", data, "-o", tmp_path / "listing.jsonl", *flags)
    if suffix != "jsonl":
        espalier("export", tmp_path / f"taught.{suffix}", "--to", "parquet", "-o", tmp_path / "taught.parquet")
        espalier("import", tmp_path / "taught.parquet", "-o", tmp_path / "taught.jsonl")
    taught, listing = reference.read_rows(tmp_path / "taught.jsonl"), reference.read_rows(tmp_path / "listing.jsonl")
    for row, line, given in zip(taught, listing, reference.read_rows(data), strict=True):
        assert row["input_ids"] == given["input_ids"] and row["loss_mask"] == given["loss_mask"]
        assert row.get("turn_rewards") == given.get("turn_rewards")
        assert row["ref_logprobs"][1:] == pytest.approx(line["logprobs"][1:], rel=1e-7)
        assert row["ref_topk_ids"] == line["topk_ids"]
        for one, other in zip(row["ref_topk_logprobs"][1:], line["topk_logprobs"][1:], strict=True):
            assert one == pytest.approx(other, rel=1e-7)


def test_training_takes_them(espalier, model, teacher, tmp_path):
    """opd on them is opd --reference-model, and over the whole vocabulary as its most likely tokens it is the divergence
    whatever the form."""
    data = write_rows(tmp_path / "rows.jsonl", rows_of(4))
    flags = ["--model", model, "--objective", "opd", "--dtype", "float64", "--steps", 1, "--no-calibration"]
    run(espalier, teacher, data, tmp_path / "taught.safetensors", "--dtype", "float64", "--top-k", 61)
    espalier("train", *flags, "--data", tmp_path / "taught.safetensors", "--out", tmp_path / "taught")
    espalier("train", *flags, "--data", data, "--reference-model", teacher, "--out", tmp_path / "computed")
    for form in ("rest", "renormalize"):
        espalier("train", *flags, "--data", tmp_path / "taught.safetensors", "--ref-topk", form, "--out", tmp_path / form)
    values = {name: metrics(tmp_path / name)[0] for name in ("taught", "computed", "rest", "renormalize")}
    for name in ("loss", "grad_norm", "reverse_kl"):
        assert values["taught"][name] == pytest.approx(values["computed"][name], rel=1e-10)
        assert values["rest"][name] == pytest.approx(values["renormalize"][name], rel=1e-6)
    assert values["rest"]["topk_mass"] == pytest.approx(1, rel=1e-10)
    assert values["rest"]["reverse_kl"] > 0


def test_what_is_refused(espalier, teacher, data, tmp_path):
    run(espalier, teacher, data, tmp_path / "taught.jsonl")
    again = run(espalier, teacher, tmp_path / "taught.jsonl", tmp_path / "again.jsonl", check=False)
    assert again.returncode == 1 and "has `ref_logprobs` already: expected none with --as-reference" in again.stderr
    both = run(espalier, teacher, data, tmp_path / "again.jsonl", "--entropies", check=False)
    assert both.returncode == 1 and "--as-reference: cannot be combined with --entropies" in both.stderr
    assert not (tmp_path / "again.jsonl").exists()


def test_rows_of_every_shape(espalier, model, tmp_path):
    """Single tokens, repeated rows, rows that end inside others, weights: the file is read back."""
    data = write_rows(tmp_path / "rows.jsonl", random_rows(9, "grpo"))
    run(espalier, model, data, tmp_path / "taught.safetensors", "--top-k", 2)
    said = espalier("inspect", "--data", tmp_path / "taught.safetensors").stderr
    assert "9 trajectories" in said and "ref_topk_ids" in said and "ref_logprobs" in said
