# SPDX-License-Identifier: Apache-2.0
"""Thousands of mutated requests to every route of `espalier serve`, while three honest clients train: their results are those of a
calm run, bit for bit, and the server is afterwards as it was before."""

import json

import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from starlette.routing import Route

from conftest import seed_of
from espalier.server.app import App
from server_load import KEY, KEYS, POOL_THREADS, Program, Server, Storm, calm, until
from server_mutator import NEVER_REFUSED, NOT_SERVED, Mutator, Party, accepted_and_refused, check_generators, routes
from servers import model_with_texts


@pytest.fixture(scope="module")
def all_routes(tmp_path_factory):
    return routes(tmp_path_factory.mktemp("routes") / "state")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return model_with_texts(espalier, tmp_path_factory.mktemp("models") / "bytes")


def test_every_route_has_a_generator(all_routes):
    check_generators(all_routes)
    assert len(all_routes) > 50 and sum(isinstance(route.kind, type) for route in all_routes) > 20


@pytest.mark.parametrize("path, methods", [("/api/v1/new_call", ["POST"]), ("/api/v1/new/{thing}", ["GET"])])
def test_a_new_route_is_not_forgotten(tmp_path, monkeypatch, path, methods):
    async def handler(request):
        raise AssertionError

    before = App._openai_routes
    monkeypatch.setattr(App, "_openai_routes", lambda self: [Route(path, self._safe(handler), methods=methods), *before(self)])
    with pytest.raises(AssertionError, match="/api/v1/new"):
        check_generators(routes(tmp_path / "state"))


def table(mutators):
    """Answers by kind of request and status."""
    counts = {}
    for mutator in mutators:
        for kind, statuses in mutator.statuses.items():
            for (_, status), count in statuses.items():
                counts.setdefault(kind, {}).setdefault(str(status), 0)
                counts[kind][str(status)] += count
    return {kind: dict(sorted(statuses.items())) for kind, statuses in counts.items()}


def test_mutated_requests_change_nothing_for_others(all_routes, folder, tmp_path, long_tests):
    seed = seed_of(90)
    count, valid_share = (5000, 0.2) if long_tests else (130, 0.0)
    print(f"seed {seed}, {2 * count} mutated requests")
    programs = [Program(number, seed) for number in range(3)]
    with Server(folder, tmp_path / "state", "--max-adapters", 12, "--prefix-cache", "16MiB") as server:
        expected = calm(server, programs)
        adapter = next((server.state / "runs").glob("*/weights/last/adapter"))
        files = {name: (adapter / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
        storm = Storm(server, programs, expected)
        other = Party(server.address, KEYS["other"], seed + 1, storm.ids, files)
        same = Party(server.address, KEY, seed + 2, lambda: [other.session, *other.models, *other.samplers, *other.paths[-3:]], files)
        for party in (other, same):  # what is loaded once is there
            party.renew()
            party.finish()
            party.http.close()
            party.connect()
        before = server.figures()
        mutators = [Mutator(server, all_routes, party, count, valid_share) for party in (other, same)]
        with storm:
            for mutator in mutators:
                mutator.start()
            for mutator in mutators:
                while mutator.is_alive():
                    mutator.join(0.5)
                    for each in (*mutators, storm, server):  # the first one names the request
                        each.check()
            for each in (*mutators, storm):
                each.stop()
        for party in (other, same):
            party.http.close()
        until(lambda: server.figures()["descriptors"] <= before["descriptors"], f"{before['descriptors']} descriptors, now "
              f"{server.figures()['descriptors']}")  # fmt: skip
        after = server.figures()
        server.check()
        print(f"before {before}, after {after}; {storm.steps} steps and {storm.checkpoints} checkpoints were compared")
        assert after["threads"] <= before["threads"] + POOL_THREADS
    answers = table(mutators)
    print(json.dumps(answers, indent=1))
    assert sum(sum(statuses.values()) for statuses in answers.values()) >= 2 * count
    accepted, refused = accepted_and_refused(mutators)
    for route in all_routes:
        assert accepted[route.name] or route.name in NOT_SERVED, f"{route.name}: no request was accepted"
        assert not (accepted[route.name] and route.name in NOT_SERVED), f"{route.name}: a request was accepted"
        assert refused[route.name] or route.name in NEVER_REFUSED, f"{route.name}: no request was refused"
    assert storm.steps and storm.checkpoints
