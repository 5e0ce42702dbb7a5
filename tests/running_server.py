"""Where the server under test is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RunningServer:
    """Where the server under test is, and what it writes."""

    adapter_url: str
    grpc_url: str
    http_url: str
    metrics_url: str
    data_dir: Path
    log: Path
    admin_key: str
