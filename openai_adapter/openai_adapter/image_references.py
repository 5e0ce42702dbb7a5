"""The picture that a request refers to: an uploaded file, a data URL, or the URL of a host that the operator allows.

A URL is the client's word for what this server should connect to. So it is fetched only from hosts in a list, which is
empty by default; a name's addresses must all be public, and the connection goes to the very address that was checked
(a name server that answers differently the next time changes nothing), while TLS is verified for the name. Redirects
are not followed, and proxies of the environment are not used. What is fetched is for ``uploads`` to judge.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import logging
import re
import socket
from collections.abc import Mapping, Sequence

import httpx
from diffusion_backend.errors import DiffusionError, invalid, show
from starlette.datastructures import UploadFile

from openai_adapter.bodies import show_field

logger = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

ONE_IMAGE = "a file, a data URL, or an object with 'image_url'"
# RFC 2397, of which only base64 suits pictures. What media type it claims to be does not matter.
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
# These wrap IPv4 addresses, private ones too: 6to4 (RFC 3056) and NAT64 (RFC 6052).
_WRAPPERS = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("64:ff9b::/96"))


class ImageReferences:
    """Reads references, within an operator's limits.

    ``allowed_hosts`` are ``HOST`` or ``HOST:PORT``, as they stand in a URL. An IP address among them may be fetched
    from wherever it leads, as the operator named it itself.
    """

    def __init__(self, allowed_hosts: Sequence[str], max_bytes: int, fetch_seconds: float) -> None:
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._max_bytes = max_bytes
        self._fetch_seconds = fetch_seconds
        self._tls = httpx.create_ssl_context()  # loading certificates takes too long for each request

    async def read(self, value: object, field: str) -> bytes:
        """The bytes of the file that ``value`` is or refers to: nobody has looked at them yet.

        ``value`` is an ``UploadFile``, a URL, ``{"image_url": URL}``, or what a client sent instead.

        Raises:
            DiffusionError: INVALID_ARG, naming ``field``, its value and what is allowed.
        """
        if isinstance(value, UploadFile):
            await value.seek(0)
            data = await value.read(self._max_bytes + 1)
            self._check_size(len(data), field)
            return data
        if isinstance(value, Mapping):
            return await self._read_url(_url_of(value, field), f"{field}.image_url")
        return await self._read_url(value, field)

    async def digest(self, value: object) -> object:
        """What stands for ``value`` where requests are compared: what was sent, with a digest for each file, whether it
        was uploaded or is in a data URL."""
        if isinstance(value, UploadFile):
            await value.seek(0)
            data = await value.read(self._max_bytes + 1)
            return await asyncio.to_thread(_digest, data)
        if isinstance(value, str) and _is_data_url(value):
            return await asyncio.to_thread(_digest_url, value)
        if isinstance(value, Mapping) and set(value) == {"image_url"}:
            return await self.digest(value["image_url"])
        if isinstance(value, Mapping):
            return {name: await self.digest(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [await self.digest(inner) for inner in value]
        return value

    async def _read_url(self, value: object, field: str) -> bytes:
        if not isinstance(value, str):
            raise invalid(field, f"'{field}' is {show_field(value)}; allowed: {ONE_IMAGE}")
        if _is_data_url(value):
            return await asyncio.to_thread(self._decode, value, field)
        url = self._check_url(value, field)
        try:
            async with asyncio.timeout(self._fetch_seconds):
                return await self._fetch(url, field)
        except TimeoutError:
            reason = f"it took longer than {self._fetch_seconds:g} s"
        except (httpx.HTTPError, OSError, UnicodeError) as error:
            # Why a connection failed would tell a client about the network here; the operator's log may have it.
            logger.info("an image could not be fetched: %r", error)
            reason = "it could not be reached"
        raise _refuse_fetched(field, reason)

    def _decode(self, url: str, field: str) -> bytes:
        match = _DATA_URL.match(url)
        if match is None:
            raise invalid(
                field,
                f"'{field}' is {show(url, 40)}; allowed: 'data:image/TYPE;base64,DATA'",
                "invalid_data_url",
            )
        self._check_size((len(url) - match.end()) // 4 * 3 - url.count("=", -2), field)
        try:
            return base64.b64decode(url[match.end() :], validate=True)
        except (binascii.Error, ValueError):
            message = (
                f"'{field}' is a data URL whose data is not base64; allowed: RFC 4648, padded, on one line"
            )
            raise invalid(field, message, "invalid_data_url") from None

    def _check_url(self, value: str, field: str) -> httpx.URL:
        try:
            url = httpx.URL(value)
        except (httpx.InvalidURL, UnicodeError):
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise invalid(
                field,
                f"'{field}' is {show(value)}; allowed: a file (curl: @FILE), data URLs, "
                "http(s) URLs without user names",
            )
        host = url.netloc.decode()
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        if self._allowed_hosts.isdisjoint({host, f"{url.raw_host.decode()}:{port}"}):
            hosts = f"files, data URLs, or hosts {', '.join(sorted(self._allowed_hosts))}"
            allowed = hosts if self._allowed_hosts else "files or data URLs: this server fetches no URLs"
            raise invalid(field, f"'{field}' is on host {show(host)}; allowed: {allowed}", "url_not_allowed")
        return url

    async def _fetch(self, url: httpx.URL, field: str) -> bytes:
        address = await _resolve(url)
        if address is None:
            raise _refuse_fetched(field, "its host has an address that is not public")
        headers = {"host": url.netloc.decode(), "accept": "image/*", "accept-encoding": "identity"}
        async with (
            httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None) as http,
            http.stream(
                "GET",
                url.copy_with(host=str(address)),
                headers=headers,
                extensions={"sni_hostname": _host(url)},
            ) as response,
        ):
            if response.status_code != 200:
                raise _refuse_fetched(field, f"its host answers {response.status_code}, and not 200")
            data = bytearray()
            async for part in response.aiter_raw():
                data += part
                self._check_size(len(data), field)
            return bytes(data)

    def _check_size(self, size: int, field: str) -> None:
        if size > self._max_bytes:
            message = f"the file in '{field}' is too large; allowed: {self._max_bytes} bytes"
            raise invalid(field, message, "file_too_large")


def _digest(data: bytes) -> object:
    return {"sha256": hashlib.sha256(data).hexdigest()}


def _digest_url(url: str) -> object:
    match = _DATA_URL.match(url)
    try:
        return _digest(
            base64.b64decode(url[match.end() :], validate=True) if match else url.encode(errors="replace")
        )
    except ValueError:  # it is refused where it is read
        return _digest(url.encode(errors="replace"))


def _is_data_url(value: str) -> bool:
    return value[:5].lower() == "data:"


def _url_of(value: Mapping[object, object], field: str) -> object:
    value = {name: given for name, given in value.items() if given is not None}
    if "file_id" in value:
        message = f"'{field}.file_id' is not supported: this server keeps no files; allowed: {ONE_IMAGE}"
        raise invalid(f"{field}.file_id", message, "unsupported_parameter")
    if set(value) != {"image_url"}:
        names = ", ".join(show(name) for name in value) or "nothing"
        raise invalid(field, f"'{field}' is an object of {names}; allowed: {ONE_IMAGE}")
    return value["image_url"]


async def _resolve(url: httpx.URL) -> Address | None:
    """An address of the URL's host to connect to; None if it has one that must not be reached."""
    host = _host(url)
    try:
        return ipaddress.ip_address(host)  # the operator's own
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, url.port or url.scheme, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    return addresses[0] if all(map(_is_public, addresses)) else None


def _host(url: httpx.URL) -> str:
    return url.raw_host.decode()  # url.host would not be encoded for name servers


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return _is_public(address.ipv4_mapped)
        if any(address in network for network in _WRAPPERS):
            return False
    return address.is_global and not address.is_multicast


def _refuse_fetched(field: str, reason: str) -> DiffusionError:
    return invalid(
        field,
        f"the image at '{field}' was not fetched: {reason}; allowed: the URL of an image",
        "image_not_fetched",
    )
