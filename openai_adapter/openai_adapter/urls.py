"""What this server is called from outside."""

from __future__ import annotations

import ipaddress
import re

from pydantic import IPvAnyNetwork
from starlette.requests import Request

_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")


def base_url(request: Request, public_url: str | None, trusted_proxies: list[IPvAnyNetwork]) -> str:
    """The URL, without a slash at its end, under which the sender of ``request`` reaches this server's paths.

    ``public_url`` wins. The ``X-Forwarded-*`` headers count only when the peer is a trusted proxy; where
    several proxies added to one, the last value is the one that the trusted peer wrote.
    """
    if public_url is not None:
        return public_url
    scheme, host, prefix = request.url.scheme, request.headers.get("host", ""), ""
    if request.client is not None and is_trusted(request.client.host, trusted_proxies):
        proto = _forwarded(request, "proto")
        scheme = proto if proto in ("http", "https") else scheme
        forwarded_host = _forwarded(request, "host")
        host = forwarded_host if _HOST.fullmatch(forwarded_host) else host
        forwarded_prefix = _forwarded(request, "prefix")
        prefix = forwarded_prefix.rstrip("/") if _PREFIX.fullmatch(forwarded_prefix) else ""
    if not _HOST.fullmatch(host):
        address, port = request.scope["server"]
        host = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{scheme}://{host}{prefix}"


def is_trusted(address: str, networks: list[IPvAnyNetwork]) -> bool:
    """Whether an IP address lies in one of ``networks``; an IPv4 address counts in its IPv6 form too."""
    try:
        peer = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped:
        peer = peer.ipv4_mapped
    return any(peer in network for network in networks)


def _forwarded(request: Request, name: str) -> str:
    return request.headers.get(f"x-forwarded-{name}", "").rpartition(",")[2].strip()
