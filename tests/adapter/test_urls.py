from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from openai_adapter.urls import base_url, is_trusted
from starlette.requests import Request

PROXIES: Any = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8")]


def request(client: str | None, **headers: str) -> Request:
    return Request(
        {
            "type": "http",
            "method": "GET",
            "scheme": "http",
            "path": "/v1/images/generations",
            "query_string": b"",
            "server": ("127.0.0.1", 9000),
            "client": (client, 1234) if client else None,
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        }
    )


FORWARDED = {
    "host": "inner:9000",
    "x_forwarded_proto": "https",
    "x_forwarded_host": "api.example",
    "x_forwarded_prefix": "/pictures/",
}


def test_own_host() -> None:
    assert base_url(request("10.0.0.1", host="inner:9000"), None, PROXIES) == "http://inner:9000"


def test_trusted_proxy() -> None:
    assert base_url(request("10.0.0.1", **FORWARDED), None, PROXIES) == "https://api.example/pictures"


@pytest.mark.parametrize("client", ["11.0.0.1", "testclient", None])
def test_strangers_are_not_believed(client: str | None) -> None:
    assert base_url(request(client, **FORWARDED), None, PROXIES) == "http://inner:9000"
    assert base_url(request("10.0.0.1", **FORWARDED), None, []) == "http://inner:9000"


def test_public_url_wins() -> None:
    assert base_url(request("10.0.0.1", **FORWARDED), "https://public", PROXIES) == "https://public"


def test_the_last_value_is_the_proxys_own() -> None:
    headers = {
        "host": "inner",
        "x_forwarded_host": "spoofed.example, api.example",
        "x_forwarded_proto": "x, https",
    }
    assert base_url(request("10.0.0.1", **headers), None, PROXIES) == "https://api.example"


@pytest.mark.parametrize("bad", ["a/b", "user@host", "host:port", "a b", '"', "[::1", ""])
def test_bad_hosts(bad: str) -> None:
    headers = {
        "host": bad,
        "x_forwarded_host": bad,
        "x_forwarded_prefix": "//evil",
        "x_forwarded_proto": "js",
    }
    assert base_url(request("10.0.0.1", **headers), None, PROXIES) == "http://127.0.0.1:9000"


@pytest.mark.parametrize(
    ("address", "trusted"),
    [("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("fd00::1", True), ("11.0.0.1", False), ("x", False)],
)
def test_is_trusted(address: str, trusted: bool) -> None:
    assert is_trusted(address, PROXIES) == trusted
