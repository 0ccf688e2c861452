# SPDX-License-Identifier: Apache-2.0
"""What docs/coming-from-trl.md says of TRL: its flags give the loss and the gradients of TRL's own trainers, and its defaults are
those of TRL's configs and of the command line."""

import ast
import dataclasses
import functools
import re
import tomllib
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from safetensors.torch import load_file

import objective_formulas as formulas
import transformers_reference as reference
from conftest import REPOSITORY, seed_of
from small_models import write_rows
from test_objectives import (entropies_of, expect_step, labelled_rows, model_folder, outputs_of, padded,  # noqa: F401
                             paired_rows, sampled_rows, sides_of, single_process, train)  # fmt: skip

trl = pytest.importorskip("trl", minversion="1.16")
orpo = pytest.importorskip("trl.experimental.orpo")
cpo = pytest.importorskip("trl.experimental.cpo")
CONFIGS = {each.__name__: each for each in (trl.SFTConfig, trl.GRPOConfig, trl.RLOOConfig, trl.DPOConfig, trl.KTOConfig,
                                            trl.DistillationConfig, orpo.ORPOConfig, cpo.CPOConfig)}  # fmt: skip
CODE = re.compile(r"`([^`]+)`")


def section(title):
    """The cells of each row of the tables below a heading."""
    text = (REPOSITORY / "docs/coming-from-trl.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert text, title
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


# Code of a config, and the sources that take its place: the whole command line, or those of a mix.
ROWS = {CODE.fullmatch(cells[0])[1]: CODE.findall(cells[1])
        for cells in section("Coming from TRL") if re.match(r"`\w+Config\(", cells[0])}  # fmt: skip
NEAREST = ("ORPOConfig()", "DistillationConfig()")


def config_of(code, folder):
    settings = dict(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[])
    return eval(code, {name: functools.partial(each, **settings) for name, each in CONFIGS.items()})


# ---- TRL's losses, from the log-probabilities of a model -----------------------------------------------------------


class Completions:
    """What trainers that sample are given, [rows, longest completion]."""

    def __init__(self, rows, logprobs):
        begins = [row["loss_mask"].index(1) for row in rows]
        longest = max(len(row["input_ids"]) - begin for row, begin in zip(rows, begins))
        self.of = lambda values: padded([v[begin - 1:] for v, begin in zip(values, begins)], longest)
        self.logprobs = self.of(logprobs)
        self.mask = self.of([formulas.weights_of(row) for row in rows])
        self.given = self.of([formulas.tensor(row["logprobs"][1:]) for row in rows])
        self.reference = self.of([formulas.tensor(row["ref_logprobs"][1:]) for row in rows])
        self.inputs = {"prompt_ids": torch.zeros(len(rows), 1), "prompt_mask": torch.ones(len(rows), 1),
                       "completion_ids": torch.zeros_like(self.mask), "completion_mask": self.mask}  # fmt: skip


def trainer_of_samples(config, sides, entropies):
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (sides.logprobs, sides.of(entropies), None),
        accelerator=single_process(), model=SimpleNamespace(training=True), _metrics=MagicMock(), aux_loss_enabled=False,
        args=config, current_gradient_accumulation_steps=1, epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high)  # fmt: skip
    for name in ("loss_type", "importance_sampling_level", "beta", "use_vllm", "entropy_coef", "use_adaptive_entropy",
                 "top_entropy_quantile", "off_policy_mask_threshold", "max_completion_length",
                 "vllm_importance_sampling_correction"):  # fmt: skip
        setattr(trainer, name, getattr(config, name, None))
    trainer._entropy_bonus_enabled = bool(trainer.entropy_coef)
    return trainer


def sampler_ratio(config, sides):
    """As GRPOTrainer._generate_and_score_completions makes it, which needs an engine."""
    difference = (sides.logprobs.detach() - sides.given) * sides.mask
    if config.vllm_importance_sampling_mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio, most = difference.exp(), config.vllm_importance_sampling_clip_max
    assert config.vllm_importance_sampling_clip_min is None and 0 < (ratio > most).sum() < ratio.numel()
    return ratio.masked_fill(ratio > most, 0) if config.vllm_importance_sampling_mode.endswith("mask") else ratio.clamp(max=most)


def grpo_loss(config, rows, model):
    sides = Completions(rows, logprobs_of(model, rows))
    inputs = sides.inputs | {
        "advantages": torch.stack([a[0] for a in formulas.advantages(rows, scale=config.scale_rewards != "none")]),
        "old_per_token_logps": sides.logprobs.detach() if config.use_vllm else sides.given,
        "ref_per_token_logps": sides.reference, "num_items_in_batch": sides.mask.sum()}  # fmt: skip
    if config.use_vllm:
        inputs["importance_sampling_ratio"] = sampler_ratio(config, sides)
    return trl.GRPOTrainer._compute_loss(trainer_of_samples(config, sides, entropies_of(model, rows)), None, inputs)


def rloo_loss(config, rows, model):
    sides = Completions(rows, logprobs_of(model, rows))
    divergence = ((sides.given - sides.reference) * sides.mask).sum(1)
    penalised = [{**row, "reward": row["reward"] - config.beta * each.item()} for row, each in zip(rows, divergence)]
    advantages = formulas.advantages(penalised, baseline="leave-one-out", scale=False)
    inputs = sides.inputs | {"advantages": torch.stack([a[0] for a in advantages]), "old_logps": (sides.given * sides.mask).sum(1)}
    return trl.RLOOTrainer._compute_loss(trainer_of_samples(config, sides, entropies_of(model, rows)), None, inputs)


def logprobs_of(model, rows):
    return [reference.token_logprobs(model, row["input_ids"]) for row in rows]


def sft_loss(config, rows, model):
    assert config.loss_type == "nll"
    terms = sum(formulas.weights_of(row).sum() for row in rows)
    loss = 0
    for row in rows:
        labels = [token if carries else -100 for token, carries in zip(row["input_ids"], row["loss_mask"])]
        loss = loss + model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([labels]),
                            num_items_in_batch=terms).loss  # fmt: skip
    return loss


def preference_trainer(config, **more):
    trainer = MagicMock()
    trainer.configure_mock(accelerator=single_process(), model=SimpleNamespace(training=True), args=config, beta=config.beta,
                           aux_loss_enabled=False, precompute_ref_logps=True, _total_train_tokens=0, _tp_size=1, **more)  # fmt: skip
    return trainer


def dpo_loss(config, rows, model):
    of_tokens, mask, of_reference = sides_of(rows, logprobs_of(model, rows))
    whole = torch.cat([torch.zeros(len(rows), 1), mask], 1)
    chosen, rejected = of_reference.chunk(2)
    inputs = {"input_ids": torch.zeros_like(whole).long(), "attention_mask": torch.ones_like(whole).long(),
              "completion_mask": whole, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}  # fmt: skip
    trainer = preference_trainer(
        config, ld_alpha=config.ld_alpha, f_divergence_type=config.f_divergence_type, loss_types=config.loss_type,
        loss_weights=config.loss_weights or [1.0] * len(config.loss_type), use_weighting=config.use_weighting,
        label_smoothing=config.label_smoothing)  # fmt: skip
    return trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs_of(of_tokens, mask), inputs, False)


def kto_loss(config, rows, model):
    logprobs = logprobs_of(model, rows)
    labelled = [row for row in rows if "chosen" in row]
    num, longest = len(labelled), max(len(p) for p in logprobs)
    mask = padded([formulas.weights_of(row) for row in labelled], longest)
    sums = torch.stack([(formulas.weights_of(row) * p).sum() for row, p in zip(rows, logprobs)])
    references = torch.stack([(formulas.weights_of(row) * formulas.tensor(row["ref_logprobs"][1:])).sum() for row in rows])
    whole = torch.cat([torch.zeros(num, 1), mask], 1)
    inputs = {"input_ids": torch.zeros_like(whole).long(), "attention_mask": torch.ones_like(whole).long(),
              "completion_mask": whole, "label": torch.tensor([row["chosen"] for row in labelled]),
              "ref_logps": references[:num], "ref_KL_logps": references[num:]}  # fmt: skip
    trainer = preference_trainer(config, loss_type=config.loss_type, calculate_KL=True, desirable_weight=config.desirable_weight,
                                 undesirable_weight=config.undesirable_weight)  # fmt: skip
    trainer._compute_kl_logps = lambda *_: sums[num:]
    outputs = outputs_of(padded(logprobs[:num], longest) * mask, mask)
    return trl.KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)


def loss_without_reference(kind, config, rows, model):
    """Of CPOTrainer and ORPOTrainer, with their forward pass."""
    pairs = sorted({row["pair_id"] for row in rows})
    ordered = [next(row for row in rows if row["pair_id"] == pair and row["chosen"] == side)
               for side in (True, False) for pair in pairs]  # fmt: skip
    longest = max(len(row["input_ids"]) for row in ordered)
    of = lambda values, fill: torch.tensor([value + [fill] * (longest - len(value)) for value in values])
    labels = of([[token if carries else -100 for token, carries in zip(row["input_ids"], row["loss_mask"])] for row in ordered],
                -100)  # fmt: skip
    trainer = preference_trainer(config, is_encoder_decoder=False, **{
        name: getattr(config, name) for name in ("loss_type", "cpo_alpha", "simpo_gamma", "alpha", "label_smoothing")
        if hasattr(config, name)})  # fmt: skip
    trainer.concatenated_inputs = lambda *_, **__: {
        "concatenated_input_ids": of([row["input_ids"] for row in ordered], 0), "concatenated_labels": labels,
        "concatenated_attention_mask": of([[1] * len(row["input_ids"]) for row in ordered], 0)}  # fmt: skip
    trainer.get_batch_logps = kind.get_batch_logps
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(kind, name):
            setattr(trainer, name, functools.partial(getattr(kind, name), trainer))
    return kind.get_batch_loss_metrics(trainer, model, {"chosen_labels": labels[:len(pairs)]})[0]


LOSSES = {"SFTConfig": sft_loss, "GRPOConfig": grpo_loss, "RLOOConfig": rloo_loss, "DPOConfig": dpo_loss, "KTOConfig": kto_loss,
          "CPOConfig": functools.partial(loss_without_reference, cpo.CPOTrainer)}  # fmt: skip


# ---- The same runs here --------------------------------------------------------------------------------------------


def rows_for(config, model):
    """Rows whose `logprobs` are the model's own for RLOO. Otherwise they are near them; the first row has ratios above 4, the second
    of 1, and all others one between 1.2 and 1.28, and one above 6."""
    if isinstance(config, trl.KTOConfig):
        return labelled_rows()
    if isinstance(config, (trl.DPOConfig, cpo.CPOConfig, orpo.ORPOConfig)):
        return paired_rows()
    rows = sampled_rows()
    generator = torch.Generator().manual_seed(seed_of(9))
    with torch.no_grad():
        for number, (row, p) in enumerate(zip(rows, logprobs_of(model, rows))):
            first = row["loss_mask"].index(1)
            row["loss_mask"] = [0] * first + [1] * (len(row["input_ids"]) - first)  # TRL's completions are one stretch
            log_ratio = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            log_ratio[first - 1], log_ratio[-1] = 0.22, 2
            if isinstance(config, trl.RLOOConfig) or number == 1:
                log_ratio.zero_()
            elif number == 0:
                log_ratio.fill_(1.5)
            row["logprobs"] = [None, *(p - log_ratio).clamp(max=0).tolist()]
    return rows


def flags_of(source, config, rows):
    """(objective, flags) of what the table has in back-ticks."""
    objective, *flags = source.split()
    if "N" in flags:
        flags[flags.index("N")] = len(rows) * config.max_completion_length
    return objective, flags


def train_mix(espalier, model_folder, rows, out, sources, config):
    text = ""
    for number, source in enumerate(sources):
        objective, flags = flags_of(source, config, rows)
        some = [row for row in rows if row["chosen"]] if objective == "sft" else rows
        write_rows(out.with_suffix(f".{number}.jsonl"), some)
        text += f'[[mix]]\ndata = "{out.with_suffix(f".{number}.jsonl")}"\nobjective = "{objective}"\nname = "{number}"\n'
        text += "".join(f"{name[2:]} = {value}\n" for name, value in zip(flags[::2], flags[1::2])).replace("-", "_")
    out.with_suffix(".toml").write_text(text)
    espalier("train", "--model", model_folder, "--mix", out.with_suffix(".toml"), "--out", out, "--dtype", "float64",
             "--token-budget", 16, "--optimizer", "sgd", "--learning-rate", 1, "--max-grad-norm", 0, "--steps", 1)  # fmt: skip
    return reference.read_rows(out / "metrics.jsonl"), load_file(out / "checkpoints/step_1/model.safetensors")


@pytest.mark.parametrize("code", [code for code in ROWS if code not in NEAREST])
def test_the_flags_of_the_table_are_the_trainer_of_trl(espalier, model_folder, tmp_path, code):
    config = config_of(code, tmp_path / "trl")
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        rows = rows_for(config, model)
        loss = LOSSES[type(config).__name__](config, rows, model)
        gradients = reference.gradients(model, loss)
    sources = [source for source in ROWS[code] if source.split()[0] != "mix"]
    if len(sources) > 1:
        metrics, after = train_mix(espalier, model_folder, rows, tmp_path / "run", sources, config)
    else:
        objective, flags = flags_of(sources[0], config, rows)
        metrics, after = train(espalier, model_folder, rows, tmp_path / "run", objective, flags)
    if isinstance(config, trl.SFTConfig):  # of which Transformers computes the loss in float32
        assert metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
        return
    if not isinstance(config, trl.RLOOConfig):  # whose loss has the ratio in place of the log-probability
        assert metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-10, abs=1e-12)
    expect_step(load_file(model_folder / "model.safetensors"), after, gradients)


@pytest.mark.parametrize("code, source", [
    ("GRPOConfig(loss_type=\"dr_grpo\")", "dr_grpo --normalize N"),  # which does not divide by the deviation
    ("GRPOConfig(loss_type=\"cispo\", epsilon_high=5.0)", "cispo --clip-high 5"),
    ("GRPOConfig(beta=0.04)", "grpo --kl-coef 0.04"),
    ("GRPOConfig(loss_type=\"grpo\", entropy_coef=0.01)", "grpo --normalize sequence --entropy-coef 0.01"),
    ("GRPOConfig()", "dapo"),
    ("CPOConfig(loss_type=\"simpo\")", "simpo --beta 0.1 --margin 0.5"),
])  # fmt: skip
def test_other_flags_are_not(espalier, model_folder, tmp_path, code, source):
    """The remarks of the table, and negative controls of the comparison."""
    config = config_of(code, tmp_path / "trl")
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        rows = rows_for(config, model)
        gradients = reference.gradients(model, LOSSES[type(config).__name__](config, rows, model))
    objective, flags = flags_of(source, config, rows)
    _, after = train(espalier, model_folder, rows, tmp_path / "run", objective, flags)
    with pytest.raises(AssertionError):
        expect_step(load_file(model_folder / "model.safetensors"), after, gradients)


def test_orpo_differs_from_that_of_trl_by_its_likelihood(tmp_path, model_folder):
    config = config_of("ORPOConfig()", tmp_path)
    rows = paired_rows()
    model = reference.load_model(model_folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64), torch.no_grad():
        theirs = loss_without_reference(orpo.ORPOTrainer, config, rows, model)
        logprobs = logprobs_of(model, rows)
    chosen = [(row, p) for row, p in zip(rows, logprobs) if row["chosen"]]
    answers = torch.stack([formulas.score(row, p, False, True) for row, p in chosen]).mean()
    ours = formulas.preference_loss("orpo", rows, logprobs, beta=config.beta) + answers - torch.cat([p for _, p in chosen]).mean()
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-6)  # TRL computes the odds ratio in float32


def test_the_table_says_how_trl_scales_rewards():
    import inspect

    source = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    assert "advantages / (std_rewards + 1e-4)" in source
    with pytest.raises(ValueError, match="at least 2 generations"):
        trl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, num_generations=1)


# ---- Defaults ------------------------------------------------------------------------------------------------------

DEFAULTS = section("Defaults of TRL and verl")
OF_TRL = [(field, value) for cells in DEFAULTS for fields, value in
          re.findall(r"((?:`\w+Config\.\w+`(?:, )?)+): `([^`]+)`", cells[1]) for field in CODE.findall(fields)]  # fmt: skip
OURS = [(objective or "grpo", flag, value) for cells in DEFAULTS
        for objective, flag, value in re.findall(r"`(?:(\w+) )?--([\w-]+)`: `([^`]+)`", cells[-1])]  # fmt: skip


def test_defaults_of_trl():
    assert len(OF_TRL) > 30
    for field, value in OF_TRL:
        name, _, key = field.partition(".")
        default = next(each.default for each in dataclasses.fields(CONFIGS[name]) if each.name == key)
        assert default == ast.literal_eval(value), field


def test_defaults_of_ours(espalier, model_folder, tmp_path):
    assert len(OURS) > 30
    for objective in sorted({objective for objective, _, _ in OURS}):
        rows = {"dpo": paired_rows, "simpo": paired_rows, "orpo": paired_rows, "kto": labelled_rows}.get(objective, sampled_rows)()
        shown = espalier("train", "--model", model_folder, "--data", write_rows(tmp_path / "rows.jsonl", rows), "--out",
                         tmp_path / "run", "--objective", objective, "--dry-run", "--no-calibration").stdout  # fmt: skip
        config = tomllib.loads(shown.partition("# resolved config\n")[2].partition("\n#")[0])
        for of, flag, value in OURS:
            if of == objective:
                assert config[flag] == ast.literal_eval(value), (objective, flag)


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant"])
def test_the_learning_rate_is_that_of_transformers_after_the_warm_up(espalier, model_folder, tmp_path, scheduler):
    rows, warmup, steps = sampled_rows(), 2, 6
    data = write_rows(tmp_path / "rows.jsonl", rows)
    espalier("train", "--model", model_folder, "--data", data, "--out", tmp_path / "run", "--steps", steps, "--scheduler",
             scheduler, "--warmup-steps", warmup, "--learning-rate", 0.5, "--optimizer", "sgd")  # fmt: skip
    rates = [line["learning_rate"] for line in reference.read_rows(tmp_path / "run/metrics.jsonl")]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    name = scheduler if scheduler != "constant" else "constant_with_warmup"
    theirs = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    for step in range(steps):
        expected = theirs.get_last_lr()[0]
        if step < warmup:
            assert expected == 0.5 * step / warmup
            expected = 0.5 * (step + 1) / (warmup + 1)
        assert rates[step] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        theirs.step()
