# SPDX-License-Identifier: Apache-2.0
"""Errors as answers, in the form of the API whose path was asked for."""

from typing import Any

from starlette.responses import JSONResponse

PREFIXES = ("/v1", "/oai/api/v1")  # of the OpenAI API; the second one as the hosted service has it


def error_json(message: str, status: int) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    code = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}.get(status)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_response(path: str, message: str, status: int) -> JSONResponse:
    """An error as the client of a path reads it."""
    is_openai = path.startswith(tuple(f"{prefix}/" for prefix in PREFIXES))
    return JSONResponse(error_json(message, status) if is_openai else {"detail": message}, status)
