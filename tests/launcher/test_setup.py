"""``./serve`` and ``./test`` before anything runs: the checks, ``.venv`` and ``.triton``.

The set-ups here are of a small checkout without dependencies, from packages made on the spot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).resolve().parents[2]
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
SETUP_FILES = ("serve", ".ci/setup.sh", "python_backend/diffusion_backend/bootstrap.py")

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "triton-diffusion"
version = "1"
"""
# Builds the editable install: a wheel whose command prints how it was called.
BACKEND = """
import zipfile
def build_editable(folder, settings=None, metadata=None):
    with zipfile.ZipFile(f"{folder}/triton_diffusion-1-py3-none-any.whl", "w") as wheel:
        info = "triton_diffusion-1.dist-info"
        wheel.writestr("checkout_command.py", "import sys\\ndef main(): print('served', *sys.argv[1:])\\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: triton-diffusion\\nVersion: 1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(
            f"{info}/entry_points.txt", "[console_scripts]\\ntriton-diffusion = checkout_command:main\\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return "triton_diffusion-1-py3-none-any.whl"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of the set-up, around a project without dependencies."""
    root = tmp_path / "checkout"
    for name in SETUP_FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "constraints.txt").write_text("nvidia-pytriton==1.0\nsetuptools==99.0\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _make_wheel(wheels, "setuptools", "99.0", {})
    stubs = "pytriton/tritonserver/python_backend_stubs"
    files = {
        "pytriton/tritonserver/bin/tritonserver": "",
        "pytriton/tritonserver/backends/python/triton_python_backend_utils.py": "",
        f"{stubs}/{MINOR}/triton_python_backend_stub": "",
    }
    _make_wheel(wheels, "nvidia_pytriton", "1.0", files)
    return root


def _make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _environment(root: Path, **extra: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(root.parent / "wheels"),
        **extra,
    }


def _serve(root: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "serve", *arguments],
        env=_environment(root, **extra),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def _assert_one_clear_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def _python_with(folder: Path, patch: str) -> str:
    """A Python to name in PYTHON that finds itself as ``patch`` makes it."""
    (folder / "patched").mkdir()
    (folder / "patched" / "sitecustomize.py").write_text(patch)
    program = folder / "patched" / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/patched exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("import sys; sys.version_info = (3, 13, 0)", ("Python 3.13", "3.11 or 3.12")),
        ("import sys; sys.version_info = (3, 10, 9)", ("Python 3.10", "3.11 or 3.12")),
        ("import os; os.confstr = lambda name: 'glibc 2.31'", ("glibc 2.31", "2.35")),
        ("import os; os.confstr = lambda name: None", ("not glibc", "2.35")),
        ("import platform; platform.machine = lambda: 'aarch64'", ("aarch64", "x86_64")),
        ("import sys; sys.platform = 'darwin'", ("darwin", "Linux")),
        (
            "import sys, sysconfig; sys.base_prefix = '/none'; sysconfig.get_config_var = lambda name: None",
            (f"libpython{MINOR}.so.1.0", f"libpython{MINOR};"),
        ),
        (
            "import importlib.util as u, builtins; find = u.find_spec;"
            "u.find_spec = lambda name, *rest: None if name == 'ensurepip' else find(name, *rest)",
            ("venv", f"python{MINOR}-venv"),
        ),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_in_one_line(
    checkout: Path, tmp_path: Path, patch: str, words: tuple[str, ...]
) -> None:
    result = _serve(checkout, PYTHON=_python_with(tmp_path, patch))
    _assert_one_clear_line(result, *words)
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("name", ["a checkout", "künstlich"])
def test_a_place_that_tritonserver_cannot_take(checkout: Path, name: str) -> None:
    moved = checkout.rename(checkout.with_name(name))
    word = "spaces or beyond ASCII: move it"
    _assert_one_clear_line(_serve(moved), "this checkout is at ", word)
    _assert_one_clear_line(_serve(moved, LC_ALL="C", PYTHONUTF8="0"), word)
    assert not (moved / ".venv").exists()


def test_a_python_that_does_not_run_is_named(checkout: Path) -> None:
    _assert_one_clear_line(_serve(checkout, PYTHON="/nowhere/python"), "/nowhere/python")


def _only(folder: Path, **programs: str) -> str:
    """A PATH with these programs alone, and what the script itself needs."""
    folder.mkdir()
    for name in ("bash", "dirname"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, text in programs.items():
        (folder / name.replace("_", ".")).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name.replace("_", ".")).chmod(0o755)
    return str(folder)


def test_no_python_at_all(checkout: Path, tmp_path: Path) -> None:
    _assert_one_clear_line(
        _serve(checkout, PYTHON="", PATH=_only(tmp_path / "bin")), "3.11", "3.12", "PYTHON="
    )


def test_the_first_python_that_runs_is_taken(checkout: Path, tmp_path: Path) -> None:
    # As version managers do it: python3.11 is there, and says that it is not installed.
    path = _only(tmp_path / "bin", python3_11="exit 127", python3_12=f'exec {sys.executable} "$@"')
    command = ["bash", "-c", ". .ci/setup.sh; find_python"]
    found = subprocess.run(
        command, cwd=checkout, env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert found.stdout == "python3.12\n"


def test_set_up_once_then_nothing(checkout: Path) -> None:
    first = _serve(checkout, "--port", "1", "two words")
    assert (first.returncode, first.stdout) == (0, "served serve --port 1 two words\n"), first.stderr
    stub = checkout / ".triton/pytriton/tritonserver/backends/python/triton_python_backend_stub"
    assert stub.readlink() == Path(f"../../python_backend_stubs/{MINOR}/triton_python_backend_stub")
    assert stub.exists()

    second = _serve(checkout, PIP_FIND_LINKS="/nowhere")  # pip would fail
    assert (second.returncode, second.stdout, second.stderr) == (0, "served serve\n", "")

    # Other pins: pip runs again, in the same environment.
    (checkout / ".venv" / "kept").touch()
    constraints = checkout / "constraints.txt"
    constraints.write_text(constraints.read_text() + "another==1\n")
    third = _serve(checkout)
    assert third.returncode == 0
    assert "installing the dependencies" in third.stderr
    assert (checkout / ".venv" / "kept").exists()


def test_what_an_interrupted_set_up_left_is_made_anew(checkout: Path) -> None:
    assert _serve(checkout).returncode == 0
    (checkout / ".venv" / "set-up-unfinished").touch()
    (checkout / ".venv" / "half-installed").touch()
    shutil.rmtree(checkout / ".triton" / "pytriton")
    result = _serve(checkout)
    assert (result.returncode, result.stdout) == (0, "served serve\n"), result.stderr
    assert not (checkout / ".venv" / "half-installed").exists()
    assert (checkout / ".triton/pytriton/tritonserver/bin/tritonserver").exists()


def test_a_moved_checkout_gets_an_environment_of_its_own(checkout: Path) -> None:
    assert _serve(checkout).returncode == 0
    moved = checkout.rename(checkout.with_name("moved"))
    result = _serve(moved)
    assert (result.returncode, result.stdout) == (0, "served serve\n"), result.stderr
    assert str(moved / ".venv") in (moved / ".venv" / "bin" / "triton-diffusion").read_text()


def test_a_failing_pip_is_said_and_the_next_run_goes_on(checkout: Path) -> None:
    failed = _serve(checkout, PIP_FIND_LINKS="/nowhere")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("error: pip could not install")
    (checkout / ".venv" / "kept").touch()
    assert _serve(checkout).returncode == 0
    assert (checkout / ".venv" / "kept").exists()


def test_two_starts_at_once_share_one_set_up(checkout: Path) -> None:
    starts = [
        subprocess.Popen(
            [checkout / "serve"],
            env=_environment(checkout),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    outputs = [start.communicate(timeout=120) for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0]
    assert {out for out, _ in outputs} == {"served serve\n"}
    assert sum(err.count("creating .venv") for _, err in outputs) == 1


def test_kernels_are_built_again_when_their_sources_change(checkout: Path) -> None:
    kernels = checkout / "kernels" / "some_kernels"
    kernels.mkdir(parents=True)
    source, library = kernels / "kernel.cpp", kernels / "_cpu.so"
    source.write_text("old")
    library.write_text("of the old source")
    assert "the kernels for CPUs were not built" not in _serve(checkout).stderr
    source.write_text("new")
    second = _serve(checkout)
    assert "installing the dependencies" in second.stderr
    assert "the kernels for CPUs were not built" in second.stderr
    assert not library.exists()
    assert _serve(checkout).stderr == ""


def test_a_compiler_that_comes_builds_kernels_and_one_that_goes_leaves_them(
    checkout: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in os.environ["PATH"].split(":"):
        for program in Path(folder).glob("*"):
            if program.name != "g++" and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    path = str(programs)
    assert "there is no g++" in _serve(checkout, PATH=path).stderr
    assert _serve(checkout, PATH=path).stderr == ""

    compiler = programs / "g++"
    compiler.symlink_to("/bin/true")
    built = _serve(checkout, PATH=path)
    assert "installing the dependencies" in built.stderr
    assert "shows why" in built.stderr  # this project has none to build
    library = checkout / "kernels" / "some_kernels" / "_cpu.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert _serve(checkout, PATH=path).returncode == 0

    compiler.unlink()
    assert _serve(checkout, PATH=path).stderr == ""
    assert library.exists()
