# SPDX-License-Identifier: Apache-2.0
"""`espalier serve` by the official client, against PEFT and PyTorch on the same calls, one datum at a time, in float64."""

import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

import peft
import torch
from safetensors.torch import load_file
from tinker import types

import transformers_reference as reference
from conftest import REPOSITORY, seed_of
from engines import init_model
from espalier.server.stop_texts import StopTexts
from servers import client, datum, prompt, server

sys.path.insert(0, str(REPOSITORY / "tests"))
from documents import blocks_of

STEPS = 10
CLOSE = 1e-10
ADAM = types.AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def address(folder, state):
    with server(folder, state) as (address, _):
        yield address


@pytest.fixture(scope="module")
def service(address):
    return client(address)


def saved(state, path):
    """The folder of a checkpoint."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return state / "runs" / run.replace(":", ".") / kind / name / "adapter"


def batches(loss):
    """Ten batches of one tree each, with inputs that the loss reads, in float32 as the wire has them."""
    draw = np.random.default_rng(seed_of(60))
    found = []
    for _ in range(STEPS):
        start = draw.integers(0, 61, 6).tolist()
        batch = []
        for _ in range(6):
            tokens = start + draw.integers(0, 61, draw.integers(2, 6)).tolist()
            size = len(tokens) - 1
            targets = tokens[1:]
            if draw.random() < 0.5:  # as the cookbook pads prompts
                targets = [0] * 5 + targets[5:]
            random = lambda: draw.standard_normal(size).astype(np.float32)
            inputs = {"weights": random()} if loss == "cross_entropy" else {
                "logprobs": np.float32(-4) + random(), "advantages": random()}  # fmt: skip
            if loss == "gspo":
                inputs["sequence_ratio_mask"] = (np.arange(size) >= 5).astype(np.float32)
            batch.append(datum(tokens, targets, **inputs))
        found.append(batch)
    return found


def reference_value(loss, p, given):
    """The loss of one datum, written from the documentation of the API."""
    ratio = torch.exp(p - given["logprobs"]) if "logprobs" in given else None
    advantages = given.get("advantages")
    if loss == "cross_entropy":
        return -(p * given["weights"]).sum()
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "ppo":
        return -torch.min(ratio * advantages, ratio.clamp(0.9, 1.3) * advantages).sum()
    if loss == "cispo":
        return -(ratio.clamp(0.9, 1.3).detach() * p * advantages).sum()
    if loss == "dro":
        return -(p * advantages - 0.5 * 0.2 * (p - given["logprobs"]) ** 2).sum()
    mask = given["sequence_ratio_mask"] != 0
    ratio = torch.exp((p.detach() - given["logprobs"])[mask].mean() + p - p.detach())
    return -torch.min(ratio * advantages, ratio.clamp(0.9, 1.3) * advantages).sum()


OPTIONS = {"ppo": (0.9, 1.3), "cispo": (0.9, 1.3), "gspo": (0.9, 1.3)}


def options_of(loss):
    if loss == "dro":
        return {"beta": 0.2}
    return dict(zip(("clip_low_threshold", "clip_high_threshold"), OPTIONS[loss])) if loss in OPTIONS else None


def logprobs_of(model, each):
    ids = torch.tensor([each.model_input.to_ints()])
    targets = torch.as_tensor(each.loss_fn_inputs["target_tokens"].to_numpy())
    logits = torch.log_softmax(model(ids).logits[0], -1)
    return logits.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)


def adapted(folder, adapter):
    """A model of Transformers with an adapter, whose matrices are trained."""
    model = reference.load_model(folder, torch.float64)
    model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True, autocast_adapter_dtype=False)
    return model.to(torch.float64)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_ten_steps_are_those_of_peft_and_pytorch(service, folder, state, loss):
    has_head = loss in ("cross_entropy", "ppo", "dro")
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=7, train_unembed=has_head).result()
    model = adapted(folder, saved(state, training.save_state("start").result().path))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps,
                                  weight_decay=ADAM.weight_decay)  # fmt: skip
    with reference.norms_in_model_dtype(torch.float64):
        for batch in batches(loss):
            ours = training.forward_backward(batch, loss, options_of(loss))
            step = training.optim_step(ADAM)
            total = 0
            for each, output in zip(batch, ours.result().loss_fn_outputs, strict=True):
                p = logprobs_of(model, each)
                assert np.allclose(output["logprobs"].to_numpy(), p.detach().numpy(), rtol=2e-7, atol=2e-7)  # float32 on the wire
                given = {name: torch.as_tensor(value.to_numpy(), dtype=torch.float64) for name, value in each.loss_fn_inputs.items()}
                total = total + reference_value(loss, p, given)
            total.backward()
            assert ours.result().metrics["loss:sum"] == pytest.approx(total.item(), rel=CLOSE, abs=CLOSE)
            norm = torch.nn.utils.clip_grad_norm_(trained, ADAM.grad_clip_norm, error_if_nonfinite=True)
            assert step.result().metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
            optimizer.step()
            optimizer.zero_grad()
        metrics = ours.result().metrics
        assert metrics["espalier/encoded_tokens:sum"] < metrics["espalier/flat_tokens:sum"]
    ours = load_file(saved(state, training.save_state("end").result().path) / "adapter_model.safetensors")
    theirs = {name.replace(".default", ""): value for name, value in model.named_parameters() if value.requires_grad}
    start = load_file(saved(state, f"tinker://{training.model_id}/weights/start") / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys() and any("lm_head" in name for name in ours) == has_head
    moved = max((ours[name] - start[name]).abs().max().item() for name in ours)
    worst = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    assert worst <= CLOSE and moved > 1e-3  # Adam's update is 3e-3 for each step


def test_several_targets_of_a_position(service, folder, state):
    training = service.create_lora_training_client(base_model="tiny", rank=2, seed=3).result()
    draw = np.random.default_rng(seed_of(61))
    tokens = draw.integers(0, 61, 9).tolist()
    targets, weights = draw.integers(1, 61, (8, 5)), draw.standard_normal((8, 5)).astype(np.float32)
    dense = datum(tokens, targets, weights=weights)
    sparse = datum(tokens, torch.from_numpy(np.where(draw.random((8, 5)) < 0.2, targets, 0)), weights=torch.from_numpy(weights))
    assert sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    result = training.forward([dense, sparse], "cross_entropy").result()
    model = adapted(folder, saved(state, training.save_state("start").result().path))
    with reference.norms_in_model_dtype(torch.float64), torch.no_grad():
        total = 0
        for each, output in zip([dense, sparse], result.loss_fn_outputs, strict=True):
            p = logprobs_of(model, each)
            assert output["logprobs"].shape == [8, 5] and np.allclose(output["logprobs"].to_numpy(), p.numpy(), rtol=2e-7)
            total -= (p * torch.as_tensor(each.loss_fn_inputs["weights"].to_numpy())).sum().item()
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=CLOSE)
    assert result.metrics["espalier/encoded_tokens:sum"] <= 10  # of 16 input tokens, one of which ends the rows


def test_custom_losses_by_the_client(service, state, folder):
    """DPO: a forward pass, then cross-entropy whose weights are gradients, of both signs."""
    pair = [datum([1, 2, 3, 4, 5]), datum([1, 2, 3, 9, 8])]

    def dpo(data, logprobs):
        loss = -torch.nn.functional.logsigmoid(0.5 * (logprobs[0].sum() - logprobs[1].sum()))
        return loss, {"margin": (logprobs[0].sum() - logprobs[1].sum()).item()}

    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=9, train_unembed=False).result()
    model = adapted(folder, saved(state, training.save_state("start").result().path))
    result = training.forward_backward_custom(pair, dpo)
    done = training.optim_step(types.AdamParams(learning_rate=1e-2))
    with reference.norms_in_model_dtype(torch.float64):
        loss, metrics = dpo(pair, [logprobs_of(model, each) for each in pair])
        loss.backward()
    norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters() if parameter.requires_grad))
    assert result.result().metrics["margin"] == pytest.approx(metrics["margin"], rel=1e-5)  # by float32 on the wire
    assert done.result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_two_clients_in_turns_are_two_servers(address, folder, tmp_path):
    def run(services):
        models = [each.create_lora_training_client(base_model="tiny", rank=rank, seed=rank).result()
                  for each, rank in zip(services, (2, 5))]  # fmt: skip
        for batch in batches("cross_entropy")[:3]:
            for model, data in zip(models, (batch[:4], batch[2:])):
                model.forward_backward(data, "cross_entropy").result()
            for model in models:
                model.optim_step(ADAM).result()
        return [model.forward(batches("cross_entropy")[0], "cross_entropy").result() for model in models]

    together = run([client(address), client(address)])
    with server(folder, tmp_path / "a") as (first, _), server(folder, tmp_path / "b") as (second, _):
        apart = run([client(first), client(second)])
    for ours, theirs in zip(together, apart):
        assert ours.metrics["loss:sum"] == theirs.metrics["loss:sum"]
    assert together[0].metrics["loss:sum"] != together[1].metrics["loss:sum"]


def test_samples_have_the_logprobs_of_training(service):
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    training.forward_backward([datum([5, 6, 7, 8], weights=[1.0, 1.0, 1.0])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2))
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[60])
    response = sampling.sample(prompt(5, 6, 7), 4, params, include_prompt_logprobs=True).result()
    assert len(response.sequences) == 4 and response.prompt_logprobs[0] is None
    again = sampling.sample(prompt(5, 6, 7), 4, params).result()
    assert [each.tokens for each in again.sequences] == [each.tokens for each in response.sequences]
    for sequence in response.sequences:
        whole = datum([5, 6, 7, *sequence.tokens], weights=[0.0] * (2 + len(sequence.tokens)))
        logprobs = training.forward([whole], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        assert np.allclose(logprobs[2:], sequence.logprobs, rtol=2e-6, atol=2e-6)
        assert np.allclose(logprobs[:2], response.prompt_logprobs[1:], rtol=2e-6, atol=2e-6)
    assert sampling.compute_logprobs(prompt(5, 6, 7)).result()[1:] == pytest.approx(response.prompt_logprobs[1:], rel=1e-6)
    # Negative control: the weights go on, the snapshot stays.
    training.forward_backward([datum([5, 6, 7, 8], weights=[1.0, 1.0, 1.0])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    assert sampling.compute_logprobs(prompt(5, 6, 7)).result()[1:] == pytest.approx(response.prompt_logprobs[1:], rel=1e-6)
    moved = training.forward([datum([5, 6, 7], weights=[0.0, 0.0])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert not np.allclose(moved, response.prompt_logprobs[1:], rtol=1e-3)


def test_inflight_samplers_take_new_weights(service):
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    first = training.save_weights_and_get_sampling_client(kind="inflight").result()
    before = first.compute_logprobs(prompt(5, 6, 7)).result()
    training.forward_backward([datum([5, 6, 7, 8], weights=[1.0, 1.0, 1.0])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    assert first.compute_logprobs(prompt(5, 6, 7)).result() == before
    second = training.save_weights_and_get_sampling_client(kind="inflight").result()
    after = second.compute_logprobs(prompt(5, 6, 7)).result()
    assert after != before and first.compute_logprobs(prompt(5, 6, 7)).result() == after


def test_targets_and_alternatives_of_prompts(service):
    sampling = service.create_sampling_client(base_model="tiny").result()
    ids = torch.tensor([[6, 9], [7, -1], [8, 10]])
    response = sampling.sample(prompt(5, 6, 7, 8), 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True,
                               target_prompt_logprobs=types.TensorData.from_torch(ids), prompt_alt_tokens_k=3).result()  # fmt: skip
    targets = response.target_prompt_logprobs.to_numpy()
    assert np.allclose(targets[:, 0], response.prompt_logprobs[1:], rtol=1e-6) and np.isnan(targets[1, 1])
    tokens, logprobs = response.prompt_alt_tokens.tokens.to_numpy(), response.prompt_alt_tokens.logprobs.to_numpy()
    assert tokens.shape == (3, 3)
    again = sampling.sample(prompt(5, 6, 7, 8), 1, types.SamplingParams(max_tokens=1),
                            target_prompt_logprobs=types.TensorData.from_numpy(tokens)).result()  # fmt: skip
    assert np.allclose(again.target_prompt_logprobs.to_numpy(), logprobs, rtol=1e-6)


def test_stable_reinforce_reads_what_was_sampled(service):
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=4).result()
    sampling = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    sequence = sampling.sample(prompt(5, 6, 7), 1, types.SamplingParams(max_tokens=4, stop=[])).result().sequences[0]
    tokens = [5, 6, 7, *sequence.tokens]
    advantages = [0.0] * 2 + [1.0] * len(sequence.tokens)
    spans = lambda prompt_tokens, sampled, offset=0: [
        types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=offset, length=prompt_tokens),
        types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=sampled)]  # fmt: skip
    each = datum(tokens, advantages=advantages).with_provenance(spans(3, len(sequence.tokens) - 1), spans(2, len(sequence.tokens), 1))
    ours = training.forward_backward([each], "stable_reinforce").result()
    norm = training.optim_step(types.AdamParams()).result().metrics["grad_norm"]
    # On the policy that sampled, the gradient is that of importance_sampling.
    other = service.create_lora_training_client(base_model="tiny", rank=4, seed=4).result()
    logprobs = np.array([0.0] * 2 + list(sequence.logprobs), np.float32)
    other.forward_backward([datum(tokens, advantages=advantages, logprobs=logprobs)], "importance_sampling").result()
    assert other.optim_step(types.AdamParams()).result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert ours.metrics["loss:sum"] == pytest.approx(-sum(sequence.logprobs), rel=1e-5)


def test_the_loop_of_the_page(address, tmp_path):
    """docs/server.md: a user's own loop, in a separate process."""
    (block,) = [each for each in blocks_of((REPOSITORY / "docs/server.md").read_text(encoding="utf-8")) if each.title == "my_loop.py"]
    (tmp_path / "my_loop.py").write_text(block.code)
    environment = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-local"}
    done = subprocess.run([sys.executable, tmp_path / "my_loop.py", "tiny"], capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == 6 and lines[0].startswith("step 0: reward ") and re.search(r"104 tokens, \d+ encoded", lines[0])
    assert re.fullmatch(r"tinker://s-[0-9a-f]+:train:0/weights/last", lines[-1])


def test_most_likely_tokens(service):
    sampling = service.create_sampling_client(base_model="tiny").result()
    response = sampling.sample(prompt(5, 6, 7), 2, types.SamplingParams(max_tokens=3, temperature=0, stop=[]), topk_prompt_logprobs=61,
                               topk_sample_logprobs=2, include_prompt_logprobs=True).result()  # fmt: skip
    top = response.topk_prompt_logprobs_np
    assert top.token_ids.shape == (3, 61) and np.isnan(top.logprobs[0]).all()
    for position, token in ((1, 6), (2, 7)):
        place = top.token_ids[position].tolist().index(token)
        assert top.logprobs[position, place] == pytest.approx(response.prompt_logprobs[position], rel=1e-6)
        assert np.exp(top.logprobs[position].astype(np.float64)).sum() == pytest.approx(1, rel=1e-6)
    for sequence in response.sequences:  # at temperature 0 the most likely token each time
        assert sequence.topk_logprobs_np.token_ids[:, 0].tolist() == list(sequence.tokens)


def test_requests_of_one_call_have_the_tokens_of_each_alone(service):
    """Unlike settings and prompts that share a prefix, at once and one by one."""
    sampling = service.create_sampling_client(base_model="tiny").result()
    asked = [(prompt(5, 6, 7), 2, types.SamplingParams(max_tokens=7, seed=1, stop=[])),
             (prompt(5, 6, 9), 1, types.SamplingParams(max_tokens=4, seed=2, temperature=0.5, top_k=9, stop=[])),
             (prompt(5, 6, 7), 3, types.SamplingParams(max_tokens=9, seed=3, top_p=0.9, stop=[4, 11, 30])),
             (prompt(8,), 1, types.SamplingParams(max_tokens=5, seed=1, temperature=0, stop=[]))]  # fmt: skip
    together = [each.result() for each in [sampling.sample(*one) for one in asked]]
    for response, one in zip(together, asked):
        alone = sampling.sample(*one).result()
        assert [each.tokens for each in response.sequences] == [each.tokens for each in alone.sequences]
        assert [each.stop_reason for each in response.sequences] == [each.stop_reason for each in alone.sequences]
    for sequence in together[2].sequences:
        assert (sequence.stop_reason == "stop") == (sequence.tokens[-1] in (4, 11, 30)) and not {4, 11, 30} & set(sequence.tokens[:-1])


def test_stop_strings_end_with_the_token_that_completes_them():
    """Against the text of all tokens so far, for random tokens of one byte or several."""
    draw = np.random.default_rng(seed_of(62))
    words = ["a", "b", "ab", "\n", "User", ":", "é"]

    class Tokenizer:
        def decode(self, tokens):
            return "".join(words[token] for token in tokens)

    for _ in range(200):
        watch = StopTexts(Tokenizer)
        watch.add(0, ["\n\nUser:", "aba"])
        tokens = []
        for token in draw.integers(0, len(words), 40).tolist():
            tokens.append(token)
            text = Tokenizer().decode(tokens)
            (ends,) = watch(np.array([[0, 0, token]]))
            assert ends == ("\n\nUser:" in text or "aba" in text)
            if ends:
                break
