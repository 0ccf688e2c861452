# SPDX-License-Identifier: Apache-2.0
"""Runs that nobody watches: where rows come from while they go on, where weights go, and what they do without."""

import http.server
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from conftest import PROGRAM, REPOSITORY, seed_of
from http_stub import JsonHandler
from small_models import write_rows
from test_faults import (STOPPED, checkpoint, data, flags, last_of_each, rows_of, same_checkpoint, saved_steps,  # noqa: F401
                         start, wait_until)  # fmt: skip


@pytest.fixture(scope="module")
def espalier(espalier):
    return lambda *arguments, **options: espalier(*last_of_each(arguments), **options)


# ---- Rows on standard input ----------------------------------------------------------------------------------------


def test_rows_come_from_standard_input(espalier, flags, data, tmp_path):
    espalier("train", *flags, "--out", tmp_path / "file", "--steps", 4)
    words = last_of_each(["train", *flags, "--out", tmp_path / "pipe", "--steps", 4, "--data", "-"])
    done = subprocess.run([PROGRAM, *words], input=data.read_bytes(), capture_output=True)
    assert done.returncode == 0, done.stderr
    same_checkpoint(checkpoint(tmp_path / "file", 4), checkpoint(tmp_path / "pipe", 4))


def test_a_bad_row_of_standard_input_is_named(flags, tmp_path):
    words = last_of_each(["train", *flags, "--out", tmp_path / "run", "--data", "-"])
    done = subprocess.run([PROGRAM, *words], input=b'{"input_ids": [1, 2]}\n{"input_ids": [1, "a"]}\n',
                          capture_output=True)  # fmt: skip
    assert done.returncode == 1 and b"/dev/stdin:2: field `input_ids`" in done.stderr, done.stderr


# ---- Checkpoints in the background ---------------------------------------------------------------------------------


def test_without_room_for_its_copy_a_checkpoint_is_waited_for(espalier, flags, tmp_path):
    budgeted = lambda out, budget, *more, **options: espalier(
        "train", *flags, "--out", tmp_path / out, "--steps", 3, "--memory-budget", budget, *more, **options)  # fmt: skip
    least = lambda *more: int(re.search(r"\((\d+) bytes\)", budgeted("none", "1KiB", *more, check=False).stderr).group(1)) + 1
    waits, copies = least(), least("--save-in-background")
    assert waits < copies
    said = "--save-in-background is off, because --memory-budget has no room"
    assert said in budgeted("tight", waits, "--save-in-background").stderr
    assert said not in budgeted("roomy", copies, "--save-in-background").stderr
    assert said not in budgeted("plain", waits).stderr
    same_checkpoint(checkpoint(tmp_path / "tight", 3), checkpoint(tmp_path / "plain", 3))
    # Where nothing fits, the error is that of the run that was asked for.
    assert said not in budgeted("nothing", waits - 2, "--save-in-background", check=False).stderr


# ---- Rows that come while the run goes on --------------------------------------------------------------------------


def come(folder, name, seed):
    """A file as a rollout worker writes it: renamed when it is whole."""
    folder.mkdir(exist_ok=True)
    write_rows(folder / f".{name}.partial", rows_of(4, seed=seed)).rename(folder / name)


@pytest.fixture
def following(flags, tmp_path):
    """The flags of a run that follows `tmp_path / "rows"`."""
    (tmp_path / "rows").mkdir()
    at = flags.index("--data")
    return [*flags[:at], *flags[at + 2 :], "--follow", tmp_path / "rows", "--steps", 1000]


def test_rows_are_trained_on_as_they_come(start, following, tmp_path):
    run, rows = tmp_path / "run", tmp_path / "rows"
    come(rows, "0001.jsonl", 1)
    process = start("train", *following, "--out", run)
    wait_until(lambda: "waiting for rows in" in process.said(), process)
    assert saved_steps(run) == [1, 2]  # four rows are two steps of --batch-size 2
    come(rows, "0002.jsonl", 2)
    wait_until(lambda: 4 in saved_steps(run), process)
    (rows / "stop").touch()
    assert process.wait() == 0 and saved_steps(run) == [1, 2, 3, 4], process.said()
    assert "step 4/1000" in process.said() and f"{rows / '0002.jsonl'}: 4 trajectories" in process.said()


def test_a_run_that_was_killed_goes_on_where_it_was(espalier, start, following, tmp_path):
    rows = tmp_path / "rows"
    for number in range(1, 6):
        come(rows, f"{number:04}.jsonl", number)
    (rows / "stop").touch()
    espalier("train", *following, "--out", tmp_path / "whole")
    run = tmp_path / "run"
    generator = random.Random(seed_of(23))
    for at in sorted(generator.sample(range(1, 10), 3)):
        process = start("train", *following, "--out", run, "--resume")
        wait_until(lambda: max(saved_steps(run), default=0) >= at, process)
        process.kill()
        process.wait()
    espalier("train", *following, "--out", run, "--resume")
    for step in range(1, 11):
        same_checkpoint(checkpoint(tmp_path / "whole", step), checkpoint(run, step))


def test_a_signal_ends_the_wait_for_rows(start, following, tmp_path):
    come(tmp_path / "rows", "0001.jsonl", 1)
    process = start("train", *following, "--out", tmp_path / "run", "--save-every", 0)
    wait_until(lambda: "waiting for rows in" in process.said(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == STOPPED and saved_steps(tmp_path / "run") == [2], process.said()


def test_a_bad_file_is_named_and_taken_once_it_is_good(espalier, following, tmp_path):
    rows, run = tmp_path / "rows", tmp_path / "run"
    come(rows, "0001.jsonl", 1)
    (rows / "0002.jsonl").write_text('{"input_ids": [1, 2, "a"]}\n')
    (rows / "stop").touch()
    failed = espalier("train", *following, "--out", run, check=False)
    assert failed.returncode == 1 and f"{rows / '0002.jsonl'}:1: field `input_ids`" in failed.stderr, failed.stderr
    come(rows, "0002.jsonl", 2)
    espalier("train", *following, "--out", run, "--resume")
    assert saved_steps(run) == [1, 2, 3, 4]


def test_what_a_run_cannot_follow_is_refused(espalier, following, data, tmp_path):
    refusal = lambda *more: espalier("train", *following, "--out", tmp_path / "run", *more, check=False).stderr
    assert "--follow: cannot be combined with --data" in refusal("--data", data)
    assert "--follow: requires --steps" in refusal("--steps", 0)
    assert "--follow: expected a folder" in refusal("--follow", tmp_path / "nowhere")
    come(tmp_path / "rows", "1.jsonl", 1)
    (tmp_path / "rows/stop").touch()
    assert refusal() and saved_steps(tmp_path / "run") == [1, 2]
    again = espalier("rerun", tmp_path / "run", "--out", tmp_path / "again", check=False)
    assert again.returncode == 1 and "--follow: cannot be combined with --repeats" in again.stderr, again.stderr


# ---- Weights for a vLLM server -------------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    """What vLLM documents of its endpoints: takes their payloads alone, and says so as vLLM does."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.requests, self.adapters, self.weights, self.paused, self.fails, self.key = [], {}, None, False, {}, None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answers(JsonHandler):
    def do_GET(self):
        assert self.headers["Authorization"] == (self.server.key and f"Bearer {self.server.key}")
        self.server.requests.append(self.path)
        models = [{"id": "base"}, *({"id": name} for name in self.server.adapters)]
        known = {"/health": {}, "/v1/models": {"object": "list", "data": models}}
        self.answer(*((200, known[self.path]) if self.path in known else (404, {"detail": "Not Found"})))

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Content-Type"] == "application/json"
        assert self.headers["Authorization"] == (server.key and f"Bearer {server.key}")
        server.requests.append((self.path, body))
        if self.path in server.fails:
            return self.answer(*server.fails[self.path])
        if self.path == "/v1/load_lora_adapter" and set(body) == {"lora_name", "lora_path"}:
            if body["lora_name"] in server.adapters:
                return self.answer(400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}})
            server.adapters[body["lora_name"]] = Path(body["lora_path"], "adapter_model.safetensors").read_bytes()
        elif self.path == "/v1/unload_lora_adapter" and server.adapters.pop(body["lora_name"], None) is None:
            return self.answer(404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}})
        elif self.path == "/pause?mode=keep":
            server.paused = True
        elif self.path == "/collective_rpc" and body["method"] == "reload_weights" and set(body["kwargs"]) == {"weights_path"}:
            assert server.paused
            server.weights = Path(body["kwargs"]["weights_path"], "model.safetensors").read_bytes()
        elif self.path == "/reset_prefix_cache":
            assert server.paused
        elif self.path == "/resume":
            server.paused = False
        elif self.path != "/v1/unload_lora_adapter":
            return self.answer(404, {"detail": "Not Found"})
        self.answer(200, {})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "python"))
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


def publishing(server, folder, *more):
    return ["--publish", folder, "--publish-command", f"{sys.executable} -m espalier.publish {server.url}", *more]


def test_a_vllm_server_loads_the_weights(espalier, flags, server, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    server.key = "a key"
    espalier("train", *flags, "--out", tmp_path / "run", "--steps", 3, *publishing(server, tmp_path / "out", "--publish-every", 2))
    assert server.weights == (checkpoint(tmp_path / "run", 3) / "model.safetensors").read_bytes()
    assert not server.paused
    path = lambda step: {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / f"out/step_{step}")}}
    of_one = lambda step: ["/health", ("/pause?mode=keep", {}), ("/collective_rpc", path(step)), ("/reset_prefix_cache", {}), ("/resume", {})]
    assert server.requests == of_one(2) + of_one(3)


def test_a_vllm_server_loads_adapters_under_new_names_and_forgets_old_ones(espalier, flags, server, tmp_path):
    server.adapters = {"other-step_1": b"", "out-steps": b""}
    words = ["train", *flags, "--out", tmp_path / "run", "--lora-rank", 2, *publishing(server, tmp_path / "out")]
    espalier(*words, "--steps", 5)
    weights = lambda step: (checkpoint(tmp_path / "run", step) / "adapter_model.safetensors").read_bytes()
    published = {f"out-step_{step}": weights(step) for step in (4, 5)}
    assert server.adapters == {"other-step_1": b"", "out-steps": b"", **published}
    # A run that has lost its last steps publishes them again.
    shutil.rmtree(checkpoint(tmp_path / "run", 5))
    server.requests.clear()
    espalier(*words, "--steps", 5, "--resume")
    assert server.adapters == {"other-step_1": b"", "out-steps": b"", **published}
    folder = str(tmp_path / "out/step_5")
    assert server.requests == ["/health", "/v1/models", ("/v1/unload_lora_adapter", {"lora_name": "out-step_5"}),
                               ("/v1/load_lora_adapter", {"lora_name": "out-step_5", "lora_path": folder})]  # fmt: skip


def test_a_server_that_fails_is_one_warning_and_ends_no_run(espalier, flags, server, tmp_path):
    warning = "could not be published: --publish-command: "
    server.fails = {"/collective_rpc": (400, {"detail": "Missing\n'method' in request body"})}
    words = ["train", *flags, "--steps", 2]
    said = espalier(*words, "--out", tmp_path / "one", *publishing(server, tmp_path / "out")).stderr
    assert said.count(warning) == 2 and said.count("/collective_rpc: 400 Bad Request") == 2, said
    assert said.count("Missing\\n'method'") == 2 and not server.paused  # requests go on
    assert saved_steps(tmp_path / "one") == [1, 2]
    server.shutdown()
    server.server_close()
    said = espalier(*words, "--out", tmp_path / "two", *publishing(server, tmp_path / "out")).stderr
    assert said.count(warning) == 2 and said.count("Connection refused") == 2, said
    assert saved_steps(tmp_path / "two") == [1, 2]


def test_the_first_failure_is_named_and_a_folder_in_full(server, tmp_path):
    """From another folder, and where the server cannot go on either."""
    (tmp_path / "out/step_1").mkdir(parents=True)
    (tmp_path / "out/step_1/model.safetensors").write_bytes(b"weights")
    run = lambda: subprocess.run([sys.executable, "-m", "espalier.publish", server.url, "out/step_1"], cwd=tmp_path, capture_output=True,
                                 text=True)  # fmt: skip
    assert run().returncode == 0 and server.weights == b"weights"
    assert server.requests[2][1]["kwargs"] == {"weights_path": str(tmp_path / "out/step_1")}
    server.fails = {"/collective_rpc": (500, {"detail": "no room"}), "/resume": (503, {"detail": "gone"})}
    failed = run()
    assert failed.returncode == 1 and failed.stderr == (
        f'{server.url}: /collective_rpc: 500 Internal Server Error: {{"detail": "no room"}}\n')
