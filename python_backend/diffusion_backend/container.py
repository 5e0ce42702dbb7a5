"""``triton-diffusion triton``: tritonserver alone, in place of this process, for a container.

What ``serve`` adds to it, the container engine does better: logs, signals, restarts, and the end of all
processes and shared memory.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from diffusion_backend.processes import LaunchError
from diffusion_backend.tritonserver import LOOPBACK, TritonPorts, TritonServer

ADMIN_KEY = "TRITON_DIFFUSION_ADMIN_KEY"
ADMIN_KEY_FILE = "TRITON_DIFFUSION_ADMIN_KEY_FILE"
PORTS = TritonPorts(http=8000, grpc=8001, metrics=8002)  # the container engine maps them, if anything does
# Triton splits its option at ":", "," and "="; and a key that can be guessed protects nothing.
_KEY = re.compile(r"[A-Za-z0-9._~-]{16,}")


def add_triton_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``triton-diffusion triton``."""
    parser.description = (
        f"Becomes a tritonserver on the ports {PORTS.http} (HTTP), {PORTS.grpc} (gRPC) and {PORTS.metrics} "
        f"(metrics). The key of its model-control, shared-memory, trace and logging APIs is in {ADMIN_KEY}, or in "
        f"the file that {ADMIN_KEY_FILE} names; without a key, nobody can use these."
    )
    parser.add_argument("--address", default=LOOPBACK, help="where it listens (default: %(default)s)")
    parser.add_argument(
        "--model-repository",
        type=Path,
        default=Path("model_repository"),
        help="the models: every ensemble in this folder is served (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where models run; auto: on the GPU if there is one (default: %(default)s)",
    )
    parser.add_argument(
        "--exit-timeout",
        type=int,
        default=60,
        metavar="SECONDS",
        help="how long running requests may finish on shutdown (default: %(default)s)",
    )


def triton(args: argparse.Namespace) -> int:
    """Become tritonserver; returns, with an exit code, only if that fails."""
    repository: Path = args.model_repository
    try:
        server = TritonServer(
            repository,
            data_dir=repository.parent,  # nothing is written there: the key is given and the log is stdout
            address=args.address,
            ports=PORTS,
            admin_key=_admin_key(),
            device=args.device,
            exit_timeout=args.exit_timeout,
        )
        server.require_shared_memory()
        server.replace_this_process()
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: tritonserver could not be started: {error}", file=sys.stderr)
    return 1


def _admin_key() -> str | None:
    source, key = ADMIN_KEY, os.environ.get(ADMIN_KEY)
    if path := os.environ.get(ADMIN_KEY_FILE):
        source = path
        try:
            key = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"cannot read the key that {ADMIN_KEY_FILE} names: {error}") from None
    if key is not None and not _KEY.fullmatch(key):
        raise LaunchError(
            f"the key in {source} must be 16 or more of A-Z, a-z, 0-9 and ._~-: make one with openssl rand -hex 32"
        )
    return key
