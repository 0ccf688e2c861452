#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `espalier serve` costs with many clients at once, against another checkout of Espalier.

Each client is an official one with an adapter of its own, and repeats a step of GRPO: a forward and backward pass over 4 rows of 32
tokens and an optimiser step, a snapshot, and 4 samples of 12 tokens. The figure is the CPU time of the server's process for a step,
all its threads together, so that the clients, who share the machine, do not count. Then a client has 1,024 long samples, and
another one samples a single token 20 times: the figure is the longest of these, in seconds.

Both servers are up during all rounds, and work in turns on the same data. Losses of all steps are compared first.

    python bench/server_clients.py                       this checkout alone
    python bench/server_clients.py --against CHECKOUT    with another one, which is built
    python bench/server_clients.py --quick               does it work here?
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "python"), str(REPOSITORY / "bench")]

import compare_transformers as common  # noqa: E402
from server import make_model, serve  # noqa: E402

ROWS, TOKENS, SAMPLES, NEW_TOKENS = 4, 32, 4, 12
SMALL_SAMPLES = 20


def say(text):
    print(f"server_clients: {text}", file=sys.stderr, flush=True)


class Server:
    """`espalier serve` of a checkout."""

    def __init__(self, stack, folder, state, checkout, threads):
        self.process, self.address = serve(stack, folder, state, "--threads", threads, "--max-adapters", 128, checkout=checkout)

    def cpu_seconds(self):
        """User and system time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def client(self, seed):
        return Client(self.address, seed)


class Client:
    """An official client with an adapter."""

    def __init__(self, address, seed):
        import tinker

        self.types = tinker.types
        self.service = tinker.ServiceClient(base_url=address, api_key="tml-local")
        self.training = self.service.create_lora_training_client(base_model="model", rank=8, seed=seed).result()
        self.draw = random.Random(seed)

    def step(self):
        """Returns the loss."""
        rows = [[self.draw.randrange(256) for _ in range(TOKENS + 1)] for _ in range(ROWS)]
        data = [self.types.Datum(model_input=self.types.ModelInput.from_ints(row[:-1]),
                                 loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * TOKENS}) for row in rows]  # fmt: skip
        passes = self.training.forward_backward(data, "cross_entropy")
        update = self.training.optim_step(self.types.AdamParams(learning_rate=1e-3))
        loss = passes.result().metrics["loss:sum"]
        update.result()
        sampler = self.training.save_weights_and_get_sampling_client().result()
        params = self.types.SamplingParams(max_tokens=NEW_TOKENS, stop=[], seed=self.draw.randrange(2**31))
        sampler.sample(self.types.ModelInput.from_ints(rows[0][:TOKENS]), SAMPLES, params).result()
        return loss

    def sampler(self):
        return self.training.save_weights_and_get_sampling_client().result()

    def sample(self, sampler, tokens, samples):
        """A future of `samples` completions of `tokens` tokens."""
        params = self.types.SamplingParams(max_tokens=tokens, stop=[], seed=1)
        return sampler.sample(self.types.ModelInput.from_ints(list(range(32))), samples, params)


def measure_steps(server, clients, steps):
    """CPU seconds of the server for a step, and the losses of each client."""
    before = server.cpu_seconds()
    with ThreadPoolExecutor(len(clients)) as pool:
        losses = list(pool.map(lambda client: [client.step() for _ in range(steps)], clients))
    return (server.cpu_seconds() - before) / (len(clients) * steps), losses


def compare_losses(name, ours, theirs):
    error = max(abs(a - b) / abs(b) for mine, others in zip(ours, theirs, strict=True) for a, b in zip(mine, others, strict=True))
    if not error <= 1e-5:
        raise common.Failure(f"{name}: expected equal losses, they differ by {error:.2g} of their value")


def compare_steps(servers, number, arguments):
    """A row of CPU seconds, medians of rounds."""
    sides = [[server.client(seed) for seed in range(1, number + 1)] for server in servers]
    seconds = []
    for turn in range(-1, arguments.rounds):
        results = [measure_steps(server, clients, arguments.steps) for server, clients in zip(servers, sides)]
        for _, losses in results[1:]:
            compare_losses(f"{number} clients", results[0][1], losses)
        if turn >= 0:
            seconds.append([each for each, _ in results])
            say(f"{number} clients, round {turn + 1}: " + ", ".join(f"{each * 1e3:.1f} ms" for each in seconds[-1]))
    return f"CPU ms of a step, {number} clients", [[each * 1e3 for each in row] for row in seconds]


def longest_small_sample(server, arguments):
    """Seconds of the longest of 20 samples of a token, beside a request for 1,024 long ones."""
    busy, small = server.client(1000), server.client(1001)
    busy_sampler, small_sampler = busy.sampler(), small.sampler()
    small.sample(small_sampler, 1, 1).result()
    waiting = busy.sample(busy_sampler, arguments.long_tokens, arguments.long_samples).future()
    time.sleep(1)
    seconds = []
    for _ in range(SMALL_SAMPLES):
        began = time.perf_counter()
        small.sample(small_sampler, 1, 1).result()
        seconds.append(time.perf_counter() - began)
        if waiting.done() and len(seconds) < SMALL_SAMPLES:
            say(f"the long samples ended after {len(seconds)} small ones")
            break
    waiting.result()
    return max(seconds)


def compare_small_samples(servers, arguments):
    seconds = []
    for turn in range(arguments.rounds):
        seconds.append([longest_small_sample(server, arguments) for server in servers])
        say(f"small samples, round {turn + 1}: " + ", ".join(f"{each:.3f} s" for each in seconds[-1]))
    return "seconds of the longest of 20 small samples", seconds


def median_of(side):
    return lambda row: f"{statistics.median(each[side] for each in row[1]):.3f}"


def parse_arguments(values):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--against", type=Path, metavar="CHECKOUT", help="a built checkout of Espalier to compare with")
    add("--clients", type=common.list_of(int), default=[8, 64], metavar="N,N", help="numbers of clients (default: 8,64)")
    add("--steps", type=int, default=10, metavar="N", help="of each client in a round (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    add("--long-samples", type=int, default=1024, metavar="N", help="of one request (default: %(default)s)")
    add("--long-tokens", type=int, default=400, metavar="N", help="of each of them (default: %(default)s)")
    add("--hidden-size", type=int, default=32, metavar="N", help="of the model (default: %(default)s)")
    add("--layers", type=int, default=2, metavar="N", help="of the model (default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads of each server (default: %(default)s)")
    add("--quick", action="store_true", help="two clients, two steps, one round")
    add("-o", "--out", type=Path, metavar="FILE", help="write the table here, too")
    arguments = parser.parse_args(values)
    if arguments.quick:
        arguments.clients, arguments.steps, arguments.rounds, arguments.long_samples, arguments.long_tokens = [2], 2, 1, 64, 100
    return arguments


def main(values=None):
    arguments = parse_arguments(values)
    checkouts = [REPOSITORY] + ([arguments.against.resolve()] if arguments.against else [])
    try:
        with tempfile.TemporaryDirectory(prefix="espalier-clients-") as scratch, ExitStack() as stack:
            folder = make_model(Path(scratch), arguments)
            servers = [Server(stack, folder, Path(scratch) / f"state{number}", checkout, arguments.threads)
                       for number, checkout in enumerate(checkouts)]  # fmt: skip
            rows = [compare_steps(servers, number, arguments) for number in arguments.clients]
            rows.append(compare_small_samples(servers, arguments))
    except common.Failure as failure:
        say(failure)
        return 1
    columns = {"figure": lambda row: row[0], "this checkout": median_of(0)}
    if arguments.against:
        columns["other checkout"] = median_of(1)
        columns["this / other"] = lambda row: f"{statistics.median(each[0] / each[1] for each in row[1]):.3f}"
    common.publish(f"{arguments.threads} thread of each server. A Qwen3 of {arguments.layers} layers, hidden size "
                   f"{arguments.hidden_size}, LoRA of rank 8; {arguments.steps} steps of each client in a round, medians of "
                   f"{arguments.rounds} rounds in turns", columns, rows, arguments.out)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
