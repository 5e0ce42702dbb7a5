"""How the fields of a request are checked, whatever it asks for: each is honoured, or refused by name.

The description of a field of a pydantic model is what the error about it says is allowed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, TypeVar

from diffusion_backend.errors import DiffusionError, Status, invalid, show
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError


class Fields(BaseModel):
    """The base of requests, with ``null`` and absent fields filled with their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


T = TypeVar("T", bound=Fields)


def _encodable(text: str) -> str:
    text.encode()  # a lone surrogate raises UnicodeEncodeError, which is a ValueError
    return text


Text = Annotated[str, AfterValidator(_encodable)]


def unwrap(body: Mapping[str, Any]) -> dict[str, Any]:
    """``body`` with a literal ``extra_body`` (as people write it in curl) merged into it, without its nulls.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    given = {name: value for name, value in body.items() if value is not None}
    extra = given.pop("extra_body", {})
    if not isinstance(extra, dict) or "extra_body" in extra:
        raise invalid("extra_body", f"'extra_body' is {show(extra)}; allowed: an object of fields")
    for name, value in extra.items():
        if value is None:
            continue
        if name in given and not _same(given[name], value):
            raise invalid(
                name,
                f"{show(name)} is {show(given[name])}, and {show(value)} in 'extra_body'; allowed: one value",
                "conflicting_values",
            )
        given[name] = value
    return given


def check_names(kind: type[Fields], given: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Every field is one of ``kind``'s; ``refused`` says why others that clients know are none.

    Raises:
        DiffusionError: INVALID_ARG, naming the first field that is not.
    """
    for name in given:
        if name in refused:
            raise invalid(name, f"'{name}' is not supported: {refused[name]}", "unsupported_parameter")
        if name not in kind.model_fields:
            allowed = ", ".join(kind.model_fields)
            raise invalid(name, f"{show(name)} is not a known field; allowed: {allowed}", "unknown_parameter")


def validate(kind: type[T], given: Mapping[str, Any]) -> T:
    """The request.

    Raises:
        DiffusionError: INVALID_ARG, naming the field, its value and what is allowed.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        name = str(error.errors(include_url=False)[0]["loc"][0])
        allowed = kind.model_fields[name].description
        raise invalid(name, f"'{name}' is {show(given[name])}; allowed: {allowed}") from None


def blame(error: Exception, fields: Container[str]) -> Exception:
    """A stage's refusal is the client's fault where the client sent the field, or the pipeline refuses the whole.

    ``fields`` are what clients can send. Anything else is returned as our own fault.
    """
    if not isinstance(error, DiffusionError) or error.status is not Status.INVALID_ARG:
        return error
    return DiffusionError(error.message) if error.param and error.param not in fields else error


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)
