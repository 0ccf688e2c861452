# SPDX-License-Identifier: Apache-2.0
"""Models of `espalier serve` whose whole weights are trained (LoRA rank 0), by the official client."""

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

import tinker
import torch
from safetensors.torch import load_file
from tinker import types

import transformers_reference as reference
from engines import init_model
from servers import Local, client, datum, parked, prompt, server
from test_server import ADAM, CLOSE, batches, logprobs_of, options_of, reference_value, saved

PARAMS = types.SamplingParams(max_tokens=5, seed=4, stop=[])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def local(folder, tmp_path_factory):
    with Local(folder, tmp_path_factory.mktemp("state"), full_models=2) as local:
        yield local


@pytest.fixture
def service(local):
    """Its models end with it."""
    with client(local.address) as service:
        yield service


def training_of(service, rank=0):
    return service.create_lora_training_client(base_model="tiny", rank=rank, seed=1).result()


def step(training, number):
    done = training.forward_backward(batches("cross_entropy")[number], "cross_entropy")
    training.optim_step(ADAM).result()
    return done.result().metrics["loss:sum"]


def scores(model):
    """Of a few tokens, by a model in training or a sampler."""
    if isinstance(model, tinker.SamplingClient):
        return np.array(model.compute_logprobs(prompt(5, 6, 7, 8)).result()[1:])
    output = model.forward([datum([5, 6, 7, 8], weights=[0.0] * 3)], "cross_entropy").result().loss_fn_outputs[0]
    return output["logprobs"].to_numpy()


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_ten_steps_are_those_of_pytorch(local, service, folder, loss):
    training = training_of(service)
    model = reference.load_model(folder, torch.float64)
    matrices, vectors = [], []
    for parameter in model.parameters():
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps, weight_decay=ADAM.weight_decay)  # fmt: skip
    with reference.norms_in_model_dtype(torch.float64):
        for batch in batches(loss):
            ours = training.forward_backward(batch, loss, options_of(loss))
            update = training.optim_step(ADAM)
            total = 0
            for each in batch:
                given = {name: torch.as_tensor(value.to_numpy(), dtype=torch.float64) for name, value in each.loss_fn_inputs.items()}
                total = total + reference_value(loss, logprobs_of(model, each), given)
            total.backward()
            assert ours.result().metrics["loss:sum"] == pytest.approx(total.item(), rel=CLOSE, abs=CLOSE)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.grad_clip_norm, error_if_nonfinite=True)
            assert update.result().metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
            optimizer.step()
            optimizer.zero_grad()
    path = training.save_state("end").result().path
    ours, start = load_file(saved(local.store.folder, path) / "model.safetensors"), load_file(folder / "model.safetensors")
    theirs = model.state_dict()
    assert ours.keys() == start.keys() <= theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) <= CLOSE
    assert max((ours[name] - start[name]).abs().max().item() for name in ours) > 1e-3
    info = training.get_info()
    assert info.is_lora is False and info.lora_rank == 0


def test_snapshots_stay_as_they_were(service):
    training, adapted = training_of(service), training_of(service, rank=2)
    of_adapter = adapted.save_weights_and_get_sampling_client().result()
    before = [scores(of_adapter), scores(service.create_sampling_client(base_model="tiny").result())]
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshots, expected = [], []
    for number in range(3):
        step(training, number)
        snapshots.append(training.save_weights_and_get_sampling_client().result())
        expected.append(scores(training))
    assert min(np.abs(expected[a] - expected[b]).max() for a, b in ((0, 1), (1, 2), (0, 2))) > 1e-3
    # All at once, in turns: each has its own weights.
    order = [0, 1, 0, 2, 1, 1, 2, 0]
    asked = [snapshots[each].sample(prompt(5, 6, 7, 8), 2, PARAMS, include_prompt_logprobs=True) for each in order]
    answers = [each.result() for each in asked]
    for each, answer in zip(order, answers, strict=True):
        assert np.allclose(answer.prompt_logprobs[1:], expected[each], rtol=2e-6, atol=2e-6)
        first = answers[order.index(each)]
        assert [sequence.tokens for sequence in answer.sequences] == [sequence.tokens for sequence in first.sequences]
    for sequence in answers[order.index(2)].sequences:  # of the weights as they still are
        whole = datum([5, 6, 7, 8, *sequence.tokens], weights=[0.0] * (3 + len(sequence.tokens)))
        found = training.forward([whole], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        assert np.allclose(found[3:], sequence.logprobs, rtol=2e-6, atol=2e-6)
    assert np.allclose(scores(inflight), before[1], rtol=2e-6)
    training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert np.allclose(scores(inflight), expected[2], rtol=2e-6)
    # The weights of the model and its adapters are those of before.
    assert (scores(of_adapter) == before[0]).all()
    assert (scores(service.create_sampling_client(base_model="tiny").result()) == before[1]).all()


def test_checkpoints_continue_with_the_same_bits(service, folder, local, tmp_path):
    training = training_of(service)
    step(training, 0)
    path = training.save_state("middle").result().path
    at_path = scores(training)
    losses = [step(training, number) for number in (1, 2)]
    training.load_state_with_optimizer(path).result()
    assert [step(training, number) for number in (1, 2)] == losses
    second = service.create_training_client_from_state_with_optimizer(path).result()
    assert [step(second, number) for number in (1, 2)] == losses
    second.load_state(path).result()  # Negative control: without the optimiser.
    assert step(second, 1) == losses[0] and step(second, 2) != losses[1]
    sampling = service.create_sampling_client(model_path=path).result()
    rest = service.create_rest_client()
    assert rest.get_weights_info_by_tinker_path(path).result().is_lora is False
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert np.allclose(scores(sampling), at_path, rtol=2e-6)
    named = training.save_weights_for_sampler("named").result().path
    assert np.allclose(scores(service.create_sampling_client(model_path=named).result()), scores(training), rtol=2e-6)


def test_a_server_that_starts_again_has_them(folder, tmp_path):
    with server(folder, tmp_path, "--full-models", 1) as (address, _), client(address) as service:
        training = training_of(service)
        step(training, 0)
        path, expected = training.save_state("last").result().path, scores(training)
    with server(folder, tmp_path, "--full-models", 1) as (address, _), client(address) as service:
        training = service.create_training_client_from_state_with_optimizer(path).result()
        assert (scores(training) == expected).all()
    with server(folder, tmp_path) as (address, _), client(address) as service:  # It does not train, but samples.
        assert np.allclose(scores(service.create_sampling_client(model_path=path).result()), expected, rtol=2e-6)


def refusal(work):
    with pytest.raises(tinker.TinkerError) as error:
        work().result()
    return str(error.value)


def test_what_is_refused(service, local, folder, tmp_path):
    first, second = training_of(service), training_of(service)
    assert "at most 2 models with whole weights (--full-models)" in refusal(
        lambda: service.create_lora_training_client(base_model="tiny", rank=0))
    assert "train_mlp, train_attn and train_unembed with rank 0" in refusal(
        lambda: service.create_lora_training_client(base_model="tiny", rank=0, train_mlp=False))
    adapted = training_of(service, rank=2)
    path = adapted.save_state("adapter").result().path
    assert "expected weights of tiny with" in refusal(lambda: first.load_state(path))
    local.result(local.post("unload_model", {"model_id": second.model_id}))
    assert training_of(service).get_info().lora_rank == 0
    with Local(folder, tmp_path) as none, client(none.address) as without:
        assert "at most 0 models" in refusal(lambda: without.create_lora_training_client(base_model="tiny", rank=0))


def test_a_session_that_ends_leaves_no_weights(local):
    with client(local.address) as service:
        training = training_of(service)
        sampling = training.save_weights_and_get_sampling_client().result()
        training.save_weights_and_get_sampling_client(kind="inflight").result()
        step(training, 0)
        scores(sampling)
        worker = local.service.model(training.model_id).worker
        snapshots = local.service.sampler(sampling._sampling_session_id).worker
        assert len(parked(local.store.folder)) == 2
    assert local.service._full_models == set() and not hasattr(worker, "engine") and worker._thread._shutdown
    snapshots._thread.submit(int).result()  # after what was submitted before
    assert parked(local.store.folder) == [] and not hasattr(snapshots, "engine")


def test_the_oldest_snapshots_of_a_session_go(local, service, monkeypatch):
    monkeypatch.setattr("espalier.server.service.MAX_FULL_SNAPSHOTS", 2)
    training = training_of(service)
    first, second, third = (training.save_weights_and_get_sampling_client().result() for _ in range(3))
    assert "sampling_session_id" in refusal(lambda: first.sample(prompt(5, 6), 1, PARAMS))
    assert (scores(second) == scores(third)).all()
    assert len(parked(local.store.folder)) == 2


def test_a_snapshot_that_is_dropped_while_it_waits(local, service):
    training = training_of(service)
    kept, gone = (training.save_weights_and_get_sampling_client().result() for _ in range(2))
    sampler = local.service.sampler(gone._sampling_session_id)
    sampler.worker.drop(sampler.owned)
    assert "a sampler that is no more" in refusal(lambda: gone.sample(prompt(5, 6), 1, PARAMS))
    assert len(kept.sample(prompt(5, 6), 1, PARAMS).result().sequences) == 1
