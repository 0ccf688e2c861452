# SPDX-License-Identifier: Apache-2.0
"""A load on `espalier serve`: a server that may be killed and started again, and honest clients whose results are known.

A program is what an honest client does, the same bits each time: the results and checkpoints of any run of it are those of a calm
run, whatever others do and wherever it had to go on from a checkpoint.
"""

import hashlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import tinker
from tinker import types

from servers import PYTHON, datum, prompt

KEY = "tml-local"           # of the honest clients
KEYS = {"other": "tml-other"}  # of others
VOCABULARY = 250
STEPS = 12                  # of a program
SAVE_EVERY = 3              # steps
LONG = 300                  # seconds, in which each call of a client ends by far
ADAM = types.AdamParams(learning_rate=3e-3, grad_clip_norm=1.0)


class Server:
    """A server of one model, in a process of its own, which may be killed and started again on its port."""

    def __init__(self, folder, state, *flags):
        self.state = Path(state)
        self.log = self.state.with_name(f"{self.state.name}.log")
        keys = self.state.with_name(f"{self.state.name}.keys")
        keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "espalier", "serve", "--model", f"tiny={folder}", "--port", str(self.port), "--state",
                         str(self.state), "--dtype", "float64", "--threads", "1", "--api-key-file", str(keys), *map(str, flags)]  # fmt: skip
        self.life = 0  # how often it was killed
        self.listens = threading.Event()
        self.process = None

    def start(self):
        environment = {**os.environ, "PYTHONPATH": f"{PYTHON}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1",
                       "ESPALIER_API_KEY": KEY, "ESPALIER_TRACEBACK": "1"}  # fmt: skip
        with self.log.open("ab") as log:
            self._begin = log.tell()
            self.process = subprocess.Popen(self._command, stderr=log, env=environment)
        return self

    def wait(self, check=lambda: None):
        """Until it listens; clients learn of that after the check."""
        until(lambda: " on http://" in self.said() or self.has_ended(), "the server to listen")
        assert not self.has_ended(), self.said()
        check()
        self.listens.set()
        return self

    def said(self):
        """Its log since the last start."""
        with self.log.open("rb") as log:
            log.seek(self._begin)
            return log.read().decode(errors="replace")

    def has_ended(self):
        return self.process.poll() is not None

    def kill(self):
        self.listens.clear()
        self.life += 1  # before, so that no client takes what follows for a fault
        self.process.kill()
        self.process.wait()

    def check(self):
        """Raises where it ended, or its log has more than it should."""
        assert not self.has_ended(), f"the server ended with status {self.process.returncode}:\n{self.said()[-4000:]}"
        faults = [line for line in self.said().splitlines() if not EXPECTED_LINES.search(line)]
        assert not faults, "the log of the server:\n" + "\n".join(faults[:60])

    def figures(self):
        """MiB of memory, descriptors and threads of its process."""
        place = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        return {"memory": int(status["VmRSS"].split()[0]) / 1024, "descriptors": len(list((place / "fd").iterdir())),
                "threads": int(status["Threads"])}  # fmt: skip

    def __enter__(self):
        return self.start().wait()

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()


EXPECTED_LINES = re.compile(r" on http://|Invalid HTTP request received|an adapter stays in memory, it cannot be written"
                            r"|lines before this one were left out")  # fmt: skip
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)  # that asyncio begins for work beside the event loop, when it is first needed
PAUSE = 0.03  # seconds of honest clients between steps, so that the mutator has its turns


def until(condition, what, seconds=LONG):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def digest(state, path):
    """What the bits of a checkpoint of honest clients are known by."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    folder = state / "runs" / run.replace(":", ".") / kind / name / "adapter"
    whole = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        whole.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest() if folder.is_dir() else "missing"


class Program:
    """What the honest client with this number does: cross-entropy, and in each third step importance sampling on samples."""

    def __init__(self, number, seed):
        self.number, self.seed = number, seed

    def _draw(self, step):
        return np.random.default_rng([self.seed, self.number, step])

    def _cross_entropy(self, step):
        draw = self._draw(step)
        start = draw.integers(0, VOCABULARY, 6).tolist()
        rows = [start + draw.integers(0, VOCABULARY, size).tolist() for size in (3, 5, 8)]
        return [datum(row, weights=draw.standard_normal(len(row) - 1).astype(np.float32)) for row in rows]

    def _samples(self, training, step):
        """Their tokens: log-probabilities may be rounded otherwise beside others, so training does not read these."""
        sampler = training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=6, seed=step, stop=[])
        start = self._draw(step).integers(0, VOCABULARY, 5).tolist()
        answer = result(result(sampler).sample(prompt(*start), 2, params))
        return start, [list(each.tokens) for each in answer.sequences]

    def _importance_sampling(self, start, samples):
        data = []
        for number, tokens in enumerate(samples):
            row, before = start + tokens, [0.0] * (len(start) - 1)
            data.append(datum(row, logprobs=before + [-5.0] * len(tokens), advantages=before + [1.0 - 2.0 * number] * len(tokens)))
        return data

    def step(self, training, step):
        """Trains one step. Returns its bits: loss, log-probabilities of its data, metrics of the update, and sampled tokens."""
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            start, samples = self._samples(training, step)
            data, loss = self._importance_sampling(start, samples), "importance_sampling"
        else:
            samples, data, loss = [], self._cross_entropy(step), "cross_entropy"
        passes = training.forward_backward(data, loss)
        update = training.optim_step(ADAM)
        output = result(passes)
        logprobs = [each["logprobs"].to_numpy().tobytes() for each in output.loss_fn_outputs]
        return output.metrics["loss:sum"], logprobs, result(update).metrics, samples


def result(future):
    return future.result(LONG)


class Honest:
    """A run of a program by the official client, which goes on from its last checkpoint whenever `run` is called."""

    def __init__(self, address, program, state, steps=STEPS):
        self.address, self.program, self.state, self.steps = address, program, state, steps
        self.results = {}      # by step
        self.checkpoints = {}  # those that were acknowledged: how many steps were done, by path
        self.attempts = {}     # likewise, of one that was not acknowledged
        self.events = 0        # steps and saves, also those that were repeated
        self._saves = threading.Lock()
        self.session = ""

    @property
    def done(self):
        """Steps that its last checkpoint has."""
        return max(self.checkpoints.values(), default=0)

    def run(self):
        """To the end of the program. Raises where the server is killed meanwhile."""
        service = tinker.ServiceClient(base_url=self.address, api_key=KEY)
        try:
            self.session = service.holder.get_session_id()
            path = next((path for path, done in self.checkpoints.items() if done == self.done and path not in self.attempts), None)
            if path is None:
                training = result(service.create_lora_training_client(base_model="tiny", rank=2, seed=1 + self.program.number))
            else:
                training = result(service.create_training_client_from_state_with_optimizer(path))
            for step in range(self.done, self.steps):
                self.results[step] = self.program.step(training, step)
                self.events += 1
                time.sleep(PAUSE)
                if (step + 1) % SAVE_EVERY == 0:
                    self._save(training, f"step-{step + 1}", step + 1)
                    self._save(training, "last", step + 1)
        finally:
            with suppress(RuntimeError):
                service.holder.close()

    def _save(self, training, name, done):
        path = f"tinker://{training.model_id}/weights/{name}"
        with self._saves:
            self.attempts[path] = done
            assert result(training.save_state(name, overwrite=name == "last")).path == path
            self.checkpoints[path] = done
            del self.attempts[path]
        self.events += 1

    def bits(self):
        """Digests of its checkpoints, by how many steps were done."""
        return {done: digest(self.state, path) for path, done in self.checkpoints.items()}

    def check(self, results, bits):
        """Raises where results or checkpoints are not those of a calm run. An overwritten checkpoint may be the new one before
        that is acknowledged. Returns how many checkpoints were compared."""
        for step, value in list(self.results.items()):
            assert value == results[step], f"client {self.program.number}, step {step}: expected {results[step]}, received {value}"
        with self._saves:
            for path, done in self.checkpoints.items():
                assert digest(self.state, path) in (bits[done], bits[self.attempts.get(path, done)]), (
                    f"client {self.program.number}: {path} is missing or has other bits than after step {done} of a calm run")  # fmt: skip
            return len(self.checkpoints)


def calm(server, programs):
    """Results and digests of a run of each program, one after the other."""
    runs = [Honest(server.address, program, server.state) for program in programs]
    for run in runs:
        run.run()
    return [(run.results, run.bits()) for run in runs]


def page_of_checkpoints(server):
    """Paths of all checkpoints that the server lists for honest clients."""
    with httpx.Client(base_url=f"{server.address}/api/v1/", headers={"X-API-Key": KEY}, timeout=LONG) as http:
        paths = []
        while rows := http.get("checkpoints", params={"limit": 1000, "offset": len(paths)}).json()["checkpoints"]:
            paths += [row["tinker_path"] for row in rows]
    return paths


class Storm:
    """Honest clients that run their programs again and again, each in a thread, and compare each run with a calm one. removes: the
    checkpoints of a run that is over."""

    def __init__(self, server, programs, expected, *, removes=False):
        self.server, self.expected, self.removes = server, expected, removes
        self.runs = [Honest(server.address, program, server.state) for program in programs]
        self.complete = []    # runs that are over
        self.errors = []
        self.steps = 0        # that were compared
        self.checkpoints = 0  # likewise
        self._events = 0      # of runs that are over
        self._stops = threading.Event()
        self._threads = [threading.Thread(target=self._go_on, args=[number], daemon=True) for number in range(len(programs))]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._stops.set()

    def stop(self):
        """Ends once each run that has begun is over. Raises what went wrong in any thread."""
        self._stops.set()
        for thread in self._threads:
            thread.join(LONG)
            assert not thread.is_alive(), "a client waits for ever"
        self.check()

    def check(self):
        """Raises what went wrong in any thread."""
        if self.errors:
            raise self.errors[0]

    def ids(self):
        """Sessions, models and checkpoints that are in use."""
        runs = list(self.runs)
        paths = [path for run in runs for path in list(run.checkpoints)[-2:]]
        return [run.session for run in runs] + [f"{run.session}:train:0" for run in runs] + paths

    def events(self):
        """Steps and saves of all runs."""
        return self._events + sum(run.events for run in self.runs)

    def acknowledged(self):
        """All checkpoints."""
        return [path for run in [*self.complete, *self.runs] for path in list(run.checkpoints)]

    def _go_on(self, number):
        try:
            while True:
                run = self.runs[number]
                if not self._run(run):
                    continue
                self.checkpoints += run.check(*self.expected[number])
                self.steps += len(run.results)
                self._events += run.events
                if self.removes:
                    self._remove(run)
                else:
                    self.complete.append(run)
                if self._stops.is_set():
                    run.events = 0
                    return
                self.runs[number] = Honest(run.address, run.program, run.state)
        except BaseException as error:
            self.errors.append(error)

    def _run(self, run):
        """Whether it is over. What is raised while the server is killed is no fault."""
        life = self.server.life
        assert self.server.listens.wait(LONG), "the server does not start"
        try:
            run.run()
            return True
        except Exception:
            if self.server.life == life:
                raise
            return False

    def _remove(self, run):
        with httpx.Client(base_url=f"{run.address}/api/v1/", headers={"X-API-Key": KEY}, timeout=LONG) as http:
            for path in run.checkpoints:
                name, checkpoint = path.removeprefix("tinker://").split("/", 1)
                assert http.delete(f"training_runs/{name}/checkpoints/{checkpoint}").status_code == 204
