# SPDX-License-Identifier: Apache-2.0
"""`espalier serve` is killed at random moments while three honest clients train and a mutator sends what it likes: each checkpoint
that was acknowledged is there after the next start, with its bits, and what goes on from it has the results of a calm run."""

import random
import time

import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from conftest import seed_of
from server_load import KEYS, Program, Server, Storm, calm, digest, page_of_checkpoints
from server_mutator import Mutator, Party, routes
from servers import model_with_texts

FLAGS = ("--max-adapters", 4, "--prefix-cache", "16MiB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return model_with_texts(espalier, tmp_path_factory.mktemp("models") / "bytes")


def check_checkpoints(server, storm, *, all_bits):
    """Raises where an acknowledged checkpoint is missing or has other bits than in a calm run; of runs that are over only where
    all_bits. Returns how many there are."""
    missing = set(storm.acknowledged()) - set(page_of_checkpoints(server))
    assert not missing, f"{len(missing)} acknowledged checkpoints are missing after the start: {sorted(missing)[:5]}"
    for run in [*storm.runs, *(storm.complete if all_bits else ())]:
        run.check(*storm.expected[run.program.number])
    return len(storm.acknowledged())


def test_killed_at_any_moment_the_server_loses_nothing_that_was_acknowledged(folder, tmp_path, long_tests):
    seed = seed_of(91)
    kills, longest = (300, 4.0) if long_tests else (10, 1.5)
    draw = random.Random(seed)
    programs = [Program(number, seed) for number in range(3)]
    with Server(folder, tmp_path / "calm", *FLAGS) as server:
        expected = calm(server, programs)
    begin, moments = time.monotonic(), []
    with Server(folder, tmp_path / "state", *FLAGS) as server:
        storm = Storm(server, programs, expected)
        party = Party(server.address, KEYS["other"], seed + 1, storm.ids, {"adapter_config.json": b"{}"})
        mutator = Mutator(server, routes(tmp_path / "routes"), party, 1 << 30, 0.5)
        with storm:
            mutator.start()
            for number in range(kills):
                if draw.random() < 0.9:  # else it is killed while it starts
                    server.wait(lambda number=number: check_checkpoints(server, storm, all_bits=number % 20 == 0))
                    server.check()
                moments.append(draw.uniform(0.0, longest))
                time.sleep(moments[-1])
                server.kill()
                storm.check()
                mutator.check()
                server.start()
            server.wait()
            mutator.stop()
            storm.stop()
        server.check()
        count = check_checkpoints(server, storm, all_bits=True)
        print(f"seed {seed}: {kills} kills in {time.monotonic() - begin:.0f} s; {count} checkpoints were acknowledged, "
              f"{storm.steps} steps and {storm.checkpoints} checkpoints compared, {mutator.mutated} mutated requests")  # fmt: skip
    assert count and storm.steps and mutator.mutated


def test_a_checkpoint_that_is_lost_is_noticed(folder, tmp_path):
    """Also one whose bits are others."""
    programs = [Program(0, seed_of(92))]
    with Server(folder, tmp_path / "state", *FLAGS) as server:
        expected = calm(server, programs)
        storm = Storm(server, programs, expected)
        with storm:
            storm.stop()
        check_checkpoints(server, storm, all_bits=True)
        (run,) = storm.complete
        path = next(path for path in run.checkpoints if path.endswith("step-3"))
        name, kind, last = path.removeprefix("tinker://").split("/")
        place = server.state / "runs" / name.replace(":", ".") / kind / last
        file = place / "adapter/adapter_model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert digest(server.state, path) != run.bits
        with pytest.raises(AssertionError, match="has other bits"):
            check_checkpoints(server, storm, all_bits=True)
        file.write_bytes(whole)
        server.kill()
        place.rename(tmp_path / "elsewhere")
        server.start().wait()
        with pytest.raises(AssertionError, match="acknowledged checkpoints are missing"):
            check_checkpoints(server, storm, all_bits=True)
