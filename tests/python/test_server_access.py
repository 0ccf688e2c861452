# SPDX-License-Identifier: Apache-2.0
"""Who may come in to `espalier serve`: keys, pages of a browser, addresses, URLs that are signed. No model is needed for that."""

import asyncio
import os
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import httpx
import pytest
import zstandard

pytest.importorskip("starlette", reason="the routes of `espalier serve`")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse
from starlette.routing import Route

from conftest import REPOSITORY
from espalier.errors import InputError, UsageError
from espalier.server import access, arguments, bodies, command, requests, signing
from espalier.server.access import Access, Door
from espalier.server.app import _answer_to
from espalier.server.arguments import parse_arguments
from espalier.server.errors import Refused
from espalier.server.listening import listen, url_of
from espalier.server.signing import Signer


class Client:
    """A client of an application behind Access, without a network."""

    def __init__(self, api_key="", hosts=(), clock=lambda: 1000.0):
        self.signer = Signer(clock)
        self.reached = []
        routes = [Route("/api/v1/{path:path}", self._answer, methods=["GET", "POST", "PUT", "DELETE"])]
        self.access = Access([Door(api_key, Starlette(routes=routes), self.signer)], hosts)

    async def _answer(self, request: Request):
        self.reached.append(request.url.path)
        return JSONResponse({"bytes": len(await request.body())})

    def __call__(self, method, path, headers=(), content=b"", host="127.0.0.1:8000"):
        async def send():
            transport = httpx.ASGITransport(self.access)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
                return await client.request(method, path, headers=dict(headers), content=content)

        return asyncio.run(send())


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1:8000", 200), ("localhost:8000", 200), ("LOCALHOST", 200), ("[::1]:8000", 200), ("192.168.1.9:8000", 200),
    ("box.example:8000", 200), ("page.example", 421), ("page.example:8000", 421), ("127.0.0.1.page.example", 421),
    ("localhost.page.example", 421), ("box.example.page.example", 421), ("127.0.0.1@page.example", 421), ("", 421),
])  # fmt: skip
def test_a_name_that_was_bound_to_this_machine_reads_nothing(host, status):
    door = Client(hosts=["Box.example"])
    answer = door("GET", "/api/v1/sessions", {"Host": host})
    assert answer.status_code == status and bool(door.reached) == (status == 200)
    assert status == 200 or answer.json()["detail"].startswith("Host: expected")


@pytest.mark.parametrize("headers", [
    {"Origin": "http://page.example"}, {"Origin": "null"}, {"Origin": "http://localhost:3000"}, {"Origin": "http://127.0.0.1"},
    {"Origin": "http://127.0.0.1:80000"}, {"Origin": "http://["}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
    {"Content-Type": "text/plain"}, {"Content-Type": "text/plain;charset=UTF-8"}, {"Content-Type": "Multipart/Form-Data; boundary=x"},
    {"Content-Type": "application/x-www-form-urlencoded"},
])  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_a_page_in_a_browser_changes_nothing(headers, method):
    door = Client()
    answer = door(method, "/api/v1/create_session", headers, b"{}")
    assert answer.status_code == (415 if "Content-Type" in headers else 403) and not door.reached
    assert answer.json()["detail"].startswith(next(iter(headers)))


@pytest.mark.parametrize("headers", [
    {}, {"Content-Type": "application/json"}, {"Content-Type": "application/x-protobuf"}, {"Origin": "http://127.0.0.1:8000"},
    {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"},
])  # fmt: skip
def test_what_clients_send_is_served(headers):
    assert Client()("POST", "/api/v1/create_session", headers, b"{}").json() == {"bytes": 2}


def test_a_key_is_needed_but_for_the_health_of_the_server():
    door = Client("tml-secret")
    assert door("GET", "/api/v1/healthz").status_code == 200
    for path in ("/api/v1/sessions", "/metrics", "/api/v1/healthz/", "/nothing"):
        assert door("GET", path).status_code == 401
    assert door("GET", "/api/v1/sessions", {"X-API-Key": "tml-secret"}).status_code == 200
    assert door("GET", "/api/v1/healthz", {"Origin": "http://page.example"}).status_code == 403


def test_a_signed_url_reads_one_file_for_a_time():
    now = [1000.0]
    door = Client("tml-secret", clock=lambda: now[0])
    path = "/api/v1/training_runs/s-1:train:0/checkpoints/weights/a/files/x y.bin"
    query, expires = door.signer.query(path)
    assert expires == 1000 + signing.SECONDS
    assert door("GET", f"{path}?{query}").status_code == 200
    other = Signer(lambda: 1000.0).query(path)[0]
    for wrong in (f"{path}2?{query}", path, f"{path}?{query[:-1]}", f"{path}?{query}0", f"{path}?{other}", "/api/v1/sessions?" + query,
                  f"{path}?{query.replace(str(expires), str(expires + 1))}", f"{path}?expires={expires}&signature=é", f"{path}?{'a=1&' * 50}{query}",
                  f"{path}?{query.replace(str(expires), 'x')}", path.replace("/a/", "/a%2F/") + "?" + query):
        assert door("GET", wrong).status_code == 401, wrong
    for method in ("POST", "PUT", "DELETE"):
        assert door(method, f"{path}?{query}").status_code == 401
    now[0] += signing.SECONDS + 1
    assert door("GET", f"{path}?{query}").status_code == 401


def test_bodies_that_come_at_the_same_time_are_bounded(monkeypatch):
    """Of two bodies the second does not fit, and a single one of any size does."""
    monkeypatch.setattr(access, "INCOMING_BYTES", 100)
    begun, go = asyncio.Event(), asyncio.Event()
    seen = []

    async def inside(scope, receive, send):
        try:
            seen.append(len((await receive())["body"]))
        except Refused as error:
            seen.append(error.status)
            return
        begun.set()
        await go.wait()

    door = Access([Door("", inside, Signer())], [])
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")]}

    def body(size):
        async def receive():
            return {"type": "http.request", "body": b"a" * size}

        return receive

    async def run():
        first = asyncio.create_task(door(scope, body(90), None))
        await begun.wait()
        await door(scope, body(20), None)
        go.set()
        await first
        await door(scope, body(200), None)

    asyncio.run(run())
    assert seen == [90, 429, 200]


def test_an_answer_that_fails_while_it_is_sent_is_one_line(tmp_path, caplog):
    async def inside(scope, receive, send):
        await FileResponse(tmp_path / "gone")(scope, receive, send)

    scope = {"type": "http", "method": "GET", "path": "/x\n", "headers": [(b"host", b"localhost")]}
    asyncio.run(Access([Door("", inside, Signer())], [])(scope, None, None))
    (record,) = caplog.records
    assert "RuntimeError" in record.getMessage() and "\n" not in record.getMessage() and not record.exc_info


@pytest.mark.parametrize(("error", "status", "words"), [
    (Refused("no", 410), 410, "no"), (InputError("no"), 400, "no"), (OSError(28, "No space left on device"), 507, "--state is full"),
    (OSError(122, "Disk quota exceeded"), 507, "--state is full"), (OSError(24, "Too many open files"), 503, "file descriptors"),
    (MemoryError(), 503, "no memory"), (KeyError("secret"), 500, "KeyError"), (OSError(5, "Input/output error"), 500, "OSError"),
])  # fmt: skip
def test_every_error_of_a_handler_has_an_answer(error, status, words):
    found, text = _answer_to(error)
    assert found == status and words in text and "secret" not in text


def packed(*parts, whole=True):
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    body = b"".join(stream.compress(part) for part in parts)
    return body + stream.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH if whole else zstandard.COMPRESSOBJ_FLUSH_BLOCK)


@pytest.mark.parametrize(("body", "words"), [
    (packed(b"abc" * 100, whole=False), "cut"), (packed(b"abc")[:-1], "cut"), (b"", "cut"), (packed(b"abc") + packed(b"def"), "more after"),
    (packed(b"abc") + b"x", "more after"), (packed(b"abc") + b"x" * 5000, "more after"), (b"abcdefgh", "something else"),
])  # fmt: skip
def test_a_body_in_zstd_is_one_whole_frame(body, words):
    with pytest.raises(Refused, match=words) as error:
        bodies._decompressed(body, 1 << 20)
    assert error.value.status == 400


def test_a_body_in_zstd_is_bounded_while_it_is_unpacked():
    for size in (0, 1, 1 << 20, 5 << 20):
        assert bodies._decompressed(packed(bytes(size)), 5 << 20) == bytes(size)
    with pytest.raises(Refused) as error:
        bodies._decompressed(packed(*[bytes(1 << 24)] * 16), 1 << 20)
    assert error.value.status == 413


def test_a_body_for_which_memory_does_not_suffice_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(bodies, "_PARSE_RATIO", 1 << 40)
    assert bodies.parsed(b"{}", requests.CreateSession).tags == []
    with pytest.raises(MemoryError):
        bodies.parsed(b'{"tags": [' + b" " * (1 << 17) + b"]}", requests.CreateSession)


@pytest.mark.parametrize(("flags", "variable", "words"), [
    (["--host", ""], None, "--host"), (["--api-key", ""], None, "--api-key"), ([], "", "ESPALIER_API_KEY"), (["--api-key", "schlüssel"], None, "ASCII"),
    (["--api-key", "a b"], None, "ASCII"), ([], "schlüssel", "ASCII"), (["--port", "99999"], None, "--port"), (["--port", "-1"], None, "--port"),
    (["--port", "x"], None, "--port"), (["--stop-seconds", "0"], None, "--stop-seconds"),
])  # fmt: skip
def test_flags_that_mean_nothing_are_refused(tmp_path, monkeypatch, capsys, flags, variable, words):
    monkeypatch.delenv("ESPALIER_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("ESPALIER_API_KEY", variable)
    with pytest.raises(SystemExit) as exit:
        parse_arguments(["--model", str(tmp_path), *flags])
    said = capsys.readouterr().err
    assert exit.value.code == 2 and words in said and said.count("\n") == 1


def test_the_key_is_that_of_the_flag_or_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("ESPALIER_API_KEY", raising=False)
    assert parse_arguments(["--model", str(tmp_path)]).api_keys == {}
    monkeypatch.setenv("ESPALIER_API_KEY", "tml-environment")
    assert parse_arguments(["--model", str(tmp_path)]).api_keys == {"": "tml-environment"}
    assert parse_arguments(["--model", str(tmp_path), "--api-key", "tml-flag"]).api_keys == {"": "tml-flag"}
    monkeypatch.setattr(arguments.os, "environ", {"ESPALIER_API_KEY": ""})
    assert parse_arguments(["--model", str(tmp_path), "--api-key", "tml-flag"]).api_keys == {"": "tml-flag"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_other_machines_need_a_key(host):
    with pytest.raises(UsageError, match="without a key"):
        listen(host, 0, has_key=False)
    try:
        listen(host, 0, has_key=True).close()
    except InputError as error:
        assert host == "::" and "--host: expected" in str(error)  # a machine without IPv6


def test_a_port_that_is_taken_and_an_address_of_another_machine():
    with listen("127.0.0.1", 0, has_key=False) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(InputError, match=r"--port: expected a free port of 127\.0\.0\.1, received"):
            listen("127.0.0.1", port, has_key=False)
    for host in ("300.1.1.1", "203.0.113.7", "no.such.name.invalid", "a" * 100):
        with pytest.raises(InputError, match="--host: expected"):
            listen(host, 0, has_key=True)
    with listen("localhost", 0, has_key=False) as listener:
        assert urlsplit(url_of(listener)).hostname in ("127.0.0.1", "::1")
        assert listener.family in (socket.AF_INET, socket.AF_INET6)


def test_a_server_that_cannot_begin_says_why_in_one_line(tmp_path, monkeypatch, capsys):
    """Before it reads a model."""
    monkeypatch.delenv("ESPALIER_API_KEY", raising=False)
    with listen("127.0.0.1", 0, has_key=False) as listener:
        taken = str(listener.getsockname()[1])
        for flags, status, words in ((["--port", taken], 1, "--port: expected a free port"), (["--host", "300.1.1.1"], 1, "--host: expected"),
                                     (["--host", "0.0.0.0"], 2, "without a key")):
            assert command.main(["--model", str(tmp_path), "--state", str(tmp_path / "state"), *flags]) == status
            said = capsys.readouterr().err
            assert words in said and said.count("\n") == 1 and not (tmp_path / "state").exists()


def test_a_server_listens_before_it_loads_anything(tmp_path):
    """Else clients are refused, and come back half a minute later."""
    (tmp_path / "config.json").write_text("{}")
    program = """if True:
        import sys
        from espalier.server import command

        def listen(host, port, has_key):
            print([name for name in ("torch", "uvicorn", "espalier.engine") if name in sys.modules], flush=True)
            raise SystemExit(0)

        command.listen = listen
        command.main(sys.argv[1:])
    """
    done = subprocess.run([sys.executable, "-c", program, "--model", str(tmp_path)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")})  # fmt: skip
    assert done.stdout == "[]\n", done.stderr
