# SPDX-License-Identifier: Apache-2.0
"""Every method of the official training, sampling and REST clients against `espalier serve`: with those that test_server.py calls
(test_every_method_is_called)."""

import asyncio
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

import tinker
from tinker import types

from conftest import NATIVE, write_model
from engines import init_model
from servers import Local, client, datum, prompt

ADAM = types.AdamParams(learning_rate=1e-2)
PARAMS = types.SamplingParams(max_tokens=3, seed=5, stop=[])


@pytest.fixture(scope="module")
def local(tmp_path_factory, espalier):
    folder = init_model(espalier, tmp_path_factory.mktemp("qwen3"))
    with Local(folder, tmp_path_factory.mktemp("state")) as local:
        yield local


@pytest.fixture
def service(local):
    return client(local.address)


@pytest.fixture
def rest(local):
    return tinker.RestClient(base_url=local.address, api_key="tml-local")


def steps(training, first, last):
    for number in range(first, last):
        training.forward_backward([datum([5, 6, 7 + number, 9], weights=[1.0, 0.5, -0.5])], "cross_entropy")
        training.optim_step(ADAM).result()


def loss(training):
    return training.forward([datum([1, 2, 3, 4], weights=[1.0, 1.0, 1.0])], "cross_entropy").result().metrics["loss:sum"]


# Of the account at the hosted service.
ADMIN = [("get_audit_log",), ("get_billing_usage", "2026-01-01", "2026-02-01"), ("get_current_checkpoint_storage_usage",)]
# Answered by the client itself, or called by the others.
OF_THE_CLIENT = {"close", "create", "get_console_url", "get_telemetry", "on_queue_state_change"}


def test_every_method_is_called(service, rest):
    """By its name in the tests of the server, or with `_async` after it."""
    texts = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_server*.py"))
    for kind in (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient):
        names = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))} - OF_THE_CLIENT
        assert len(names) > 3
        assert [name for name in sorted(names) if not re.search(rf"\b{name.removesuffix('_async')}\b", texts)] == [], kind


def test_what_the_server_can(service, rest):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = service.get_server_capabilities(), rest.get_server_capabilities().result()
    assert [[each.model_name for each in one.supported_models] for one in found] == [["tiny"], ["tiny"]]


def test_the_tokenizer_of_a_model(service, local, tmp_path):
    """That of its folder. (A sampling client knows the name of the model alone, and asks the Hub for it.)"""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(write_model(tmp_path / name, NATIVE) / name, local.base.folder)
    tokenizer = training_of(service).get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("two words")) == "two words"


def training_of(service, **options):
    return service.create_lora_training_client(base_model="tiny", rank=2, seed=1, **options).result()


def test_a_state_goes_on_bit_for_bit(service):
    whole = training_of(service)
    steps(whole, 0, 2)
    path = whole.save_state("mid").result().path
    middle = loss(whole)
    steps(whole, 2, 4)
    end = loss(whole)
    with_optimizer = service.create_training_client_from_state_with_optimizer(path).result()
    assert with_optimizer.get_info().model_data.model_name == "tiny" and with_optimizer.get_info().lora_rank == 2
    assert loss(with_optimizer) == middle
    steps(with_optimizer, 2, 4)
    assert loss(with_optimizer) == end
    without = service.create_training_client_from_state(path).result()
    assert loss(without) == middle
    steps(without, 2, 4)
    assert loss(without) != end  # its moments began anew
    into = training_of(service)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        into.load_state_with_optimizer(path).result()
        steps(into, 2, 4)
        assert loss(into) == end
        into.load_state(path).result()
        assert loss(into) == middle
        steps(into, 2, 4)
    assert loss(into) == loss(without)


def test_deprecated_asynchronous_forms(service):
    async def calls():
        training = await service.create_lora_training_client_async(base_model="tiny", rank=2, seed=1)
        first = await training.forward_async([datum([1, 2, 3, 4], weights=[1.0, 1.0, 1.0])], "cross_entropy")
        second = await training.forward_backward_async([datum([1, 2, 3, 4], weights=[1.0, 1.0, 1.0])], "cross_entropy")
        step = await training.optim_step_async(ADAM)
        saved = await training.save_state_async("by_async")
        found = [await first, await second, await step, await saved]
        again = await service.create_training_client_from_state_with_optimizer_async(found[-1].path)
        sampling = await training.save_weights_and_get_sampling_client_async()
        sample = await sampling.sample_async(prompt(1, 2), 2, PARAMS)
        logprobs = await sampling.compute_logprobs_async(prompt(1, 2, 3))
        return found, again, sample, logprobs, await service.get_server_capabilities_async()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (first, second, step, saved), again, sample, logprobs, capabilities = asyncio.run(calls())
    assert first.metrics["loss:sum"] == second.metrics["loss:sum"] and step.metrics["grad_norm"] > 0
    assert saved.path.endswith("/weights/by_async") and loss(again) < first.metrics["loss:sum"]
    assert len(sample.sequences) == 2 and logprobs[0] is None and [each.model_name for each in capabilities.supported_models] == ["tiny"]


def test_asynchronous_forms_of_training(service):
    async def calls():
        training = await service.create_lora_training_client_async(base_model="tiny", rank=2, seed=1)
        info = await training.get_info_async()
        handle = await (await training.forward_backward_custom_async([datum([1, 2, 3])], lambda _, logprobs: (-logprobs[0].sum(), {})))
        state = (await (await training.save_state_async("async"))).path
        sampler = (await (await training.save_weights_for_sampler_async("async"))).path
        external = (await (await training.save_weights_external_async("async"))).path
        await (await training.load_state_async(state))
        await (await training.load_state_with_optimizer_async(state))
        again = await service.create_training_client_from_state_async(state)
        bases = [await (await service.create_sampling_client_async(base_model="tiny")).get_base_model_async(),
                 await (await training.create_sampling_client_async(sampler)).get_base_model_async()]  # fmt: skip
        return training, info, handle, external, again, bases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training, info, custom, external, again, bases = asyncio.run(calls())
    assert info.model_data.model_name == "tiny" and custom.loss_fn_outputs and external.endswith("/async")
    assert bases == ["tiny", "tiny"] and loss(again) == loss(training)


def test_asynchronous_forms_of_rest(service, rest):
    training = training_of(service)
    path = training.save_state("one").result().path
    external = training.save_weights_external("out").result().path
    sampler = training.save_weights_and_get_sampling_client().result()._sampling_session_id
    session, run = service.holder.get_session_id(), training.model_id
    reads = [("get_session", session), ("list_sessions",), ("get_training_run", run), ("get_training_run_by_tinker_path", path),
             ("list_checkpoints", run), ("list_training_runs",), ("list_user_checkpoints",), ("get_sampler", sampler)]  # fmt: skip
    refused = [("publish_checkpoint_from_tinker_path", path), ("unpublish_checkpoint_from_tinker_path", path),
               ("assign_session_project", session, "p"), ("export_session_trace", session), *ADMIN]  # fmt: skip

    async def calls():
        found = [await getattr(rest, name + "_async")(*words) for name, *words in reads]
        urls = (await rest.get_external_weights_urls_async(external)).urls
        for name, *words in refused:
            with pytest.raises(tinker.NotFoundError):
                await getattr(rest, name + "_async")(*words)
        copy = await rest.copy_weights_async(path, "project")
        await rest.set_checkpoint_ttl_from_tinker_path_async(copy, 3600)
        (listed,) = (await rest.list_checkpoints_async(local_path(copy).run)).checkpoints
        await rest.delete_checkpoint_from_tinker_path_async(copy)
        await rest.delete_checkpoint_async(run, "weights/one")
        return found, urls, listed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [getattr(rest, name)(*words).result() for name, *words in reads]
        found, urls, listed = asyncio.run(calls())
    assert found == expected and "adapter_config.json" in urls and listed.expires_at is not None
    assert path not in [each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints]


def test_samplers_of_a_checkpoint(service, rest, local):
    training = training_of(service)
    steps(training, 0, 2)
    path = training.save_weights_for_sampler("mine").result().path
    expected = training.forward([datum([1, 2, 3, 4], weights=[0.0] * 3)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    for sampling in (service.create_sampling_client(model_path=path).result(), training.create_sampling_client(path).result()):
        assert sampling.get_base_model() == "tiny"
        assert np.allclose(sampling.compute_logprobs(prompt(1, 2, 3, 4)).result()[1:], expected, rtol=1e-6)
        about = rest.get_sampler(sampling._sampling_session_id).result()
        assert (about.model_path, about.base_model) == (path, "tiny")
    base = service.create_sampling_client(base_model="tiny").result()
    assert not np.allclose(base.compute_logprobs(prompt(1, 2, 3, 4)).result()[1:], expected, rtol=1e-3)
    with pytest.raises(tinker.NotFoundError, match="expected a checkpoint, found none"):
        service.create_sampling_client(model_path=path + "x").result()


def test_files_for_use_elsewhere(service, rest, local):
    training = training_of(service)
    path = training.save_weights_external("out").result().path
    found = rest.get_external_weights_urls(path).result()
    folder = local.store.find(local_path(path))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(found.urls)
    for name, url in found.urls.items():
        assert httpx.get(url).content == (folder / name).read_bytes()
    with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients"):
        training.save_weights_external("secret", age_encryption_recipients=["age1"]).result()
    assert loss(training) > 0  # later requests have their turn


def local_path(text):
    from espalier.server.store import CheckpointPath

    return CheckpointPath.parse(text)


def test_lists_of_runs_and_checkpoints(service, rest):
    training = training_of(service, user_metadata={"kind": "lists"})
    paths = [training.save_state(name, user_metadata={"name": name}).result().path for name in ("a", "b")]
    paths.append(training.save_weights_for_sampler("c", ttl_seconds=3600).result().path)
    run = rest.get_training_run(training.model_id).result()
    assert (run.training_run_id, run.base_model, run.lora_rank, run.is_lora) == (training.model_id, "tiny", 2, True)
    assert run.user_metadata == {"kind": "lists"} and rest.get_training_run_by_tinker_path(paths[0]).result() == run
    assert run.last_checkpoint.tinker_path == paths[1] and run.last_sampler_checkpoint.tinker_path == paths[2]
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [each.tinker_path for each in listed] == paths[::-1]  # the newest first
    assert listed[0].expires_at is not None and listed[1].expires_at is None and listed[1].size_bytes > 1000
    assert rest.list_training_runs(limit=1).result().training_runs == [run]
    page = rest.list_user_checkpoints(limit=2, offset=1).result()
    assert [each.tinker_path for each in page.checkpoints] == paths[1::-1] and page.cursor.total_count >= 3
    info = rest.get_weights_info_by_tinker_path(paths[0]).result()
    assert (info.base_model, info.lora_rank, info.is_lora) == ("tiny", 2, True)
    rest.set_checkpoint_ttl_from_tinker_path(paths[0], 3600).result()
    rest.set_checkpoint_ttl_from_tinker_path(paths[2], None).result()
    assert [each.expires_at is None for each in rest.list_checkpoints(training.model_id).result().checkpoints] == [True, True, False]
    rest.delete_checkpoint_from_tinker_path(paths[1]).result()
    rest.delete_checkpoint(training.model_id, "weights/a").result()
    assert [each.tinker_path for each in rest.list_checkpoints(training.model_id).result().checkpoints] == paths[2:]
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(paths[1]).result()
    with pytest.raises(tinker.NotFoundError):
        rest.get_training_run("s-0:train:0").result()
    session = rest.get_session(service.holder.get_session_id()).result()
    assert session.training_run_ids == [training.model_id]
    assert service.holder.get_session_id() in rest.list_sessions(limit=1000).result().sessions


def test_copies_of_weights(service, rest, local):
    training = training_of(service)
    steps(training, 0, 1)
    path = training.save_state("one").result().path
    copy = rest.copy_weights(path, "project", ttl_seconds=3600).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert copy != path and loss(service.create_training_client_from_state(copy).result()) == loss(training)
    (listed,) = rest.list_checkpoints(local_path(copy).run).result().checkpoints
    assert listed.tinker_path == copy and listed.expires_at is not None


def test_calls_of_the_hosted_service_alone(service, rest):
    path = training_of(service).save_state("private").result().path
    for call in (rest.publish_checkpoint_from_tinker_path, rest.unpublish_checkpoint_from_tinker_path):
        with pytest.raises(tinker.NotFoundError, match="those of the hosted service"):
            call(path).result()
    session = service.holder.get_session_id()
    for call in (lambda: rest.assign_session_project(session, "p"), lambda: rest.export_session_trace(session),
                 lambda: rest.search_sessions(types.SessionSearchRequest())):  # fmt: skip
        with pytest.raises(tinker.NotFoundError, match="those of the hosted service"):
            call().result()
    for name, *words in ADMIN:
        with warnings.catch_warnings(), pytest.raises(tinker.NotFoundError):
            warnings.simplefilter("ignore")
            getattr(rest, name)(*words).result()
    with pytest.raises(RuntimeError, match="whoami requires JWT"):
        rest.whoami().result()


def test_a_sampler_in_another_process(service, local):
    sampling = training_of(service).save_weights_and_get_sampling_client().result()
    expected = sampling.sample(prompt(1, 2), 1, PARAMS).result().sequences[0].tokens
    code = ("import pickle, sys; from tinker import types; client = pickle.load(sys.stdin.buffer);"
            "found = [client.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=3, seed=5, stop=[])).result()"
            " for _ in range(2)]; print([list(each.sequences[0].tokens) for each in found], found[1].sequences[0].sequence_id)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(sampling), capture_output=True)
    tokens, _, sequence_id = done.stdout.decode().strip().rpartition(" ")
    assert done.returncode == 0, done.stderr.decode()
    assert tokens == str([list(expected)] * 2) and sequence_id.endswith(":1000000001:0")
    assert local.service.sampler(sampling._sampling_session_id).clients == 1
    shadow = tinker.SamplingClient.from_sampler_handle(sampling.get_sampler_handle(), api_key="tml-local")
    assert shadow.sample(prompt(1, 2), 1, PARAMS).result().sequences[0].tokens == expected


def test_results_told_together(service, local, monkeypatch):
    """retrieve_futures, which clients use where their config says so."""
    holder = service.holder
    monkeypatch.setattr(holder, "_client_config", holder._client_config.model_copy(update={"sample_use_retrieve_futures": True}))
    sampling = training_of(service).save_weights_and_get_sampling_client().result()
    found = [sampling.sample(prompt(1, token), 2, PARAMS) for token in range(20)]
    assert [len(each.result().sequences) for each in found] == [2] * 20
    told = local.service.sampler(sampling._sampling_session_id).completions
    assert told[0].count == 20
    bad = {"target": {"sampling_session_id": sampling._sampling_session_id}, "prev_cursor": 20, "timeout": 0}
    assert local.post("retrieve_futures", bad).json() == {"completions": [], "cursor": 20}
    assert len(told[0]._kept) == 0  # what the client has seen is forgotten


def test_losses_of_ones_own(service):
    handle = service.create_custom_loss(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}).result()
    training = training_of(service)
    expected = loss(training)
    result = training.forward_backward_custom([datum([1, 2, 3, 4])], handle).result()
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)


def test_models_are_unloaded(local):
    model = local.model()
    resident = len(local.base._resident)
    first = local.post("unload_model", {"model_id": model})
    assert local.result(first) == {"type": "unload_model", "model_id": model}
    assert len(local.base._resident) == resident - 1
    assert local.post("unload_model", {"model_id": model}).json() == first.json()  # a response that was lost
    assert local.post("get_info", {"model_id": model}).status_code == 404


def test_a_client_that_closes_leaves_nothing(local):
    with client(local.address) as service:
        training = training_of(service)
        sampling = training.save_weights_and_get_sampling_client().result()
        training.save_weights_and_get_sampling_client(kind="inflight").result()
        training.save_state("stays").result()
        session = service.holder.get_session_id()
        adapters = [training_adapter(local, training), local.service.sampler(sampling._sampling_session_id).owned]
        sources = len(local.base.sources)
    assert session not in local.service.sessions and len(local.base.sources) == sources - 1
    assert all(adapter.adapter is None and id(adapter) not in local.base._resident for adapter in adapters)
    assert local.post("session_heartbeat", {"session_id": session}).status_code == 410
    assert local.store.find(local_path(f"tinker://{training.model_id}/weights/stays")).is_dir()


def training_adapter(local, training):
    return local.service.model(training.model_id).weights
