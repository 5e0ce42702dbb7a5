"""The one error that crosses processes: stage -> Triton -> client -> HTTP.

A stream carries an error as text alone, with Triton's own words in front ("in ensemble ..."). So the text of ours
ends in a JSON object ``{"message", "param", "code", "status"}`` that the client reads back. (The stream header
``triton_grpc_error`` would give real status codes, but tritonserver 2.51 crashes on it: the next stream after a
failed one ends in a segmentation fault.)
"""

from __future__ import annotations

import json
from enum import StrEnum


class Status(StrEnum):
    """Whose fault it is. The values are the names of Triton's error codes; the adapter maps them to HTTP."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class DiffusionError(Exception):
    """A request that cannot be served, in words its sender can act on.

    ``message`` names the field, the value and what is allowed; ``param`` is the field alone; ``code`` is a short
    machine-readable reason such as ``invalid_value``.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: Status = Status.INTERNAL,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def to_text(self) -> str:
        """The text for Triton's error: JSON alone, so that whatever Triton prefixes, the object is the tail."""
        fields = {"message": self.message, "param": self.param, "code": self.code, "status": self.status}
        return json.dumps(fields)

    @classmethod
    def from_text(cls, text: str) -> DiffusionError | None:
        """Read an error back from what Triton sent; None when it does not end in our JSON."""
        start = text.rfind('{"message": ')
        if start < 0:
            return None
        try:
            fields = json.loads(text[start:])
            status = Status(fields["status"])
            return cls(fields["message"], param=fields["param"], code=fields["code"], status=status)
        except (ValueError, KeyError):
            return None


def invalid(param: str, message: str, code: str = "invalid_value") -> DiffusionError:
    """A bad value of ``param`` sent by the client."""
    return DiffusionError(message, param=param, code=code, status=Status.INVALID_ARG)


def unusable(message: str, param: str = "source") -> DiffusionError:
    """What an operator gave to a command that cannot be used."""
    return DiffusionError(message, param=param, code="unusable", status=Status.INVALID_ARG)


def show(value: object, limit: int = 80) -> str:
    """A client's value as an error message quotes it: shortened, and printable whatever it holds."""
    # null, true and false as JSON says them; everything else as Python does.
    text = (
        value
        if isinstance(value, str)
        else {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    )
    text = text.encode("utf-8", "backslashreplace").decode()
    text = text if len(text) <= limit else text[:limit] + "..."
    return repr(text) if isinstance(value, str) else text
