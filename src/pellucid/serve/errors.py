"""A request that is not served, in OpenAI's form of an error."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pellucid.serve.messages import KINDS, NEUTRAL

HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    503: {"Retry-After": "1"},
}


class RequestError(Exception):
    """A request that is not served, and why."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


ENDING = RequestError(503, "the service is ending", "ending")


def refused(refusal: RequestError) -> JSONResponse:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    message = str(refusal).encode(errors="backslashreplace").decode()  # a lone surrogate cannot be sent
    body = {"error": {"message": message, "type": kind, "code": refusal.code, "param": None}}
    return JSONResponse(body, refusal.status, HEADERS.get(refusal.status))


def refuse_in_form(app: FastAPI) -> None:
    """Have an application answer in this form whatever goes wrong in it."""

    @app.exception_handler(RequestError)
    async def refusal(_: Request, error: RequestError) -> JSONResponse:
        return refused(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        return refused(RequestError(400, "; ".join(map(said, error.errors()))))

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return refused(RequestError(error.status_code, error.detail))

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return refused(RequestError(500, f"{type(error).__name__}: {error}", "internal_error"))


def said(error: dict[str, Any]) -> str:
    """Return a validation error as one line.

    Example: "messages.0.role: Input should be 'system', 'user' or 'assistant'"
    """
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", *KINDS))
    if error["type"] == "extra_forbidden":
        neutral = " or ".join(map(json.dumps, NEUTRAL.get(str(error["loc"][-1]), ())))
        return f"{place}: not supported here: leave it out{f', or send {neutral}' if neutral else ''}"
    return f"{place}: {error['msg']}" if place else str(error["msg"])
