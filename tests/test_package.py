"""The package as pip builds it, with a compiler for the kernels for CPUs and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).parents[1]
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "kernels", "openai_adapter", "python_backend")


def _files_of_wheel(folder: Path, **environment: str) -> list[str]:
    """What a wheel of the checkout has in it."""
    for name in SOURCES:
        if (source := ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(source, folder / "source" / name, ignore=ignored)
        else:
            (folder / "source").mkdir(exist_ok=True)
            shutil.copy(source, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", folder / "wheels", folder / "source"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "wheels").iterdir()
    return zipfile.ZipFile(wheel).namelist()


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_wheel_has_the_kernels(tmp_path: Path) -> None:
    files = _files_of_wheel(tmp_path)
    assert "diffusion_kernels/cpu.py" in files
    assert [name for name in files if name.startswith("diffusion_kernels/_cpu.") and name.endswith(".so")]


def test_without_a_compiler_the_rest_is_whole(tmp_path: Path) -> None:
    files = _files_of_wheel(tmp_path, CC="false", CXX="false")
    assert {"diffusion_kernels/cpu.py", "diffusion_backend/cli.py", "openai_adapter/app.py"} <= set(files)
    assert not [name for name in files if name.endswith(".so")]
