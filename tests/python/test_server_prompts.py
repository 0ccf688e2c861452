# SPDX-License-Identifier: Apache-2.0
"""Samplers of `espalier serve`: prompts that wait together are scored in one call."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="the server")

from espalier import Completion
from espalier.server import sampling, schema
from espalier.server.base import Counter
from espalier.server.futures import Future, Futures
from espalier.server.requests import Sample


class Engine:
    """Samples a 9; the log-probability of a token is less than 0 by its id."""

    adapter, sampling_counts = None, {"prefix_cache_bytes": 0}

    def __init__(self):
        self.scored, self.prompts = [], []

    def use(self, adapter):
        pass

    def sampling(self):
        return self

    def add(self, prompts, params):
        self.prompts = list(range(len(prompts)))
        return self.prompts

    def step(self, watch):
        return [Completion(number, 0, np.array([9], np.int32), np.array([-9.0]), False, 0) for number in self.prompts]

    def logprobs(self, prompts):
        self.scored.append(len(prompts))
        return [-np.asarray(prompt, np.float32) for prompt in prompts]


def request(name, prompt, **more):
    ask = Sample.model_validate({"prompt": {"chunks": []}, "sampling_params": {"max_tokens": 1, "stop": []}, **more})
    return sampling.Request(Future(name), ask, np.array(prompt, np.int32), 1, lambda: None, [f"{name}:0"])


def test_prompts_are_scored_in_one_call():
    engine = Engine()
    base = SimpleNamespace(engine=engine, use=lambda adapter: None, stop_ids=[], holds_one=False)
    samplers = sampling.Samplers(base, Futures(), Counter(), None, None)
    requests = [request("a", [1, 2, 3], prompt_logprobs=True), request("b", [4]), request("c", [5], prompt_logprobs=True),
                request("d", [6, 7], prompt_logprobs=True), request("e", [1, 2, 3], prompt_logprobs=True, prompt_logprobs_last_n=1)]  # fmt: skip
    sampling._Job(samplers, requests).run()
    found = [schema.SampleResponse.FromString(each.result) for each in requests]
    assert engine.scored == [3]
    nan = float("nan")
    for answer, expected in zip(found, ([nan, -2, -3], [], [nan], [nan, -7], [nan, nan, -3])):
        np.testing.assert_array_equal(np.frombuffer(answer.prompt_logprobs, "<f4"), np.array(expected, np.float32))
        assert np.frombuffer(answer.sequences[0].tokens, "<i4").tolist() == [9]
