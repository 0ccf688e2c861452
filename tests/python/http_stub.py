# SPDX-License-Identifier: Apache-2.0
"""What servers that tests play have in common."""

import http.server
import json


class JsonHandler(http.server.BaseHTTPRequestHandler):
    """Answers with JSON, and logs nothing."""

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
