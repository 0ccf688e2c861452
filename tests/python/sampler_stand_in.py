# SPDX-License-Identifier: Apache-2.0
"""What the stand-ins for vLLM and SGLang have in common: requests in flight, cached prefixes, keys, failures that tests want."""

import http.server
import json
import threading

from http_stub import JsonHandler

CLOSE = "close"
"""In place of an answer: the connection is closed."""


class Request:
    """A request in flight. `prefix`: the weights that its keys and values come from, None without any; `tokens`: those of tokens."""

    def __init__(self, space):
        self.space, self.prefix, self.tokens = space, None, []


class Sampler(http.server.ThreadingHTTPServer):
    """A server at `url`. `fails`: what paths answer instead, (status, body) or CLOSE; `before` is called with each path."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests, self.bodies, self.keys = [], [], []  # paths; paths and bodies of POST; keys with which paths came
        self.fails, self.before = {}, lambda path: None
        self.changed = threading.Condition()
        self.weights, self.version, self.paused, self.running, self.cached = b"base", "default", False, [], {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        pass  # the client has gone

    def close(self):
        self.shutdown()
        self.server_close()

    def sample(self, space, weights, tokens):
        """One request: its prefix is computed with `weights()` or is the cached one of `space`, its tokens with `weights()`."""
        request = Request(space)
        with self.changed:
            self.changed.wait_for(lambda: not self.paused)
            self.running.append(request)
            for _ in range(tokens):
                self.changed.wait(0.005)
                self.changed.wait_for(lambda: not self.paused)
                if request.prefix is None:
                    request.prefix = self.cached.setdefault(space, weights())
                request.tokens.append(weights())
            self.running.remove(request)
            self.changed.notify_all()
        return {"prefix": request.prefix.decode("latin"), "tokens": [each.decode("latin") for each in request.tokens]}

    def pause(self, retracted):
        """Requests in flight lose their keys and values where they are `retracted`."""
        with self.changed:
            self.paused = True
            for request in self.running:
                request.prefix = None if retracted else request.prefix

    def resume(self):
        with self.changed:
            self.paused = False
            self.changed.notify_all()


class Handler(JsonHandler):
    def do_GET(self):
        self.handle_with(lambda: self.server.get(self.path))

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        is_json = self.headers["Content-Type"] == "application/json"
        body = json.loads(content) if is_json else None
        self.server.bodies.append((self.path, body))
        self.handle_with(lambda: self.server.post(self.path, body))

    def handle_with(self, call):
        server = self.server
        key = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
        server.requests.append(self.path)
        server.keys.append((self.path, key))
        server.before(self.path)
        fails = server.fails.get(self.path)
        if fails == CLOSE:
            self.close_connection = True
            return None
        if fails is None and not server.admits(self.command, self.path, key):
            fails = (401, {"error": "Unauthorized"})
        return self.answer(*(fails or call()))

    def answer(self, status, body):
        """JSON, or a text as it is; None: nothing."""
        if not isinstance(body, str | None):
            return super().answer(status, body)
        content = (body or "").encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
