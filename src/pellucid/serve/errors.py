"""A request that is not served, in OpenAI's form of an error."""

from __future__ import annotations

from fastapi.responses import JSONResponse

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
