"""Reading the files that describe the containers."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.running_server import ROOT

DOCKERFILES = {"triton": ROOT / "docker/Dockerfile", "adapter": ROOT / "docker/adapter.Dockerfile"}


def normalize(name: str) -> str:
    """A distribution's name, as packages are compared by it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict[str, str]:
    """The versions in a file of constraints."""
    lines = path.read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalize(name): version for name, version in pins}


def read_requirements(*extras: str) -> set[str]:
    """The names of what the distribution needs with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    return {normalize(re.split(r"[\[<>=,; ]", line)[0]) for line in lines}


def read_instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in their order, each on one line."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def only(path: Path, instruction: str) -> str:
    """What stands behind the one instruction of this name."""
    (found,) = [rest for name, rest in read_instructions(path) if name == instruction]
    return found


def health_command(path: Path) -> list[str]:
    """The command of a Dockerfile's health check."""
    command: list[str] = json.loads(only(path, "HEALTHCHECK").partition("CMD")[2])
    return command


def read_compose() -> dict[str, Any]:
    """``docker/compose.yaml``."""
    compose: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    return compose


def is_in_build_context(path: str) -> bool:
    """Whether ``.dockerignore`` leaves this file of the repository in: the last pattern that matches decides."""
    included = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            # A pattern that matches a folder matches everything in it.
            expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*") + "(/.*)?"
            if re.fullmatch(expression, path):
                included = line.startswith("!")
    return included
