"""Programs of Debian's packages for the tests, unpacked: that needs no root and changes nothing beyond a folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from diffusion_backend.processes import LaunchError


def unpack(package: str, folder: Path) -> None:
    """``package``, with the packages it needs that are missing here, unpacked in ``folder``: all of it or nothing.

    Raises:
        LaunchError: there is no apt here, or it cannot get them.
    """
    for needed in ("apt-get", "dpkg"):
        if shutil.which(needed) is None:
            raise LaunchError(f"there is no {needed} to get {package}")
    staging = folder.with_name(f"{folder.name}-staging")
    shutil.rmtree(staging, ignore_errors=True)
    packages = staging / "packages"
    packages.mkdir(parents=True)
    run(["apt-get", "download", *_missing_packages(package)], packages)
    for archive in packages.glob("*.deb"):
        run(["dpkg", "-x", str(archive), str(staging)], staging)
    shutil.rmtree(packages)
    staging.rename(folder)


def library_path(folder: Path) -> str:
    """The folders of the libraries that were unpacked in ``folder``."""
    found = (folder / "usr/lib").glob("*-linux-gnu/**/*.so*")
    return ":".join(sorted({str(path.parent) for path in found}))


def run(command: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        LaunchError: it failed.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise LaunchError(f"'{' '.join(command)}' failed:\n{done.stdout}")
    return done.stdout


def _missing_packages(package: str) -> list[str]:
    # A simulation takes no lock and changes nothing, so anybody may.
    command = ["apt-get", "install", "--simulate", "--no-install-recommends", package]
    try:
        listing = run(command, Path("/"))
    except LaunchError:
        if os.geteuid() != 0:
            raise
        run(["apt-get", "update"], Path("/"))  # the lists may have been removed, as in containers
        listing = run(command, Path("/"))
    return re.findall(r"^Inst (\S+) ", listing, re.MULTILINE)
