# SPDX-License-Identifier: Apache-2.0
"""Samplers of `espalier serve`: prompts that wait together are scored in one call."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="the server")

from espalier.server import sampling, schema
from espalier.server.base import Counter
from espalier.server.futures import Future
from espalier.server.requests import Sample


class Engine:
    """Samples a 9; the log-probability of a token is less than 0 by its id."""

    def __init__(self):
        self.scored = []

    def sample(self, prompts, params, watch):
        return [{"input_ids": [*prompt, 9], "logprobs": [0.0] * len(prompt) + [-9.0]}
                for prompt, own in zip(prompts, params, strict=True) for _ in range(own.samples)]  # fmt: skip

    def logprobs(self, prompts):
        self.scored.append(len(prompts))
        return [-np.asarray(prompt, np.float32) for prompt in prompts]


def request(name, prompt, **more):
    ask = Sample.model_validate({"prompt": {"chunks": []}, "sampling_params": {"max_tokens": 1, "stop": []}, **more})
    return sampling.Request(Future(name), ask, np.array(prompt, np.int32), 1, lambda: None, [f"{name}:0"])


def test_prompts_are_scored_in_one_call():
    engine = Engine()
    samplers = SimpleNamespace(base=SimpleNamespace(engine=engine, use=lambda adapter: None, stop_ids=[]), _counter=Counter())
    requests = [request("a", [1, 2, 3], prompt_logprobs=True), request("b", [4]), request("c", [5], prompt_logprobs=True),
                request("d", [6, 7], prompt_logprobs=True), request("e", [1, 2, 3], prompt_logprobs=True, prompt_logprobs_last_n=1)]  # fmt: skip
    sampling._Job(samplers, requests).run()
    found = [schema.SampleResponse.FromString(each.result) for each in requests]
    assert engine.scored == [3]
    nan = float("nan")
    for answer, expected in zip(found, ([nan, -2, -3], [], [nan], [nan, -7], [nan, nan, -3])):
        np.testing.assert_array_equal(np.frombuffer(answer.prompt_logprobs, "<f4"), np.array(expected, np.float32))
        assert np.frombuffer(answer.sequences[0].tokens, "<i4").tolist() == [9]
