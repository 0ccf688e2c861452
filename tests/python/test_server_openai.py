# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API of `espalier serve`, by the official client: models, completions, chats, streams and errors."""

import json
import shutil
import socket
import subprocess
import sys
import threading

import httpx
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")
pytest.importorskip("openai", reason="the client of the OpenAI API")

import openai
from tinker import types

from conftest import NATIVE, REPOSITORY, TWO_ROLES, write_model
from espalier.server import openai as served
from espalier.server import requests, sampling
from espalier.server.texts import ModelTexts, StopCut, TextStream
from servers import Local, client, datum, model_with_texts, prompt

sys.path.insert(0, str(REPOSITORY / "tests"))
from documents import blocks_of

WITH_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + NATIVE


@pytest.fixture(scope="module")
def local(tmp_path_factory, espalier):
    folder = model_with_texts(espalier, tmp_path_factory.mktemp("models") / "bytes", WITH_TOOLS)
    with Local(folder, tmp_path_factory.mktemp("parent") / "state", prefix_cache="1GiB") as local:
        yield local


@pytest.fixture(scope="module")
def texts(local):
    return ModelTexts("tiny", local.base.folder)


@pytest.fixture
def agent(local):
    with openai.OpenAI(base_url=f"{local.address}/v1", api_key="any", max_retries=0) as agent:
        yield agent


@pytest.fixture(scope="module")
def trained(local):
    """A trained model, and the path of its checkpoint for sampling."""
    training = client(local.address).create_lora_training_client(base_model="tiny", rank=2, seed=3).result()
    training.forward_backward([datum([5, 6, 7, 8, 9], weights=[1.0] * 4)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    return training, training.save_weights_for_sampler("trained").result().path


def by_tinker(local, tokens, seed, size, samples=1, path=None, temperature=1.0):
    service = client(local.address)
    named = {"base_model": "tiny"} if path is None else {"model_path": path}
    params = types.SamplingParams(max_tokens=size, seed=seed, temperature=temperature)
    return service.create_sampling_client(**named).result().sample(prompt(*tokens), samples, params).result()


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Häuser?"}]


def test_models(local, agent, trained):
    assert [model.id for model in agent.models.list()] == ["tiny"]
    assert agent.models.retrieve("tiny").owned_by == "espalier"
    assert agent.models.retrieve(trained[1]).id == trained[1]
    with openai.OpenAI(base_url=f"{local.address}/oai/api/v1", api_key="any") as other:  # as the hosted service has it
        assert [model.id for model in other.models.list()] == ["tiny"]


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_a_completion_has_the_tokens_of_the_tinker_client(local, agent, texts, trained, is_checkpoint):
    path = trained[1] if is_checkpoint else None
    tokens = texts.prompt_tokens("two words")
    expected = by_tinker(local, tokens, 7, 12, samples=2, path=path)
    done = agent.completions.create(model=path or "tiny", prompt="two words", max_tokens=12, seed=7, n=2, logprobs=2)
    assert [choice.text for choice in done.choices] == [texts.text(each.tokens) for each in expected.sequences]
    assert [choice.index for choice in done.choices] == [0, 1] and done.object == "text_completion"
    for choice, sequence in zip(done.choices, expected.sequences):
        assert choice.finish_reason == sequence.stop_reason
        assert choice.logprobs.token_logprobs == pytest.approx(list(sequence.logprobs), rel=1e-6)
        assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * len(sequence.tokens) or "\ufffd" in str(choice)
    assert done.usage.prompt_tokens == len(tokens)
    assert done.usage.completion_tokens == sum(len(each.tokens) for each in expected.sequences)
    same = agent.completions.create(model=path or "tiny", prompt=tokens, max_tokens=12, seed=7, n=2)
    assert [choice.text for choice in same.choices] == [choice.text for choice in done.choices]
    assert same.usage.prompt_tokens_details.cached_tokens == len(tokens) and same.choices[0].logprobs is None


def test_the_weights_of_a_checkpoint_are_those_that_it_has_now(local, agent, trained):
    """Negative control: others than those of the base, and new ones where it is written anew."""
    training, _ = trained
    ask = lambda model: agent.completions.create(model=model, prompt=[5, 6, 7], max_tokens=20, seed=1).choices[0].text
    path = training.save_weights_for_sampler("moving").result().path
    before = ask(path)
    assert before != ask("tiny") and ask(path) == before and ask(f"tiny;{path}") == before
    training.forward_backward([datum([5, 6, 7, 8, 9], weights=[1.0] * 4)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    assert training.save_weights_for_sampler("moving").result().path == path
    assert ask(path) != before
    run, kind, name = path.removeprefix("tinker://").split("/")
    assert local.http.delete(f"training_runs/{run}/checkpoints/{kind}/{name}").status_code == 204
    with pytest.raises(openai.NotFoundError):
        ask(path)


def test_checkpoints_longest_unused_are_dropped(local, agent, trained, monkeypatch):
    monkeypatch.setattr(served, "MAX_OPENED", 2)
    training, dropped = trained[0], []
    paths = [training.save_weights_for_sampler(f"one-{number}").result().path for number in range(4)]
    drop = local.base.drop
    monkeypatch.setattr(local.base, "drop", lambda weights: (dropped.append(weights), drop(weights)))
    answers = [agent.completions.create(model=path, prompt=[5, 6], max_tokens=8, seed=1).choices[0].text for path in [*paths, paths[0]]]
    local.on_loop(local.base.do(lambda: None))
    assert len(set(answers)) == 1 and len(dropped) >= 3


def test_a_chat_is_written_by_the_template_of_the_folder(local, agent, texts):
    written = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHäuser?<|im_end|>\n<|im_start|>assistant\n"
    tokens = texts.chat_tokens(CHAT, None, {})
    assert texts.tokenizer.decode(tokens) == written
    expected = by_tinker(local, tokens, 5, 30)
    parts = [{**CHAT[0]}, {"role": "user", "content": [{"type": "text", "text": "Häu"}, {"type": "text", "text": "ser?"}]}]
    for messages in (CHAT, parts):
        done = agent.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=30, seed=5)
        [choice] = done.choices
        assert choice.message.content == texts.text(expected.sequences[0].tokens) and choice.message.role == "assistant"
        assert choice.finish_reason == expected.sequences[0].stop_reason
        assert done.usage.prompt_tokens == len(tokens) and done.object == "chat.completion"
    tops = agent.chat.completions.create(model="tiny", messages=CHAT, max_tokens=5, seed=5, logprobs=True, top_logprobs=3)
    content = tops.choices[0].logprobs.content
    assert [each.logprob for each in content] == pytest.approx(list(expected.sequences[0].logprobs)[:5], rel=1e-6)
    assert all(len(each.top_logprobs) == 3 for each in content)
    assert all(each.top_logprobs[0].logprob >= each.logprob - 1e-6 for each in content)


def test_tools_go_into_the_template(agent, texts):
    tools = [{"type": "function", "function": {"name": "dive", "parameters": {"type": "object", "properties": {}}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "dive", "arguments": '{"metres": 9}'}}
    messages = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "deep"}]  # fmt: skip
    with_tools = agent.chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=1, parallel_tool_calls=True)
    without = agent.chat.completions.create(model="tiny", messages=messages, tools=tools, tool_choice="none", max_tokens=1)
    written = texts.tokenizer.decode(texts.chat_tokens(messages, tools, {}))
    assert "dive" in written and "metres" in written and "deep" in written
    assert with_tools.usage.prompt_tokens == len(texts.chat_tokens(messages, tools, {}))
    assert without.usage.prompt_tokens == len(texts.chat_tokens(messages, None, {})) < with_tools.usage.prompt_tokens
    for other in ("required", {"type": "function", "function": {"name": "dive"}}):
        with pytest.raises(openai.BadRequestError, match="tool_choice: expected none but 'auto' or 'none'"):
            agent.chat.completions.create(model="tiny", messages=messages, tools=tools, tool_choice=other)


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_same_text_in_pieces(agent, seed):
    asked = dict(model="tiny", messages=CHAT, max_tokens=60, seed=seed, n=2)
    whole = agent.chat.completions.create(**asked)
    chunks = list(agent.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None and chunk.object == "chat.completion.chunk" for chunk in chunks[:-1])
    pieces = {0: [], 1: []}
    for chunk in chunks[:-1]:
        pieces[chunk.choices[0].index].append(chunk.choices[0])
    for choice in whole.choices:
        mine = pieces[choice.index]
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert mine[0].delta.role == "assistant" and [each.finish_reason for each in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        assert len(mine) > 4


def test_a_stream_of_a_completion(agent):
    asked = dict(model="tiny", prompt=["one", "two"], max_tokens=20, seed=2)
    whole = agent.completions.create(**asked)
    texts = ["", ""]
    for chunk in agent.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices] and texts[0] != texts[1]
    scored = list(agent.completions.create(**asked, stream=True, logprobs=1))  # which are known once an answer is whole
    assert [chunk.choices[0].text for chunk in scored] == texts
    assert [len(chunk.choices[0].logprobs.tokens) for chunk in scored] == [20, 20]


class Gate:
    """Holds the thread of the base before a step of sampling."""

    def __init__(self, monkeypatch, after):
        self.reached, self.go, steps = threading.Event(), threading.Event(), []
        step = sampling._Open.step

        def counted(open_):
            steps.append(None)
            if len(steps) == after:
                self.reached.set()
                assert self.go.wait(60)
            return step(open_)

        monkeypatch.setattr(sampling._Open, "step", counted)
        self.steps = steps


def test_tokens_are_sent_as_they_are_sampled(agent, monkeypatch):
    gate = Gate(monkeypatch, after=30)
    stream = agent.completions.create(model="tiny", prompt="a", max_tokens=60, seed=1, stream=True)
    first = next(chunk for chunk in stream if chunk.choices[0].text)
    assert first.choices[0].finish_reason is None
    assert gate.reached.wait(60) and not gate.go.is_set()  # the rest is not sampled yet
    gate.go.set()
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_cancels_its_request(local, monkeypatch, is_stream):
    gate = Gate(monkeypatch, after=3)
    gone = threading.Event()
    finish = local.service.futures.finish

    def recorded(future, payload):
        finish(future, payload)
        if future.request_id.startswith("s-openai:"):
            gone.set()

    monkeypatch.setattr(local.service.futures, "finish", recorded)
    body = json.dumps({"model": "tiny", "prompt": [3], "max_tokens": 200, "seed": 1, "stop": ["\x00\x01\x02"], "stream": is_stream})
    host, port = local.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
                           f"Content-Length: {len(body)}\r\n\r\n{body}".encode())  # fmt: skip
        assert gate.reached.wait(60) and not gone.is_set()
    assert gone.wait(60)
    gate.go.set()
    while local.base._work is not None and local.service._samplers[local.base].has_begun:
        pass
    assert len(gate.steps) < 10 and local.service.futures.pending == 0  # of 200
    assert not [name for name in local.service.futures._done if name.startswith("s-openai:")]


def test_stop_strings(local, agent, texts):
    whole = agent.completions.create(model="tiny", prompt="a", max_tokens=60, seed=3).choices[0]
    at = next(at for at in range(3, len(whole.text) - 1) if "\ufffd" not in whole.text[at : at + 2])
    stop = whole.text[at : at + 2]
    done = agent.completions.create(model="tiny", prompt="a", max_tokens=60, seed=3, stop=[stop, "never there"])
    assert done.choices[0].text == whole.text[: whole.text.index(stop)] and done.choices[0].finish_reason == "stop"
    assert done.usage.completion_tokens < 60
    stream = list(agent.completions.create(model="tiny", prompt="a", max_tokens=60, seed=3, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in stream) == done.choices[0].text
    assert stream[-1].choices[0].finish_reason == "stop"


def test_an_answer_ends_with_its_end_token(agent, texts, local):
    """Also where there are stop strings."""
    sampled = by_tinker(local, texts.chat_tokens(CHAT, None, {}), 0, 200, samples=32)
    seen = [each.stop_reason for each in sampled.sequences]
    done = agent.chat.completions.create(model="tiny", messages=CHAT, max_tokens=200, seed=0, n=32, stop=["\x00\x00\x00\x00"])
    assert [choice.finish_reason for choice in done.choices] == seen and {*seen} == {"stop", "length"}
    assert not any("<|im_end|>" in choice.message.content for choice in done.choices)


BAD = [
    (dict(model="other"), openai.NotFoundError, "expected one of tiny, received 'other'"),
    (dict(model="tinker://s-00:train:0/sampler_weights/none"), openai.NotFoundError, "found none"),
    (dict(model="tinker://../sampler_weights/x"), openai.BadRequestError, "expected tinker://RUN"),
    (dict(frequency_penalty=0.5), openai.BadRequestError, "frequency_penalty: expected none but 0"),
    (dict(logit_bias={"5": 1}), openai.BadRequestError, "logit_bias"),
    (dict(response_format={"type": "json_object"}), openai.BadRequestError, "response_format"),
    (dict(extra_body={"guided_regex": "a"}), openai.BadRequestError, "guided_regex: expected none"),
    (dict(extra_body={"chat_template_kwargs": {"chat_template": "x"}}), openai.BadRequestError, "received chat_template"),
    (dict(n=129), openai.BadRequestError, "n: "), (dict(temperature=-1), openai.BadRequestError, "temperature: "),
    (dict(top_logprobs=21), openai.BadRequestError, "top_logprobs: "), (dict(stop=[""]), openai.BadRequestError, "stop"),
    (dict(messages=[]), openai.BadRequestError, "messages: "),
    (dict(messages=[{"content": "x"}]), openai.BadRequestError, "messages.0.role"),
    (dict(messages=[{"role": "user", "content": "x" * 300}]), openai.BadRequestError, "expected 1 to 255 tokens"),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]), openai.BadRequestError,
     "messages.0.content: expected parts of type text, received one of type 'image_url'"),
    (dict(messages=[{"role": "user", "content": "x", "tool_calls": []}]), openai.BadRequestError, "tool_calls"),
    (dict(messages=[{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]), openai.BadRequestError, "name and arguments"),
]  # fmt: skip


@pytest.mark.parametrize("change, kind, words", BAD, ids=[words for _, _, words in BAD])
@pytest.mark.parametrize("is_stream", [False, True])
def test_errors(agent, change, kind, words, is_stream):
    with pytest.raises(kind) as error:
        agent.chat.completions.create(**{"model": "tiny", "messages": CHAT, "max_tokens": 2, "stream": is_stream, **change})
    assert words in error.value.body["message"] and error.value.type == "invalid_request_error"
    # Negative control: without the change it is answered, also with fields that change nothing.
    done = agent.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2, user="me", frequency_penalty=0, store=False,
                                         metadata={"a": "b"}, logit_bias=None, response_format={"type": "text"})  # fmt: skip
    assert done.choices


def test_errors_of_bodies_and_paths(local):
    post = lambda path, **body: httpx.post(f"{local.address}/v1/{path}", timeout=60, **body)
    for path, body, status in (("completions", dict(content=b"{"), 400), ("completions", dict(content=b"[1]"), 400),
                               ("completions", dict(json={}), 400), ("completions", dict(json={"model": "tiny", "prompt": []}), 400),
                               ("completions", dict(json={"model": "tiny", "prompt": [[]]}), 400),
                               ("completions", dict(json={"model": "tiny", "prompt": [999]}), 400),
                               ("completions", dict(json={"model": "tiny", "prompt": ["a"] * 257}), 400),
                               ("completions", dict(json={"model": "tiny", "prompt": ["a"] * 33, "n": 128}), 400),
                               ("embeddings", dict(json={}), 404), ("responses", dict(json={}), 404)):  # fmt: skip
        answer = post(path, **body)
        assert answer.status_code == status, answer.text
        assert {*answer.json()["error"]} == {"message", "type", "param", "code"}
    assert post("completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_failure_of_the_engine(local, agent, monkeypatch):
    def broken(self, watch):
        raise RuntimeError("broken")

    monkeypatch.setattr("espalier.sampling_call.Sampling.step", broken)
    with pytest.raises(openai.InternalServerError, match="broken"):
        agent.completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.APIError, match="broken"):
        list(agent.completions.create(model="tiny", prompt="a", stream=True))
    monkeypatch.undo()
    assert agent.completions.create(model="tiny", prompt="a").choices
    assert local.service.futures.pending == 0


def test_the_key(espalier, tmp_path):
    folder = model_with_texts(espalier, tmp_path / "bytes")
    with Local(folder, tmp_path / "state", api_key="tml-secret") as local:
        with openai.OpenAI(base_url=f"{local.address}/v1", api_key="tml-other", max_retries=0) as agent:
            with pytest.raises(openai.AuthenticationError) as error:
                agent.models.list()
            assert error.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=f"{local.address}/v1", api_key="tml-secret", max_retries=0) as agent:
            assert [model.id for model in agent.models.list()] == ["tiny"]


def test_folders_without_tokenizer_or_template(espalier, tmp_path):
    """And templates that do not write what is asked for."""
    folder = model_with_texts(espalier, tmp_path / "bytes")
    tools = [{"type": "function", "function": {"name": "dive"}}]
    for number, (template, messages, words) in enumerate((
            (NATIVE, CHAT, "tools: the chat template of tiny does not write them"),
            (TWO_ROLES, [{"role": "judge", "content": "x"}, CHAT[1]], "a message of role `judge` at the beginning"),
            ("{{ 1 }}", CHAT, "the chat template of tiny cannot be used: expected a chat template that writes"),
            ("", CHAT, "the chat template of tiny cannot be used"), (None, CHAT, "no tokenizer in its folder"))):  # fmt: skip
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).unlink()
            if template is not None:
                shutil.copy(write_model(tmp_path / f"{number}-{file}", template) / file, folder)
        with (Local(folder, tmp_path / f"state-{number}") as local,
              openai.OpenAI(base_url=f"{local.address}/v1", api_key="any", max_retries=0) as agent):  # fmt: skip
            with pytest.raises(openai.BadRequestError) as error:
                agent.chat.completions.create(model="tiny", messages=messages, tools=tools if number == 0 else [])
            assert words in error.value.body["message"]
            for given in ("a", [5]):
                ask = lambda: agent.completions.create(model="tiny", prompt=given, max_tokens=1)
                if template is not None:
                    assert ask().choices
                    continue
                with pytest.raises(openai.BadRequestError, match="no tokenizer in its folder"):
                    ask()


def test_the_example_of_the_documentation(local, trained, tmp_path):
    text = (REPOSITORY / "docs/server.md").read_text(encoding="utf-8")
    (block,) = [each for each in blocks_of(text) if each.title == "ask.py"]
    (tmp_path / "ask.py").write_text(block.code)
    done = subprocess.run([sys.executable, tmp_path / "ask.py", local.address, trained[1]], capture_output=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().split("\n", 2)
    assert lines[0] == "models: tiny" and lines[1] in [f"length {8} tokens", *(f"stop {count} tokens" for count in range(1, 9))]
    assert lines[2]


def test_a_listener_hears_each_token_once():
    """Also where a failed step lets the request begin again."""
    heard = []
    sample = requests.Sample.model_validate({"prompt": {"chunks": []}, "sampling_params": {}, "num_samples": 2})
    request = sampling.Request(None, sample, None, 5, None, listener=lambda *each: heard.append(each))
    told = [(0, 7), (1, 8), (0, 9), (1, 7)]
    for each in told[:3]:
        request.hear(*each)
    request.restart()
    for each in told:
        request.hear(*each)
    assert heard == told


def test_text_is_cut_on_whole_characters(texts):
    text = "aé漢😀b ßüö \u0000 z"
    tokens = texts.prompt_tokens(text)
    stream = TextStream(texts.text, [])
    pieces = [stream.add([token]) for token in tokens]
    assert "".join(pieces) == text and len(pieces) == len(text.encode()) and not any("\ufffd" in piece for piece in pieces)
    assert [bool(piece) for piece in pieces[:10]] == [True, False, True, False, False, True, False, False, False, True]
    cut = TextStream(texts.text, [])  # in the middle of a character
    assert cut.add(tokens[:2]) == "a" and cut.add([], is_last=True) == "\ufffd"
    broken = TextStream(texts.text, [])
    damaged = [0xF0] * 200 + texts.prompt_tokens("end")
    alphabet = texts.tokenizer.convert_tokens_to_ids("ð")
    found = "".join(broken.add([alphabet]) for _ in range(200)) + broken.add(damaged[200:])
    assert found.endswith("end") and found.count("\ufffd") == 200 and len(broken._tokens) < 100


def test_text_before_stop_strings():
    for stop, pieces, expected, is_stopped in (
        (["ab"], ["xa", "b", "y"], ["x", "", ""], True), (["ab"], ["xa", "c", "y"], ["x", "ac", "y"], False),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], True), (["b", "ab"], ["xab"], ["x"], True), ([], ["ab"], ["ab"], False),
        (["abc", "bd"], ["ab", "d"], ["", "a"], True),
    ):  # fmt: skip
        cut = StopCut(stop)
        assert [cut.add(piece) for piece in pieces] == expected and cut.is_stopped == is_stopped
    cut = StopCut(["ab"])
    assert cut.add("xa") == "x" and cut.add("", is_last=True) == "a"
