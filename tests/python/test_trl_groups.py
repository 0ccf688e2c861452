# SPDX-License-Identifier: Apache-2.0
"""Generations of a prompt in one micro-batch: what is shared, and that optimiser steps stay what they were."""

import warnings

import pytest
import torch

from conftest import seed_of
from espalier import trl as espalier_trl
from espalier.hf import SharingCallback, patching
from espalier.trl_groups import order_of_groups
from hf_models import make_model
from test_trl import words  # noqa: F401

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
ROUNDING = 1e-5  # Transformers' norms and TRL's head round in float32 whatever the dtype
SAME = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")  # as docs/compatibility.md says
PROMPT_LENGTH, PROMPTS, GENERATIONS, ROWS, ACCUMULATED = 60, 8, 8, 8, 8


def prompts():
    """Of different lengths, with different first words."""
    return [" ".join(f"w{(7 * number + 3 * place) % 59}" for place in range(PROMPT_LENGTH + number)) for number in range(PROMPTS)]


def make_trainer(words, folder, kind="GRPO", **more):
    settings = dict(
        output_dir=str(folder), per_device_train_batch_size=ROWS, gradient_accumulation_steps=ACCUMULATED, max_steps=1,
        logging_steps=1, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
        seed=seed_of(5), disable_tqdm=True, learning_rate=1e-3, num_generations=GENERATIONS, max_completion_length=6)  # fmt: skip
    reward = lambda completions, **_: [float(len(set(completion))) for completion in completions]
    config = getattr(trl, f"{kind}Config")(**settings | dict(beta=0.0) | more)  # else it loads a reference model
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts()])
    return getattr(trl, f"{kind}Trainer")(make_model("qwen3"), reward, args=config, train_dataset=rows, processing_class=words)


def trained(trainer):
    """The lines of the log, after training with fixed random numbers."""
    torch.manual_seed(seed_of(6))
    trainer.train()
    return [line for line in trainer.state.log_history if "grad_norm" in line]


def one_step(words, folder, keep_groups, **more):
    """The log of the first step."""
    return trained(espalier_trl.patch(make_trainer(words, folder, **more), keep_groups=keep_groups))[0]


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_what_is_shared(words, tmp_path, kind):
    """Eight prompts, eight generations of each, eight rows a device, accumulated over eight micro-batches."""
    with pytest.warns(UserWarning, match="steps_per_generation=1 with keep_groups=False, received 8"):
        apart = one_step(words, tmp_path, False, kind=kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="espalier")
        together = one_step(words, tmp_path, True, kind=kind)
    assert apart["espalier/ratio"] < 2 and together["espalier/ratio"] > 4
    assert together["espalier/tokens"] == apart["espalier/tokens"]
    assert together["grad_norm"] == pytest.approx(apart["grad_norm"], rel=ROUNDING)


def test_one_prompt_to_a_micro_batch(words, tmp_path, monkeypatch):
    """Each of the eight prompts is encoded once."""
    trainer, trees = espalier_trl.patch(make_trainer(words, tmp_path)), []
    forest_of = patching.forest_of

    def counted(arguments):
        rows, layout = forest_of(arguments)
        if torch.is_grad_enabled():
            trees.append(int((layout.prev == -1).sum()))
        return rows, layout

    monkeypatch.setattr(patching, "forest_of", counted)
    trained(trainer)
    assert trees == [1] * ACCUMULATED


@pytest.mark.parametrize("loss_type", [*SAME, "bnpo"])
def test_losses_are_the_same(words, tmp_path, loss_type):
    """And with a normaliser for each micro-batch another estimate, for which rows in other micro-batches are enough."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = [one_step(words, tmp_path, keep_groups, loss_type=loss_type) for keep_groups in (False, True)]
    same = [line["grad_norm"] for line in lines]
    assert same[0] > 1e-4
    if loss_type == "bnpo":
        assert same[1] != pytest.approx(same[0], rel=100 * ROUNDING)
    else:
        assert same[1] == pytest.approx(same[0], rel=ROUNDING)
        assert lines[1]["loss"] == pytest.approx(lines[0]["loss"], abs=ROUNDING)


def test_several_optimiser_steps(words, tmp_path):
    """Of one generation batch: groups stay together, which is said."""
    with pytest.warns(UserWarning, match="feeds several optimiser steps.*whole groups") as caught:
        trainer = espalier_trl.patch(make_trainer(words, tmp_path, gradient_accumulation_steps=2, steps_per_generation=8,
                                                  max_steps=4))  # fmt: skip
    assert len([warning for warning in caught if "several optimiser steps" in str(warning.message)]) == 1
    assert all(line["espalier/ratio"] > 4 for line in trained(trainer))


def test_other_trainers_stay_as_they_are(words, tmp_path):
    """And one that is patched again with keep_groups=False shuffles rows again."""
    ours = espalier_trl.patch(make_trainer(words, tmp_path))
    theirs = make_trainer(words, tmp_path)
    assert espalier_trl.SharingCallback is SharingCallback
    with pytest.warns(UserWarning, match="keep_groups=False"):
        espalier_trl.patch(theirs, keep_groups=False)
    assert trained(theirs)[0]["espalier/ratio"] < 2
    with pytest.warns(UserWarning, match="keep_groups=False"):
        espalier_trl.patch(ours, keep_groups=False)
    assert trained(ours)[0]["espalier/ratio"] < 2


def test_orders_are_permutations_of_groups():
    generator = torch.Generator().manual_seed(seed_of(3))
    groups = torch.randint(0, 6, (50,), generator=generator)
    ids = torch.stack([torch.full((50,), 9), groups, groups + 1], 1)
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    ids[:, 0] = torch.randint(0, 60, (50,), generator=generator)  # padding of any value
    orders = [order_of_groups(ids, mask) for _ in range(5)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
        changes = (groups[order].diff() != 0).sum().item()
        assert changes == len(groups.unique()) - 1
    assert len({tuple(order.tolist()) for order in orders}) == 5
    assert len({tuple(groups[order].tolist()) for order in orders}) > 1
    state = torch.get_rng_state()
    torch.randperm(50)
    expected = torch.rand(3)
    torch.set_rng_state(state)
    order_of_groups(ids, mask)
    assert torch.equal(torch.rand(3), expected)
