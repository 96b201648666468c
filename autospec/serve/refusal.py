"""Errors in OpenAI's form: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

INVALID = "invalid_request_error"
_BODY = "body"


class Refusal(Exception):
    """A request that is not served; becomes the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """As it is sent, in a response or in the middle of a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole response."""
        headers = {"retry-after": "1"} if self.status == 429 else None
        return JSONResponse(self.body(), self.status, headers)


def of_validation(error: RequestValidationError) -> Refusal:
    """The first mistake of a body, by the name of its key."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != _BODY]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    param = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return Refusal(
            400, f"unknown parameter: {param}", param=param, code="unsupported_parameter"
        )
    message = str(first["msg"]).removeprefix("Value error, ")
    return Refusal(400, f"{param or 'the body'}: {message}", param=param)
