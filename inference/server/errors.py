"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}} and a status. No torch."""

import json

from starlette.responses import Response

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

FAILED = "the server failed to answer this request"


class ApiError(Exception):
    """An answer that says what is wrong.  param: name of the field; code: a word for programs; headers: of the answer"""

    def __init__(self, status, message, param=None, code=None, headers=None):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def content(self):
        """The body, as a dict."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self):
        return json_response(self.content, self.status, self.headers)


def json_response(content, status=200, headers=None):
    """A response of UTF-8 JSON."""
    return Response(json_bytes(content), status, headers, media_type="application/json")


def json_bytes(content):
    """Compact JSON. Numbers are finite: allow_nan=False is an error of ours."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def validation_error(error):
    """The ApiError of a pydantic ValidationError: its first complaint, with the field's name."""
    first, *rest = error.errors(include_url=False, include_context=False, include_input=False)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    where = [str(part) for part in first["loc"]]
    if not where:
        return ApiError(400, f"the body must be a JSON object: {first['msg']}")
    # A union complains once per kind that the value might have been.
    words = dict.fromkeys([first["msg"], *(one["msg"] for one in rest if one["loc"][:1] == first["loc"][:1])])
    shown = ".".join(where) if len(words) == 1 else where[0]
    return ApiError(400, f"{shown}: {', or '.join(list(words)[:4])}", param=where[0])


def value_error(error, fields, otherwise=None):
    """The ApiError of a ValueError whose words begin with the field's name.  otherwise: the field if they do not"""
    message = str(error)
    first = message.split(" ", 1)[0]
    return ApiError(400, message, param=first if first in fields else otherwise)
