"""How the fields of a request are checked, whatever it asks for: each is honoured, or refused by name.

The description of a field of a pydantic model is what the error about it says is allowed. Its JSON schema says how a
form has it: numbers and booleans as texts, and a picture (``"format": "binary"``) as a file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Mapping
from typing import Annotated, Any, TypeVar

from diffusion_backend.errors import DiffusionError, Status, invalid, show
from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, ValidationError

from openai_adapter.bodies import has_file, parse_json_object, show_field

PICTURE: dict[str, JsonValue] = {
    "format": "binary"
}  # of the schema of a field that is a picture, or refers to one

_TYPED: dict[str, tuple[re.Pattern[str], Callable[[str], object]]] = {
    "integer": (re.compile(r"-?[0-9]{1,20}"), int),
    "number": (re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?"), float),
    "boolean": (re.compile(r"true|false"), lambda text: text == "true"),
}


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
        raise invalid("extra_body", f"'extra_body' is {show_field(extra)}; allowed: an object of fields")
    for name, value in extra.items():
        if value is None:
            continue
        if name in given and not _same(given[name], value):
            raise invalid(
                name,
                f"{show(name)} is {show_field(given[name])}, and {show_field(value)} in 'extra_body'; "
                "allowed: one value",
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
            allowed = ", ".join(field for field in kind.model_fields if field not in refused)
            raise invalid(name, f"{show(name)} is not a known field; allowed: {allowed}", "unknown_parameter")


def from_form(kind: type[Fields], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a form with the types that JSON gives them; what has another form is refused where it is used.

    Raises:
        ApiError: 400, a picture's text begins as a JSON object and is none.
    """
    schemas = _schemas(kind)
    return {name: _typed(value, name, schemas.get(name, {})) for name, value in fields.items()}


def refuse_files(kind: type[Fields], given: Mapping[str, Any]) -> None:
    """A form can send a file as any field of ``given``, whose names are ``kind``'s.

    Raises:
        DiffusionError: INVALID_ARG, naming the first field that is a file and no picture.
    """
    for name, value in given.items():
        if not _is_picture(_schemas(kind)[name]) and has_file(value):
            raise invalid(name, f"'{name}' is a file; allowed: {kind.model_fields[name].description}")


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


@functools.cache
def _schemas(kind: type[Fields]) -> Mapping[str, Mapping[str, Any]]:
    fields: Mapping[str, Mapping[str, Any]] = kind.model_json_schema()["properties"]
    return fields


def _is_picture(schema: Mapping[str, Any]) -> bool:
    return schema.get("format") == PICTURE["format"]


def _typed(value: object, name: str, schema: Mapping[str, Any]) -> object:
    if isinstance(value, list):
        return [_typed(each, name, schema) for each in value]
    if isinstance(value, dict) and not _is_picture(schema):  # names and numbers
        return {key: _typed(each, name, {"type": "number"}) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    if _is_picture(schema):
        return parse_json_object(value, name) if value.startswith("{") else value
    kind = schema.get("type")
    if isinstance(kind, list) and "object" in kind and value.startswith("{"):
        return parse_json_object(value, name)
    if isinstance(kind, str) and kind in _TYPED:
        pattern, read = _TYPED[kind]
        return read(value) if pattern.fullmatch(value) else value
    return value
