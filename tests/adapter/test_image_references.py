"""References to images, with a real HTTP server to fetch from."""

from __future__ import annotations

import asyncio
import base64
import io
import ipaddress
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from diffusion_backend.errors import DiffusionError, Status
from openai_adapter.image_references import ImageReferences
from starlette.datastructures import UploadFile

from openai_adapter import image_references

MAX_BYTES = 1000
PICTURE = bytes(range(256)) * 3  # what it is does not matter here
DATA_URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


class Handler(BaseHTTPRequestHandler):
    """Answers as the path says."""

    seen: list[str]

    def do_GET(self) -> None:
        Handler.seen.append(f"{self.headers['host']} {self.path}")
        {
            "/picture": self._picture,
            "/chunks": self._chunks,
            "/large": self._large,
            "/endless": self._endless,
            "/slow": self._slow,
            "/slow-head": self._slow_head,
            "/moved": self._moved,
        }.get(self.path, self._missing)()

    def _head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _picture(self) -> None:
        self._head(200, content_length=str(len(PICTURE)), content_type="text/html")
        self.wfile.write(PICTURE)

    def _chunks(self) -> None:
        self._head(200)
        for start in range(0, len(PICTURE), 100):
            self.wfile.write(PICTURE[start : start + 100])
            self.wfile.flush()

    def _large(self) -> None:
        self._head(200, content_length=str(10**12))
        self.wfile.write(bytes(MAX_BYTES + 1))

    def _endless(self) -> None:
        self._head(200)
        while True:
            self.wfile.write(bytes(100))

    def _slow(self) -> None:
        self._head(200, content_length=str(len(PICTURE)))
        for byte in PICTURE:
            self.wfile.write(bytes([byte]))
            time.sleep(0.05)

    def _slow_head(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
        for _ in range(1000):
            self.wfile.write(b"x")
            time.sleep(0.05)

    def _moved(self) -> None:
        self._head(302, location="/picture")

    def _missing(self) -> None:
        self._head(404)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are what is tested."""


def serve(server: Server) -> Iterator[int]:
    Handler.seen = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server on 127.0.0.1."""
    yield from serve(Server(("127.0.0.1", 0), Handler))


@pytest.fixture
def answer_names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Makes a name server of ours; returns the names it was asked for."""

    def install(*answers: list[str]) -> list[str]:
        asked: list[str] = []

        def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
            asked.append(host)
            found = answers[min(len(asked), len(answers)) - 1]
            return [
                (socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))
                for ip in found
            ]

        loop = asyncio.new_event_loop()
        loop.close()
        monkeypatch.setattr(
            type(loop),
            "getaddrinfo",
            lambda _loop, host, port, **__: asyncio.sleep(0, getaddrinfo(host, port)),
        )
        return asked

    return install


@pytest.fixture
def everything_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's server is on loopback."""
    monkeypatch.setattr(image_references, "_is_public", lambda _: True)


def read(value: object, *hosts: str, seconds: float = 10) -> bytes:
    return asyncio.run(ImageReferences(hosts, MAX_BYTES, seconds).read(value, "input_reference"))


def refusal(value: object, *hosts: str, seconds: float = 10) -> DiffusionError:
    with pytest.raises(DiffusionError) as caught:
        read(value, *hosts, seconds=seconds)
    error = caught.value
    assert error.status is Status.INVALID_ARG
    assert error.param is not None
    assert f"'{error.param}'" in error.message
    assert "allowed: " in error.message
    return error


def test_the_digest_is_the_file_s_however_it_is_sent() -> None:
    def digest(value: object) -> object:
        return asyncio.run(ImageReferences((), MAX_BYTES, 10).digest(value))

    file = digest(UploadFile(io.BytesIO(PICTURE), filename="a.png"))
    assert file == digest(DATA_URL) == digest({"image_url": DATA_URL})
    assert digest([DATA_URL, {"image_url": DATA_URL}]) == [file, file]
    others = [UploadFile(io.BytesIO(PICTURE + b"0")), DATA_URL + "!", "data:,a", {"image_url": "https://a/b"}]
    digests = [json.dumps(digest(each)) for each in [DATA_URL, *others]]
    assert len(set(digests)) == len(digests)


def test_files() -> None:
    assert read(UploadFile(io.BytesIO(PICTURE), filename="../../etc/passwd")) == PICTURE
    assert read(UploadFile(io.BytesIO(bytes(MAX_BYTES)))) == bytes(MAX_BYTES)
    assert refusal(UploadFile(io.BytesIO(bytes(MAX_BYTES + 1)))).code == "file_too_large"


@pytest.mark.parametrize(
    "url",
    [
        DATA_URL,
        DATA_URL.replace("data:image/png;base64", "DATA:image/png;charset=utf-8;BASE64"),
        DATA_URL.replace("image/png", "application/octet-stream"),
    ],
)
def test_data_urls(url: str) -> None:
    assert read(url) == PICTURE
    assert read({"image_url": url}) == PICTURE


def test_the_size_of_data_urls() -> None:
    start = "data:image/png;base64,"
    assert read(start + base64.b64encode(bytes(MAX_BYTES)).decode()) == bytes(MAX_BYTES)
    for size in (MAX_BYTES + 1, 100 * MAX_BYTES):
        too_large = start + base64.b64encode(bytes(size)).decode()
        assert refusal(too_large).code == "file_too_large"
    assert refusal({"image_url": too_large}).param == "input_reference.image_url"


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:,hello",
        "data:image/png,hello",
        "data:image/png;base64",
        "data:;base64,aGVsbG8=",
        "data:image/png;base64,a",
        "data:image/png;base64,aGVsbG8",
        "data:image/png;base64,aGVs bG8=",
        "data:image/png;base64,aGVs\nbG8=",
        "data:image/png;base64,aGVsbG8=aGVsbG8=",
        "data:image/png;base64,_-_-",
        "data:image/png;base64,aGVsbG8%3D",
        "data:image/png;base64,\u00e4\u00f6\u00fc\u00df",
        "data:image/png;base64,\ud800aaa",
        " data:image/png;base64,aGVsbG8=",
    ],
)
def test_strange_data_urls(url: str) -> None:
    assert refusal(url).code in ("invalid_data_url", "invalid_value")


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        (None, "input_reference", "invalid_value"),
        (7, "input_reference", "invalid_value"),
        ([], "input_reference", "invalid_value"),
        ("", "input_reference", "invalid_value"),
        ("a fox", "input_reference", "invalid_value"),
        ("file:///etc/passwd", "input_reference", "invalid_value"),
        ("//images.example/a", "input_reference", "invalid_value"),
        ("http://user:geheim@images.example/a", "input_reference", "invalid_value"),
        ("http:///a", "input_reference", "invalid_value"),
        ("http://images.example\n/a", "input_reference", "invalid_value"),
        ("http://\ud800/a", "input_reference", "invalid_value"),
        ({}, "input_reference", "invalid_value"),
        ({"url": "http://images.example/a"}, "input_reference", "invalid_value"),
        ({"image_url": DATA_URL, "detail": "high"}, "input_reference", "invalid_value"),
        ({"image_url": {"url": DATA_URL}}, "input_reference.image_url", "invalid_value"),
        ({"image_url": None}, "input_reference", "invalid_value"),
        ({"file_id": "file-1"}, "input_reference.file_id", "unsupported_parameter"),
        ({"file_id": "file-1", "image_url": DATA_URL}, "input_reference.file_id", "unsupported_parameter"),
    ],
)
def test_other_values(value: object, param: str, code: str) -> None:
    error = refusal(value, "images.example")
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/picture",
        "http://localhost:{port}/picture",
        "http://2130706433:{port}/picture",
        "http://0x7f.1:{port}/picture",
        "http://[::ffff:127.0.0.1]:{port}/picture",
        "http://images.example@127.0.0.1:{port}/picture",
        "http://images.example.evil.example:{port}/",
        "http://images.example:{port}/",
    ],
)
def test_only_allowed_hosts_are_asked(port: int, url: str) -> None:
    for hosts in ((), ("images.example",)):
        assert refusal(url.format(port=port), *hosts).code in ("url_not_allowed", "invalid_value")
    assert not Handler.seen


def test_the_refusal_says_what_is_allowed() -> None:
    assert "this server fetches no URLs" in refusal("https://elsewhere.example/a").message
    assert (
        "b.example:8080, images.example"
        in refusal("https://elsewhere.example/a", "images.example", "b.example:8080").message
    )


@pytest.mark.parametrize("path", ["/picture", "/chunks"])
def test_fetches_from_an_allowed_host(port: int, path: str) -> None:
    host = f"127.0.0.1:{port}"
    assert read({"image_url": f"http://{host}{path}"}, host) == PICTURE
    assert Handler.seen == [f"{host} {path}"]


@pytest.mark.parametrize("path", ["/large", "/endless"])
def test_a_fetch_ends_at_the_limit_of_bytes(port: int, path: str) -> None:
    host = f"127.0.0.1:{port}"
    assert refusal(f"http://{host}{path}", host).code == "file_too_large"


@pytest.mark.parametrize("path", ["/slow", "/slow-head"])
def test_a_fetch_ends_at_the_limit_of_time(port: int, path: str) -> None:
    host = f"127.0.0.1:{port}"
    start = time.monotonic()
    error = refusal(f"http://{host}{path}", host, seconds=0.5)
    assert time.monotonic() - start < 2
    assert error.code == "image_not_fetched"
    assert "took longer than 0.5 s" in error.message


def test_redirects_and_errors_are_refused(port: int) -> None:
    host = f"127.0.0.1:{port}"
    assert "answers 302" in refusal(f"http://{host}/moved", host).message
    assert "answers 404" in refusal(f"http://{host}/missing", host).message
    assert Handler.seen == [f"{host} /moved", f"{host} /missing"]


def test_a_dead_host() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{unused.getsockname()[1]}"
        assert "could not be reached" in refusal(f"http://{host}/", host).message
    assert "could not be reached" in refusal("http://no-such-host.invalid/", "no-such-host.invalid").message


def test_proxies_of_the_environment_are_not_used(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    host = f"127.0.0.1:{port}"
    assert read(f"http://{host}/picture", host) == PICTURE


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["172.16.0.1"],
        ["192.168.0.1"],
        ["169.254.169.254"],
        ["100.64.0.1"],
        ["0.0.0.0"],
        ["224.0.0.1"],
        ["255.255.255.255"],
        ["::1"],
        ["::"],
        ["fe80::1"],
        ["fc00::1"],
        ["ff02::1"],
        ["::ffff:10.0.0.1"],
        ["64:ff9b::a00:1"],
        ["2002:a00:1::"],
        ["2001:0:a00:1::"],
        ["93.184.215.14", "127.0.0.1"],
    ],
)
def test_names_of_private_addresses(
    port: int, addresses: list[str], answer_names: Callable[..., list[str]]
) -> None:
    answer_names(addresses)
    error = refusal(f"http://images.example:{port}/picture", f"images.example:{port}")
    assert "address that is not public" in error.message
    assert not any(address in error.message for address in addresses)
    assert not Handler.seen


@pytest.mark.parametrize(
    "address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:8.8.8.8"]
)
def test_public_addresses(address: str) -> None:
    assert image_references._is_public(ipaddress.ip_address(address))


def test_a_real_name_of_loopback(port: int) -> None:
    error = refusal(f"http://localhost:{port}/picture", f"localhost:{port}")
    assert "address that is not public" in error.message
    assert not Handler.seen


@pytest.mark.usefixtures("everything_is_public")
def test_the_connection_goes_to_the_address_that_was_checked(
    port: int, answer_names: Callable[..., list[str]]
) -> None:
    asked = answer_names(["127.0.0.1"], ["127.0.0.99"])
    assert read(f"http://images.example:{port}/picture", f"Images.example:{port}") == PICTURE
    assert asked == ["images.example"]
    assert Handler.seen == [f"images.example:{port} /picture"]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of images.example, with its key, in one file."""
    file = tmp_path / "certificate.pem"
    options = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    names = ("-subj", "/CN=images.example", "-addext", "subjectAltName=DNS:images.example")
    command = ["openssl", "req", *options, *names, "-keyout", str(tmp_path / "key.pem"), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + (tmp_path / "key.pem").read_text())
    return file


@pytest.mark.usefixtures("everything_is_public")
def test_tls_is_verified_for_the_name(
    certificate: Path, answer_names: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = Server(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    answer_names(["127.0.0.1"])
    for port in serve(server):
        hosts = [f"{name}:{port}" for name in ("images.example", "other.example", "127.0.0.1")]
        unverified = refusal(f"https://{hosts[0]}/picture", *hosts)
        assert "could not be reached" in unverified.message
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert read(f"https://{hosts[0]}/picture", *hosts) == PICTURE
        for host in hosts[1:]:
            assert "could not be reached" in refusal(f"https://{host}/picture", *hosts).message
        assert Handler.seen == [f"{hosts[0]} /picture"]
