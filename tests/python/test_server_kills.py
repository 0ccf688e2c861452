# SPDX-License-Identifier: Apache-2.0
"""`espalier serve` is killed at random moments while three honest clients train and a mutator sends what it likes: each checkpoint
that was acknowledged is there after the next start, with its bits, and what goes on from it has the results of a calm run."""

import random
import time

import httpx
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from conftest import seed_of
from server_load import KEY, KEYS, Program, Server, Storm, calm, page_of_checkpoints, until
from server_mutator import Mutator, Party, routes
from servers import model_with_texts

FLAGS = ("--max-adapters", 4, "--prefix-cache", "16MiB", "--result-seconds", 600)


def check_checkpoints(server, storm, *, all_bits):
    """Raises where an acknowledged checkpoint is missing or has other bits than in a calm run; of runs that are over only where
    all_bits. Returns how many there are."""
    missing = set(storm.acknowledged()) - set(page_of_checkpoints(server))
    assert not missing, f"{len(missing)} acknowledged checkpoints are missing after the start: {sorted(missing)[:5]}"
    for run in [*storm.runs, *(storm.complete if all_bits else ())]:
        run.check(*storm.expected[run.program.number])
    return len(storm.acknowledged())


def check_that_losses_are_noticed(server, storm):
    """Raises where a checkpoint with other bits, or one that is no more, is taken for those of a calm run."""
    path = next(path for path in storm.complete[-1].checkpoints if path.endswith("step-3"))
    run, kind, name = path.removeprefix("tinker://").split("/")
    file = server.state / "runs" / run.replace(":", ".") / kind / name / "adapter/adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(AssertionError, match="has other bits"):
        check_checkpoints(server, storm, all_bits=True)
    file.write_bytes(whole)
    httpx.delete(f"{server.address}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}", headers={"X-API-Key": KEY})
    with pytest.raises(AssertionError, match="acknowledged checkpoints are missing"):
        check_checkpoints(server, storm, all_bits=True)


def test_killed_at_any_moment_the_server_loses_nothing_that_was_acknowledged(espalier, tmp_path, long_tests):
    seed = seed_of(91)
    kills = 300 if long_tests else 10
    draw = random.Random(seed)
    programs = [Program(number, seed) for number in range(3)]
    folder = model_with_texts(espalier, tmp_path / "bytes")
    begin, starting = time.monotonic(), 0
    with Server(folder, tmp_path / "state", *FLAGS) as server:
        storm = Storm(server, programs, calm(server, programs))
        party = Party(server.address, KEYS["other"], seed + 1, storm.ids, {"adapter_config.json": b"{}"})
        mutator = Mutator(server, routes(tmp_path / "routes"), party, 1 << 30, 0.5, covers_all=False)
        with storm:
            mutator.start()
            for number in range(kills):
                if number and draw.random() < 0.15:
                    starting += 1
                    time.sleep(draw.uniform(0.0, 3.0))  # it is killed while it starts
                else:
                    server.wait(lambda number=number: check_checkpoints(server, storm, all_bits=number % 20 == 0))
                    events = storm.events() + draw.randrange(1, 25)
                    until(lambda events=events: storm.events() >= events or storm.errors or mutator.error, "steps and saves")
                    time.sleep(draw.uniform(0.0, 0.1))
                    server.check()
                server.kill()
                storm.check()
                mutator.check()
                server.start()
            server.wait()
            mutator.stop()
            storm.stop()
        server.check()
        count = check_checkpoints(server, storm, all_bits=True)
        print(f"seed {seed}: {kills} kills in {time.monotonic() - begin:.0f} s, {starting} of them while it started; {count} "
              f"checkpoints were acknowledged, {storm.steps} steps and {storm.checkpoints} checkpoints compared, {mutator.mutated} "
              "mutated requests")  # fmt: skip
        assert count and storm.steps and mutator.mutated
        check_that_losses_are_noticed(server, storm)
