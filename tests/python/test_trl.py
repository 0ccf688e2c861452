# SPDX-License-Identifier: Apache-2.0
"""One step of each trainer of TRL, patched against unpatched: loss and gradient norm.

Transformers' norms and TRL's head round in float32 whatever the dtype, which float64 models show as some 1e-7."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from espalier import trl as espalier_trl
from espalier.errors import Unsupported
from espalier.hf import patching
from hf_models import make_model
from trl_experimental import ANSWERS, PROMPT

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
ROUNDING = 1e-5


def small_words():
    """A tokenizer of the words w0 to w58, and two special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(59)} | {"<pad>": 59, "<end>": 60}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


words = pytest.fixture(scope="module")(small_words)


def sft(model, words, settings, **more):
    rows = datasets.Dataset.from_list([{"prompt": PROMPT + " ", "completion": answer} for answer in ANSWERS])
    return trl.SFTTrainer(model, trl.SFTConfig(**settings, **more), train_dataset=rows, processing_class=words)


def sft_without_padding(model, words, settings):
    return sft(model, words, settings, padding_free=True, max_length=None)


def dpo(model, words, settings):
    rows = [{"prompt": PROMPT + " ", "chosen": chosen, "rejected": "w8 w8"} for chosen in ANSWERS]
    rows = datasets.Dataset.from_list(rows)
    reference = make_model("qwen3", seed=4).to(model.dtype)
    return trl.DPOTrainer(model, reference, args=trl.DPOConfig(**settings), train_dataset=rows, processing_class=words)


def grpo(model, words, settings, **more):
    rows = datasets.Dataset.from_list([{"prompt": PROMPT}] * 4)
    reward = lambda completions, **_: [float(len(completion)) for completion in completions]
    config = trl.GRPOConfig(**settings, num_generations=4, max_completion_length=6, **more)
    return trl.GRPOTrainer(model, reward, args=config, train_dataset=rows, processing_class=words)


def one_step(make_trainer, words, folder, change):
    """(loss, gradient norm) of the first step."""
    settings = dict(output_dir=str(folder), per_device_train_batch_size=4, max_steps=1, logging_steps=1, report_to=[],
                    use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", seed=5,
                    disable_tqdm=True, learning_rate=1e-3)  # fmt: skip
    trainer = change(make_trainer(make_model("qwen3"), words, settings))
    torch.manual_seed(6)
    trainer.train()
    log = next(line for line in trainer.state.log_history if "grad_norm" in line)
    return log["loss"], log["grad_norm"]


@pytest.fixture
def forests(monkeypatch):
    """(flat tokens, tree tokens) of every batch that ran as a forest."""
    seen = []
    forest_of = patching.forest_of

    def counted(arguments):
        rows, layout = forest_of(arguments)
        seen.append((len(rows.tokens), layout.num_tokens))
        return rows, layout

    monkeypatch.setattr(patching, "forest_of", counted)
    return seen


@pytest.mark.parametrize("make_trainer", [sft, sft_without_padding, dpo, grpo])
def test_one_step(make_trainer, words, tmp_path, forests):
    theirs = one_step(make_trainer, words, tmp_path, lambda trainer: trainer)
    assert forests == []
    ours = one_step(make_trainer, words, tmp_path, espalier_trl.patch)
    assert forests and all(tree < 0.6 * flat for flat, tree in forests)
    assert ours == pytest.approx(theirs, rel=ROUNDING, abs=ROUNDING)
    assert theirs[1] > 1e-3


def test_groups_that_are_taken_apart(words, tmp_path):
    settings = dict(output_dir=str(tmp_path), per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False)
    with pytest.warns(UserWarning) as caught:
        espalier_trl.patch(grpo(make_model("qwen3"), words, settings, steps_per_generation=2), keep_groups=False)
    said = " ".join(str(warning.message) for warning in caught)
    assert "expected steps_per_generation=1 with keep_groups=False, received 2" in said
    assert "multiple of num_generations=4, received 2" in said


def test_what_is_no_trainer():
    with pytest.raises(Unsupported, match="expected a trainer with a model, received int"):
        espalier_trl.patch(3)
