# SPDX-License-Identifier: Apache-2.0
"""`espalier serve` for a long time under three honest clients and a mutator: memory, descriptors and threads stay as they are after a
warm-up, and go back once the clients have gone. ESPALIER_SOAK_SECONDS makes it shorter."""

import os
import statistics
import time

import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

from conftest import seed_of
from server_load import KEYS, POOL_THREADS, Program, Server, Storm, calm, until
from server_mutator import Mutator, Party, routes
from servers import model_with_texts

SECONDS = float(os.environ.get("ESPALIER_SOAK_SECONDS", "2400"))
RESULTS = max(60, int(SECONDS / 8))  # seconds that results are kept: five minutes; fewer than 60 may end before a client asks
GROWTH, ROOM = 1.03, 8.0            # of memory from the middle third to the last one: 3 % and 8 MiB at most


def check_level(memory):
    """Raises where memory, in MiB at equal times, grows after the first third."""
    third = len(memory) // 3
    middle, last = statistics.median(memory[third : 2 * third]), statistics.median(memory[2 * third :])
    assert last <= GROWTH * middle + ROOM, f"memory grows: {middle:.1f} MiB in the middle third, {last:.1f} MiB in the last one"
    return middle, last


def test_memory_descriptors_and_threads_stay_level(espalier, tmp_path, long_tests):
    if not long_tests:
        pytest.skip("the long form alone (--long)")
    seed = seed_of(93)
    programs = [Program(number, seed) for number in range(3)]
    folder = model_with_texts(espalier, tmp_path / "bytes")
    flags = ("--max-adapters", 8, "--prefix-cache", "16MiB", "--result-seconds", RESULTS)
    with Server(folder, tmp_path / "state", *flags) as server:
        storm = Storm(server, programs, calm(server, programs), removes=True)
        party = Party(server.address, KEYS["other"], seed + 1, storm.ids, {"adapter_config.json": b"{}"})
        party.renew()
        party.finish()
        party.http.close()
        before, rows = server.figures(), []
        party = Party(server.address, KEYS["other"], seed + 1, storm.ids, {"adapter_config.json": b"{}"})
        mutator = Mutator(server, routes(tmp_path / "routes"), party, 1 << 30, 0.5)
        end = time.monotonic() + SECONDS
        with storm:
            mutator.start()
            while time.monotonic() < end:
                rows.append(server.figures())
                storm.check()
                mutator.check()
                server.check()
                time.sleep(min(1.0, SECONDS / 300))
            mutator.stop()
            party.http.close()
            storm.stop()
        until(lambda: server.figures()["descriptors"] <= before["descriptors"], "descriptors to be closed", 60)
        after = server.figures()
        middle, last = check_level([row["memory"] for row in rows])
        print(f"{SECONDS:g} s: {storm.steps} steps, {mutator.mutated} mutated requests; MiB before {before['memory']:.1f}, middle {middle:.1f}, "
              f"last {last:.1f}, after {after['memory']:.1f}; descriptors {before['descriptors']}, at most "
              f"{max(row['descriptors'] for row in rows)}, after {after['descriptors']}; threads {before['threads']}, at most "
              f"{max(row['threads'] for row in rows)}, after {after['threads']}")  # fmt: skip
        third = len(rows) // 3
        for name in ("descriptors", "threads"):
            first = max(row[name] for row in rows[third : 2 * third])
            assert max(row[name] for row in rows[2 * third :]) <= first + 8, f"{name} grow"
        assert after["memory"] <= GROWTH * last + ROOM and after["threads"] <= before["threads"] + POOL_THREADS


def test_memory_that_grows_is_noticed():
    check_level([300 + 200 * min(1.0, second / 30) for second in range(120)])
    with pytest.raises(AssertionError, match="memory grows"):
        check_level([300 + 0.5 * second for second in range(120)])
