"""How fields are checked, on fields of the test's own."""

from __future__ import annotations

import io
from typing import Any

import pytest
from diffusion_backend.errors import DiffusionError
from openai_adapter.request_fields import Fields, Text, check_names, unwrap, validate
from pydantic import Field
from starlette.datastructures import UploadFile


class Example(Fields):
    """Two fields."""

    name: Text | None = Field(None, description="a name")
    count: int = Field(1, description="integers")


def error_of(call: Any, *arguments: Any) -> DiffusionError:
    with pytest.raises(DiffusionError) as caught:
        call(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ({}, {}),
        ({"a": 1, "b": None}, {"a": 1}),
        ({"a": 1, "extra_body": {"b": 2, "c": None}}, {"a": 1, "b": 2}),
        ({"a": 1, "extra_body": {"a": 1}}, {"a": 1}),
        ({"a": None, "extra_body": {"a": 1}}, {"a": 1}),
        ({"a": 1, "extra_body": {"a": None}}, {"a": 1}),
        ({"a": [1], "extra_body": None}, {"a": [1]}),
        ({"a": 0, "b": "", "c": False}, {"a": 0, "b": "", "c": False}),
    ],
)
def test_extra_body_is_merged_and_nulls_are_dropped(body: dict[str, Any], given: dict[str, Any]) -> None:
    before = repr(body)
    assert unwrap(body) == given
    assert repr(body) == before


@pytest.mark.parametrize("pair", [(1, 2), (1, True), (0, False), ("1", 1)])
def test_two_values_of_one_field(pair: tuple[Any, Any]) -> None:
    error = error_of(unwrap, {"a": pair[0], "extra_body": {"a": pair[1]}})
    assert (error.param, error.code) == ("a", "conflicting_values")
    assert "allowed: one value" in error.message


@pytest.mark.parametrize("extra", ["{}", [], 1, True, "", {"extra_body": {"a": 1}}])
def test_an_extra_body_that_is_no_object(extra: Any) -> None:
    error = error_of(unwrap, {"extra_body": extra})
    assert (error.param, error.code) == ("extra_body", "invalid_value")


def test_a_file_is_called_one() -> None:
    """Nobody is shown how Python writes it."""
    file = UploadFile(io.BytesIO(b"x"))
    message = error_of(unwrap, {"extra_body": file}).message
    assert message == "'extra_body' is a file; allowed: an object of fields"
    message = error_of(unwrap, {"a": 1, "extra_body": {"a": [file]}}).message
    assert message == "'a' is 1, and a file in 'extra_body'; allowed: one value"


def test_names() -> None:
    check_names(Example, {"name": 1, "count": 1}, {})
    error = error_of(check_names, Example, {"name": 1, "size": 1}, {})
    assert (error.param, error.code) == ("size", "unknown_parameter")
    assert error.message == "'size' is not a known field; allowed: name, count"
    error = error_of(check_names, Example, {"size": 1}, {"size": "it has none"})
    assert (error.param, error.code) == ("size", "unsupported_parameter")
    assert error.message == "'size' is not supported: it has none"


def test_values() -> None:
    assert validate(Example, {"name": "ключ"}) == Example(name="ключ", count=1)
    for fields, message in (
        ({"count": "1"}, "'count' is '1'; allowed: integers"),
        ({"count": True}, "'count' is true; allowed: integers"),
        ({"count": 1.0}, "'count' is 1.0; allowed: integers"),
        ({"name": 1}, "'name' is 1; allowed: a name"),
        ({"name": "\ud800"}, "allowed: a name"),
    ):
        assert message in error_of(validate, Example, fields).message
