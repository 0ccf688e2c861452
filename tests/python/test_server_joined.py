# SPDX-License-Identifier: Apache-2.0
"""`espalier serve --join-clients`: passes of several adapters as one, against the same server without."""

import time

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from tinker import types

from conftest import seed_of
from engines import init_model
from espalier.server import training
from servers import Local, client, datum

ADAM = types.AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
RANKS = (2, 5, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"), "qwen3")


def batch(client, step):
    """The same prompt for all clients, which shares nothing between them."""
    draw = np.random.default_rng([seed_of(71), client, step])
    some = lambda size: draw.integers(0, 61, size).tolist()
    found = []
    for _ in range(4):
        tokens = [5, 6, 7, 8, *some(draw.integers(2, 6))]
        found.append(datum(tokens, weights=draw.standard_normal(len(tokens) - 1).astype(np.float32)))
    targets = types.TensorData(data=some(8), dtype="int64", shape=[4, 2])
    weights = types.TensorData(data=draw.standard_normal(8).tolist(), dtype="float32", shape=[4, 2])
    return [*found, types.Datum(model_input=types.ModelInput.from_ints(some(4)), loss_fn_inputs={"target_tokens": targets, "weights": weights})]


class Calls:
    """The adapters of each forward_backward of an engine."""

    def __init__(self, local, monkeypatch):
        self.seen = []
        original = local.base.engine.forward_backward

        def counted(*arguments, **options):
            self.seen.append(len({id(each) for each in options.get("adapters") or [None]}))
            return original(*arguments, **options)

        monkeypatch.setattr(local.base.engine, "forward_backward", counted)


def at_once(local, requests):
    """The futures of requests of which none begins before all have come: another one is under way until then."""
    plug = client(local.address).create_lora_training_client(base_model="tiny", rank=1, seed=1).result()
    models = {model.model_id: model for session in local.service.sessions.values() for model in session.models.values()}
    plugged_model = models.pop(plug.model_id)

    def until(is_so):
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with local.held():
        plugged = plug.forward([datum([1, 2, 3], weights=[1.0, 1.0])], "cross_entropy")
        until(lambda: plugged_model._next == 2)
        futures = [request() for request in requests]
        until(lambda: sum(len(model._waiting) for model in models.values()) == len(requests))
        time.sleep(2 * training.WINDOW_SECONDS)
    plugged.result()
    return futures


def steps_of(local, clients):
    """Losses and log-probabilities of two steps of clients that send theirs at the same time."""
    models = [client(local.address).create_lora_training_client(base_model="tiny", rank=RANKS[k], seed=k).result() for k in clients]
    told = []
    for step in range(2):
        sent = [lambda model=model, k=k: model.forward_backward(batch(k, step), "cross_entropy") for model, k in zip(models, clients)]
        for future in at_once(local, sent):
            result = future.result()
            told += [np.asarray([result.metrics["loss:sum"], result.metrics["espalier/encoded_tokens:sum"]]),
                     *(output["logprobs"].to_numpy() for output in result.loss_fn_outputs)]  # fmt: skip
        for model in models:
            told.append(np.asarray([model.optim_step(ADAM).result().metrics["grad_norm"]]))
    return told


def close(first, second):
    return len(first) == len(second) and all(np.allclose(a, b, rtol=2e-7, atol=2e-7) for a, b in zip(first, second))


def test_joined_clients_get_what_they_get_alone(folder, tmp_path, monkeypatch):
    with Local(folder, tmp_path / "joined", joins_clients=True) as joined, Local(folder, tmp_path / "apart") as apart:
        calls, others = Calls(joined, monkeypatch), Calls(apart, monkeypatch)
        together, alone = steps_of(joined, range(3)), steps_of(apart, range(3))
        assert calls.seen == [3, 3] and others.seen == [1] * 6
        assert close(together, alone)
        # Negative control: clients in another order.
        assert not close(steps_of(apart, (1, 0, 2)), alone)


def test_what_is_joined(folder, tmp_path, monkeypatch):
    with Local(folder, tmp_path, joins_clients=True) as local:
        calls = Calls(local, monkeypatch)
        first, second = (client(local.address).create_lora_training_client(base_model="tiny", rank=2, seed=k).result() for k in (1, 2))
        send = lambda model, data: lambda: model.forward_backward(data, "cross_entropy")
        data = [datum([1, 2, 3, 4], weights=[1.0] * 3)]

        def seen(*requests):
            calls.seen.clear()
            for future in at_once(local, requests):
                future.result()
            return calls.seen

        assert seen(send(first, data), send(second, data)) == [2]
        assert seen(send(first, data), send(second, data)) == [1, 1]  # they have gradients, which a failure would cost
        for model in (first, second):
            model.optim_step(ADAM).result()
        monkeypatch.setattr(training, "JOINED_TOKENS", 5)
        assert seen(send(first, data), send(second, data)) == [1, 1]


def test_a_fault_is_that_of_one_client(folder, tmp_path, monkeypatch):
    with Local(folder, tmp_path / "joined", joins_clients=True) as joined, Local(folder, tmp_path / "apart") as apart:
        calls = Calls(joined, monkeypatch)
        results = []
        for local in (joined, apart):
            models = [client(local.address).create_lora_training_client(base_model="tiny", rank=2, seed=k).result() for k in range(3)]
            data = [batch(0, 0), [datum([1, 2, 3], weights=[1e38, -1e38], logprobs=[-1e38, -1e38], advantages=[1e38, 1e38])], batch(2, 0)]
            losses = ["cross_entropy", "importance_sampling", "cross_entropy"]
            data[1][0].loss_fn_inputs.pop("weights")
            sent = [lambda model=model, rows=rows, loss=loss: model.forward_backward(rows, loss)
                    for model, rows, loss in zip(models, data, losses)]  # fmt: skip
            good, bad, also_good = at_once(local, sent)
            with pytest.raises(Exception, match="expected finite numbers"):
                bad.result()
            results.append([np.asarray([each.result().metrics["loss:sum"]]) for each in (good, also_good)]
                           + [np.asarray([model.optim_step(ADAM).result().metrics["grad_norm"]]) for model in (models[0], models[2])])  # fmt: skip
        assert calls.seen == [3, 1, 1, 1] and close(*results)
