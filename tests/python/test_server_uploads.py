# SPDX-License-Identifier: Apache-2.0
"""Uploads of adapters to `espalier serve`, and the search of checkpoints, as the routes of the Tinker API 0.39 have them."""

import json
import shutil

import httpx
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("tinker", reason="the client of the Tinker API")

from tinker import types

import transformers_reference as reference
from engines import init_model
from espalier.server import uploads
from servers import Local, client, datum, prompt

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def local(folder, tmp_path_factory):
    with Local(folder, tmp_path_factory.mktemp("parent") / "state") as local:
        yield local


@pytest.fixture(autouse=True)
def no_uploads(local):
    """Those of other tests."""
    yield
    local.app._uploads._uploads.clear()


@pytest.fixture(scope="module")
def adapted(folder, tmp_path_factory):
    """An adapter that PEFT wrote: its folder, and the model of Transformers with it."""
    torch.manual_seed(5)
    model = peft.get_peft_model(reference.load_model(folder, torch.float64),
                                peft.LoraConfig(r=3, lora_alpha=12, target_modules=TARGETS))  # fmt: skip
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    place = tmp_path_factory.mktemp("peft") / "adapter"
    model.save_pretrained(place)
    return place, model


LORA = {"rank": 3, "train_unembed": False}


def start(local, **more):
    answer = local.post("external_weights_upload_start", {"base_model": "tiny", "lora_config": LORA, **more})
    return answer.json() if answer.status_code == 200 else answer


def send(upload, place, without=()):
    for name, url in upload["urls"].items():
        if name not in without:
            assert httpx.put(url, content=(place / name).read_bytes()).status_code == 204


def finish(local, upload):
    return local.post("external_weights_upload_finish", {"upload_id": upload["upload_id"]})


def uploaded(local, place):
    upload = start(local)
    send(upload, place)
    return finish(local, upload)


def test_an_adapter_of_peft_becomes_a_checkpoint(local, adapted):
    place, model = adapted
    upload = start(local)
    assert sorted(upload["urls"]) == ["adapter_config.json", "adapter_model.safetensors"] and upload["expires"].endswith("+00:00")
    send(upload, place)
    answer = finish(local, upload)
    path = answer.json()["tinker_path"]
    assert finish(local, upload).json()["tinker_path"] == path  # a repeated request gets the same
    tokens = [5, 6, 7, 8, 9, 10]
    logits = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    expected = [logits[at, token].item() for at, token in enumerate(tokens[1:])]
    service = client(local.address)
    found = service.create_sampling_client(model_path=path).result().compute_logprobs(prompt(*tokens)).result()
    assert found[1:] == pytest.approx(expected, rel=1e-6)
    # Negative control: not those of the base.
    base = service.create_sampling_client(base_model="tiny").result().compute_logprobs(prompt(*tokens)).result()
    assert base[1:] != pytest.approx(expected, rel=1e-2)
    training = service.create_training_client_from_state(path).result()
    before = training.forward([datum(tokens, weights=[1.0] * 5)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert list(before) == pytest.approx(expected, rel=1e-6)
    training.forward_backward([datum(tokens, weights=[1.0] * 5)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert local.post("weights_info", {"tinker_path": path}).json()["lora_rank"] == 3


def test_what_the_server_saves_can_be_brought_back(local):
    service = client(local.address)
    training = service.create_lora_training_client(base_model="tiny", rank=3, seed=2, train_unembed=False).result()
    training.forward_backward([datum([1, 2, 3, 4], weights=[1.0] * 3)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = training.save_weights_for_sampler("out").result().path
    run, kind, name = path.removeprefix("tinker://").split("/")
    answer = uploaded(local, local.store.folder / "runs" / run.replace(":", ".") / kind / name / "adapter")
    values = [service.create_sampling_client(model_path=each).result().compute_logprobs(prompt(1, 2, 3, 4)).result()
              for each in (path, answer.json()["tinker_path"])]  # fmt: skip
    assert values[0] == values[1]


def changed(place, to, config=None, tensors=None):
    """A copy of an adapter with another configuration, or other tensors."""
    shutil.copytree(place, to)
    if config is not None:
        about = json.loads((to / "adapter_config.json").read_text())
        (to / "adapter_config.json").write_text(json.dumps({**about, **config}))
    if tensors is not None:
        save_file(tensors(load_file(to / "adapter_model.safetensors")), to / "adapter_model.safetensors")
    return to


def with_nan(tensors):
    name = next(iter(tensors))
    return {**tensors, name: torch.full_like(tensors[name], np.nan)}


def other_shape(tensors):
    name = next(name for name in tensors if "lora_A" in name)
    return {**tensors, name: tensors[name][:, :-1].contiguous()}


WRONG = {
    "rank": (dict(config={"r": 4}), "expected shape"), "dora": (dict(config={"use_dora": True}), "use_dora"),
    "kind": (dict(config={"peft_type": "IA3"}), "peft_type"), "modules": (dict(config={"modules_to_save": ["lm_head"]}), "modules_to_save"),
    "shape": (dict(tensors=other_shape), "shape"), "nan": (dict(tensors=with_nan), "not finite"),
    "missing": (dict(tensors=lambda tensors: dict(list(tensors.items())[1:])), "is missing"),
    "unknown": (dict(tensors=lambda tensors: {**tensors, "base_model.model.x.lora_A.weight": torch.zeros(3, 3)}), "no linear map"),
    "attention": (dict(tensors=lambda tensors: {name: value for name, value in tensors.items() if "mlp" in name}),
                  "lora_config: expected train_attn=False"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_adapters_are_refused(local, adapted, tmp_path, case):
    change, words = WRONG[case]
    answer = uploaded(local, changed(adapted[0], tmp_path / "adapter", **change))
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["detail"] and str(local.store.folder) not in answer.json()["detail"]
    assert not [each for each in local.store.checkpoints() if each["tinker_path"] == answer.json().get("tinker_path")]


def test_damaged_files_are_refused(local, adapted, tmp_path):
    place = changed(adapted[0], tmp_path / "adapter")
    whole = (place / "adapter_model.safetensors").read_bytes()
    for content in (b"", whole[:100], whole[:-8], (1 << 62).to_bytes(8, "little") + whole[8:], b"\x80\x04N."):
        (place / "adapter_model.safetensors").write_bytes(content)
        assert uploaded(local, place).status_code == 400
    for config in ("", "[]", "{", '{"r": 1e300, "peft_type": "LORA"}'):
        (place / "adapter_config.json").write_text(config)
        assert uploaded(local, place).status_code == 400
    upload = start(local)  # after an error the files can be sent again
    send(upload, place)
    assert finish(local, upload).status_code == 400
    send(upload, adapted[0])
    assert finish(local, upload).status_code == 200


def broken_off():
    yield b"{"
    raise httpx.WriteError("gone")


def test_an_upload_by_steps(local, adapted, monkeypatch):
    upload = start(local)
    url = upload["urls"]["adapter_config.json"]
    answer = finish(local, upload)
    assert answer.status_code == 409 and "adapter_config.json has not come" in answer.json()["detail"]
    for name in ("adapter_model.bin", "x.py", "..%2Fx", "adapter_config.json.part"):
        assert httpx.put(url.replace("adapter_config.json", name), content=b"x").status_code == 404
    assert httpx.put(url.replace(upload["upload_id"], "other"), content=b"x").status_code == 404
    assert httpx.put(url, content=b" " * (1 << 20) + b"x").status_code == 413
    assert httpx.put(url, content=iter([b" " * (1 << 20), b"x"])).status_code == 413
    assert httpx.put(url, content=b"x", headers={"content-encoding": "gzip"}).status_code == 415
    with pytest.raises(httpx.HTTPError), httpx.Client() as http:  # a body that breaks off
        http.put(url, content=broken_off())
    assert finish(local, upload).status_code == 409
    send(upload, adapted[0], without=["adapter_model.safetensors"])
    assert finish(local, upload).status_code == 409
    send(upload, adapted[0])
    assert finish(local, upload).status_code == 200
    assert httpx.put(url, content=b"x").status_code == 409
    for body in ({"base_model": "other", "lora_config": LORA}, {"base_model": "tiny"},
                 {"base_model": "tiny", "lora_config": {"rank": 0}}):  # fmt: skip
        assert local.post("external_weights_upload_start", body).status_code in (400, 404)
    monkeypatch.setattr(uploads, "UPLOAD_SECONDS", -1.0)
    expired = start(local)
    assert httpx.put(expired["urls"]["adapter_config.json"], content=b"x").status_code == 404
    assert finish(local, expired).status_code == 404
    monkeypatch.undo()
    monkeypatch.setattr(uploads, "UPLOAD_BYTES", 1 << 12)
    full = start(local)
    assert httpx.put(full["urls"]["adapter_config.json"], content=b"x" * 5000).status_code == 429
    assert httpx.put(full["urls"]["adapter_config.json"], content=b"x" * 50).status_code == 204  # it takes no room any more
    monkeypatch.setattr(uploads, "MAX_UPLOADS", 2)
    answers = [start(local) for _ in range(3)]
    assert answers[-1].status_code == 429


def test_files_need_no_key_but_uploads_do(folder, adapted, tmp_path):
    with Local(folder, tmp_path / "state", api_key="tml-secret") as local:
        assert start(local).status_code == 401
        local.http.headers["x-api-key"] = "tml-secret"
        upload = start(local)
        send(upload, adapted[0])
        del local.http.headers["x-api-key"]
        assert finish(local, upload).status_code == 401
        local.http.headers["x-api-key"] = "tml-secret"
        assert finish(local, upload).status_code == 200


def found(local, **asked):
    answer = local.post("checkpoints/search", asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_checkpoints_are_searched(folder, tmp_path):
    with Local(folder, tmp_path / "state") as local:
        training = client(local.address).create_lora_training_client(base_model="tiny", rank=2, seed=3).result()
        paths = [training.save_state(f"state-{number}", user_metadata={"step": str(number), "kind": "x"}).result().path
                 for number in range(3)]  # fmt: skip
        paths.append(training.save_weights_for_sampler("sampler").result().path)
        newest = paths[::-1]
        page = found(local)
        assert [each["tinker_path"] for each in page["checkpoints"]] == newest and page["next_cursor"] is None
        assert {each["base_model"] for each in page["checkpoints"]} == {"tiny"}
        seen, cursor = [], None
        while True:
            page = found(local, limit=2, cursor=cursor)
            seen += [each["tinker_path"] for each in page["checkpoints"]]
            if (cursor := page["next_cursor"]) is None:
                break
        assert seen == newest
        for asked, expected in (({"user_metadata": {"step": "1"}}, [paths[1]]), ({"user_metadata": {"step": "1", "kind": "y"}}, []),
                                ({"user_metadata": {"kind": "x"}}, newest[1:]), ({"checkpoint_type": "sampler"}, newest[:1]),
                                ({"checkpoint_type": "external"}, []), ({"base_models": ["tiny"]}, newest),
                                ({"base_models": []}, []), ({"base_models": ["other"]}, []),
                                ({"owner": {"type": "accessible"}}, newest)):  # fmt: skip
            assert [each["tinker_path"] for each in found(local, **asked)["checkpoints"]] == expected, asked
        for asked in ({"project_ids": ["p"]}, {"owner": {"type": "user", "owner_urns": ["u"]}}, {"limit": 0}, {"limit": 201},
                      {"checkpoint_type": "other"}, {"cursor": {"last_created_at": "x", "last_checkpoint_uuid": ""}}):  # fmt: skip
            assert local.post("checkpoints/search", asked).status_code == 400, asked
        listed = local.http.get("checkpoints").json()["checkpoints"]
        assert [each["base_model"] for each in listed] == ["tiny"] * 4
