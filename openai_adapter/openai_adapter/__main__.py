"""``python -m openai_adapter``: the app under uvicorn. Every setting is a flag; see ``--help``."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

import uvicorn
from diffusion_backend import malloc
from pydantic import ValidationError
from pydantic_settings import CliApp

from openai_adapter.app import create_app
from openai_adapter.settings import SECRETS_DIR, Settings

PREFIX = "OPENAI_ADAPTER_"


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is running and exit with 0."""
    _check_environment()
    try:
        settings = CliApp.run(Settings, cli_args=sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        sys.exit("\n".join(_describe(error)))
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    malloc.return_freed_memory()
    # uvicorn shuts down gracefully and then raises the signal that it got once more.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )


def _check_environment() -> None:
    """A setting that is misspelt or empty must not leave the door open."""
    known = {SECRETS_DIR, *(f"{PREFIX}{name}".upper() for name in Settings.model_fields)}
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    if unknown:
        sys.exit(f"no such setting: {', '.join(unknown)}")
    keys = os.environ.get(f"{PREFIX}API_KEYS")
    if keys is not None and not keys.replace(",", "").strip():
        sys.exit(f"{PREFIX}API_KEYS has no key in it: leave it unset to need none")


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _describe(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        name = ".".join(map(str, problem["loc"]))
        lines.append(f"{name}: {problem['msg']}" if name else problem["msg"].removeprefix("Value error, "))
    return lines


if __name__ == "__main__":
    main()
