# SPDX-License-Identifier: Apache-2.0
"""Requests to `espalier serve` by the schema of what a route reads: those that an honest client could send, and changed ones."""

import base64
import copy
import json
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np
import zstandard

from espalier.server import schema

from servers import forward_backward

PROTOBUF, FILE = "protobuf", "file"  # what a route reads that reads no JSON
HUGE = [-1, 0, 1, 255, (1 << 31) - 1, 1 << 31, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, 10**40, 1e308, -1e308,
        5e-324, 0.5]  # fmt: skip
TEXTS = ["", " ", "x" * 5000, "../../secret", "tinker://", "a/b", "%2e%2e", "\0", "\u202e", "\ud800", "None", "0", "-1", "{}",
         "tiny\n"]  # fmt: skip
OTHERS = [None, True, False, [], {}, [[]], [None], {"": 0}, {"type": "image"}, [1, "a"], [[[[]]]], ["x"] * 100]
COSTLY = {"num_samples", "n", "max_tokens", "max_completion_tokens", "prompt_alt_tokens_k", "topk_prompt_logprobs",
          "topk_sample_logprobs", "rank", "top_logprobs"}  # which are small, or beyond what is allowed


class Draw:
    """Values for the requests of a party."""

    def __init__(self, party):
        self.party, self.random = party, party.random

    def choose(self, values):
        return values[self.random.randrange(len(values))]

    def body(self, kind, path):
        """Fields of a request of this kind that an honest client could send."""
        about = kind.model_json_schema()
        body = self._object(about, about.get("$defs", {}), path)
        if "seq_id" in body and body.get("model_id"):
            body["seq_id"] = self.party.number(body["model_id"])
        if path.endswith("load_weights"):  # into a model, or into a new one
            for name in ("session_id", "model_seq_id") if self.random.random() < 0.5 else ("model_id", "seq_id"):
                body.pop(name, None)
        if path.endswith("upload_finish"):
            body["upload_id"] = self.party.upload()
        return body

    def _object(self, about, defs, path):
        needed = about.get("required", [])
        fields = {}
        for name, each in about.get("properties", {}).items():
            ids = self._known(name, path)
            if name in needed or ids is not None or self.random.random() < 0.3:
                fields[name] = self._value(each, defs, name, path) if ids is None else ids
        return fields

    def _known(self, name, path):
        """Ids and texts that fit a field of this name; None where its schema says enough."""
        party, is_load = self.party, path.endswith(("load_weights", "create_sampling_session"))
        pools = {"session_id": [party.session], "model_id": party.models, "sampling_session_id": party.samplers,
                 "base_model": ["tiny"], "request_id": list(party.promises), "tinker_path": party.paths, "source_path": party.paths,
                 "upload_id": party.uploads, "model": ["tiny", *party.paths[-2:]], "tokens": [[1, 2, 3], [7]],
                 "messages": [[{"role": "user", "content": "Two words"}]],
                 "prompt": ["Two words", [1, 2, 3]] if "completions" in path else [], "type": ["adamw"] if "adam" in path else [],
                 "chunks": [[{"type": "encoded_text", "tokens": [self.random.randrange(250) for _ in range(5)]}]],
                 "path": party.paths if is_load else [f"c{party.next()}"], "model_path": party.paths if is_load else [],
                 "timeout": [0.0, 0.05], "max_tokens": [1, 3], "n": [1, 2], "tools": [[]], "ttl_seconds": [3600],
                 "lora_config": [{"rank": 2}, {"rank": 1, "seed": 3, "train_unembed": False}],
                 "last_created_at": ["2026-01-01T00:00:00+00:00"]}  # fmt: skip
        if name in ("model_seq_id", "sampling_session_seq_id", "seq_id"):
            return party.next()
        if name == "model_path" and self.random.random() < 0.5:
            return None
        return self.choose(pools[name]) if pools.get(name) else None

    def _value(self, about, defs, name, path):
        if "$ref" in about:
            return self._value(defs[about["$ref"].rpartition("/")[2]], defs, name, path)
        if "anyOf" in about:
            return self._value(self.choose(about["anyOf"]), defs, name, path)
        if "const" in about or "enum" in about:
            return about.get("const") or self.choose(about["enum"])
        kind = about.get("type")
        if kind == "object" and "properties" in about:
            return self._object(about, defs, path)
        if kind == "array":
            return [self._value(about.get("items", {}), defs, name, path) for _ in range(self.random.randrange(3))]
        if kind in ("integer", "number"):
            low = about.get("minimum", about.get("exclusiveMinimum", 0))
            value = max(low, 0) + (self.random.randrange(4) if kind == "integer" else 0.25 * self.random.random())
            return value if kind == "number" or value >= low else low
        if kind == "string":
            return "abc"[: self.random.randrange(1, 4)]
        return {"boolean": self.random.random() < 0.5, "null": None, "object": {}}.get(kind, "any")

    def hostile(self, name, value):
        """In place of a value."""
        turn = self.random.random()
        if turn < 0.15 and (theirs := self.party.theirs()):
            return self.choose(theirs)
        if turn < 0.5:
            number = self.choose(HUGE)
            return number if name not in COSTLY or not 8 < number < 100_000 else -number
        if turn < 0.7:
            return self.choose(TEXTS)
        if turn < 0.8 and isinstance(value, str | list) and value:
            return value[:-1] if self.random.random() < 0.5 else value * 2
        if turn < 0.85 and isinstance(value, int | float):
            return str(value)
        return copy.deepcopy(self.choose(OTHERS))

    def changed(self, body):
        """Another body, with a field that is wrong, missing, unknown or at another place."""
        body = copy.deepcopy(body)
        for _ in range(self.random.randrange(1, 4)):
            places = list(_places(body))
            if not places or self.random.random() < 0.1:
                body[self.choose(["unknown", "", "type", "seq_id", "model_id"])] = self.hostile("", 1)
                continue
            inside, key = self.choose(places)
            if isinstance(inside, dict) and self.random.random() < 0.15:
                value = inside.pop(key)
                if self.random.random() < 0.3:
                    inside[key.upper()] = value
            else:
                inside[key] = self.hostile(key, inside[key])
        return body

    def message(self, model):
        """A ForwardBackwardRequest of an honest client."""
        tokens = [self.random.randrange(250) for _ in range(self.random.randrange(2, 12))]
        message = forward_backward(model, self.party.number(model), tokens)
        message.forward_only = self.random.random() < 0.3
        return message

    def fill(self, message, depth=0):
        """Sets fields to values of their type."""
        for field in message.DESCRIPTOR.fields:
            if self.random.random() < 0.7:
                continue
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            if is_map:
                value = field.message_type.fields_by_name["value"]
                key = self.choose(["target_tokens", "weights", "logprobs", "advantages", "beta", "clip_low_threshold", ""])
                table = getattr(message, field.name)
                if value.message_type is None:
                    table[key] = self._scalar(value)
                else:
                    self.fill(table[key], depth + 1)
            elif field.message_type is not None:
                target = getattr(message, field.name)
                if depth < 6:
                    self.fill(target.add() if field.is_repeated else target, depth + 1)
                    if not field.is_repeated:
                        target.SetInParent()
            elif field.is_repeated:
                getattr(message, field.name).extend(self._scalar(field) for _ in range(self.random.randrange(3)))
            else:
                setattr(message, field.name, self._scalar(field))

    def _scalar(self, field):
        kind = field.cpp_type
        if kind in (field.CPPTYPE_INT32, field.CPPTYPE_INT64):
            bits = 31 if kind == field.CPPTYPE_INT32 else 63
            return self.choose([0, 1, 2, 3, -1, 4, (1 << bits) - 1, -(1 << bits)])
        if kind == field.CPPTYPE_DOUBLE:
            return self.choose([0.0, 1.0, -1.0, 1e308, float("nan"), float("inf")])
        if kind == field.CPPTYPE_BOOL:
            return True
        if field.type == field.TYPE_BYTES:
            count = self.random.randrange(5)
            numbers = np.full(count, self.choose([np.nan, np.inf, 3e38, 1.0]), "<f4")
            return self.choose([np.arange(count, dtype="<i4").tobytes(), np.arange(count, dtype="<i8").tobytes(), numbers.tobytes(),
                                self.random.randbytes(5)])  # fmt: skip
        names = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "", "x" * 300]
        return self.choose(names + self.party.theirs() + self.party.models)


def _places(value):
    """Where in a body of JSON something may be put in place of something else."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


BOMB = zstandard.compress(b"\0" * (1 << 26))
WHOLE = [b"", b"[]", b"null", b"1", b'"a"', b"[" * 50_000, b'{"a":' * 20_000, b"{" + b"9" * 5000 + b"}", b'{"seq_id": NaN}',
         b'{"seq_id": 1e999}',
         b'{"seq_id": ' + b"9" * 5000 + b"}", b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b'{"a": "\xc3"}', b'{"model_id": "\\ud800", "seq_id": 1}',
         b'{"seq_id": 1, "seq_id": 2}', b"{}{}", b"{'a': 1}", b"\0" * 100]  # fmt: skip


@dataclass
class Attempt:
    """A request of the mutator. is_mutated: it differs from what an honest client sends."""

    method: str
    url: str
    content: bytes
    headers: dict
    is_mutated: bool

    def __str__(self):
        return (f"{self.method} {self.url}\nheaders {self.headers}\nbody of {len(self.content)} bytes, base64: "
                f"{base64.b64encode(self.content[:3000]).decode()}\n{self.content[:500]!r}")  # fmt: skip


class Generator:
    """Requests of a party, for any route."""

    def __init__(self, party):
        self.party, self.random, self.draw = party, party.random, Draw(party)

    def valid(self, route):
        """A request that an honest client could send."""
        content, headers = b"", {}
        if route.kind == PROTOBUF:
            content = self.draw.message(self.draw.choose(self.party.models)).SerializeToString()
            headers = {"content-type": "application/x-protobuf"}
        elif route.kind == FILE:
            pass
        elif route.kind is not None:
            content = json.dumps(self.draw.body(route.kind, route.path)).encode()
            headers = {"content-type": "application/json"}
        url, name = self._url(route, is_valid=True)
        if route.kind == FILE:
            content = self.party.adapter.get(name, b"")
        return Attempt(route.method, url, content, headers, is_mutated=False)

    def mutated(self, route):
        """One that differs from a valid one."""
        base = self.valid(route)
        while True:
            attempt = copy.deepcopy(base)
            self.draw.choose([self._body, self._body, self._body, self._bytes, self._place, self._packing, self._header])(route, attempt)
            if (attempt.url, attempt.content, attempt.headers, attempt.method) != (base.url, base.content, base.headers, base.method):
                attempt.is_mutated = True
                return attempt

    def unfit(self, route):
        """One that has to be refused, whatever the route: by its path, its query or its body."""
        attempt = self.valid(route)
        if route.fields:
            attempt.url = self._url(route, is_valid=None)[0]
        attempt.url += "?limit=x"
        attempt.content, attempt.headers["content-encoding"] = zstandard.compress(attempt.content + b"{}")[:-3], "zstd"
        attempt.is_mutated = True
        return attempt

    def _url(self, route, *, is_valid):
        """Its path, and the last field that was put into it. is_valid: None where each field has to be wrong."""
        party, choose = self.party, self.draw.choose
        path = choose(party.paths).removeprefix("tinker://").split("/") if party.paths else ["x", "weights", "y"]
        if route.method == "DELETE" and is_valid and party.paths:
            party.paths.remove("tinker://" + "/".join(path))
        upload = party.upload() if "{upload}" in route.path and is_valid else choose([*party.uploads, "x"])
        values = {"session": party.session, "sampler": choose(party.samplers or ["x"]), "run": path[0], "kind": path[1], "name": path[2],
                  "file:path": choose(["adapter_config.json", "adapter_model.safetensors"]), "upload": upload,
                  "file": choose(list(party.adapter)), "path:path": choose(["embeddings", "files/x", ""]),
                  "model:path": choose(["tiny", *party.paths[-2:]])}  # fmt: skip
        url = route.path
        for field in route.fields:
            wrong = choose([*TEXTS, *party.theirs(), "..", ".", "a" * 3000]) if is_valid is not None else "nothing"
            value = values[field] if is_valid or (is_valid is False and self.random.random() < 0.4) else wrong
            url = url.replace(f"{{{field}}}", quote(value.encode("utf-8", "replace"), safe="/" if field.endswith(":path") else ""))
        return url, values[route.fields[-1]] if route.fields else ""

    def _body(self, route, attempt):
        """Fields that are wrong, in a body that can be read; a query that is wrong where there is no body."""
        if route.kind == PROTOBUF:
            message = schema.ForwardBackwardRequest.FromString(attempt.content)
            other = schema.ForwardBackwardRequest()
            self.draw.fill(other)
            if self.random.random() < 0.5:  # a number that was used, or one behind a gap
                other.seq_id = max(0, message.seq_id + self.draw.choose([-1, 2, 5, 1000]))
            if self.random.random() < 0.7:
                other.ClearField("model_id")
            message.MergeFrom(other)
            attempt.content = message.SerializeToString()
        elif route.kind in (None, FILE):
            name = self.draw.choose(["limit", "offset", "expires", "signature", "x"])
            attempt.url += f"?{name}={quote(str(self.draw.hostile('', 1)).encode('utf-8', 'replace'))}"
        else:
            fields = json.loads(attempt.content)
            if isinstance(fields.get("seq_id"), int) and self.random.random() < 0.2:
                fields["seq_id"] = max(0, fields["seq_id"] + self.draw.choose([-1, -3, 1, 2, 7, 1 << 40]))
            else:
                fields = self.draw.changed(fields)
            attempt.content = json.dumps(fields).encode()

    def _bytes(self, route, attempt):
        """Bytes that are cut, changed or doubled, or another body."""
        body = bytearray(attempt.content)
        turn = self.random.randrange(6)
        place = self.random.randrange(len(body) + 1)
        if turn == 0:
            del body[place:]
        elif turn == 1 and body:
            body[place % len(body)] = self.random.randrange(256)
        elif turn == 2:
            body[place:place] = self.random.randbytes(self.random.randrange(1, 9))
        elif turn == 3:
            body[place:place] = body[self.random.randrange(len(body) + 1) :][:40]
        elif turn == 4:
            del body[place : place + self.random.randrange(1, 9)]
        else:
            body = self.draw.choose(WHOLE)
        attempt.content = bytes(body)

    def _place(self, route, attempt):
        """Another path, or the method of another route."""
        if route.fields and self.random.random() < 0.9:
            attempt.url = self._url(route, is_valid=False)[0]
        elif self.random.random() < 0.5:
            attempt.method = self.draw.choose(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
        else:
            attempt.url += self.draw.choose(["/", "//x", "?", "?limit=1&limit=2", "%00", "%ff", ";x", "/../healthz"])

    def _packing(self, route, attempt):
        """The body in zstd, whole or not."""
        packed = zstandard.compress(attempt.content)
        attempt.content = self.draw.choose([
            packed, packed, packed[: self.random.randrange(len(packed))], packed + packed, packed + b"\0", attempt.content, BOMB,
            packed[:8] + self.random.randbytes(4) + packed[12:]])  # fmt: skip
        attempt.headers["content-encoding"] = self.draw.choose(["zstd", "zstd", "zstd", "gzip", "zstd, zstd", "x" * 500])

    def _header(self, route, attempt):
        name, values = self.draw.choose([
            ("content-type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x", "",
                              "application/xml", "application/x-protobuf", "application/json; charset=utf-16"]),
            ("x-api-key", ["", "tml-", "x" * 5000, "tml-other2"]), ("host", ["page.example", "", "127.0.0.1:x", "[::1"]),
            ("origin", ["http://page.example", "null"]), ("sec-fetch-site", ["cross-site", "x"]),
            ("range", ["bytes=5-2", "bytes=0-0,2-9", "x"]),
            ("content-encoding", ["deflate", "identity"]), ("expect", ["100-continue"]), ("accept-encoding", ["x, *;q=2"])])  # fmt: skip
        attempt.headers[name] = self.draw.choose(values)


