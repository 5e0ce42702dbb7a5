"""Set-up of a checkout, for ``./serve`` and ``./test``: checks, ``.venv``, the embedded tritonserver.

Runs as a script before anything is installed, so it needs the standard library alone. What is already right
is left alone, which makes the second run a matter of milliseconds; what an interrupted run left half done is
done again. Two runs at once wait for each other.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUPPORTED_PYTHONS = ((3, 11), (3, 12))
MINIMUM_GLIBC = (2, 35)
TRITON_PACKAGE = "nvidia-pytriton"
EXTRAS = ("adapter", "backend")  # groups of dependencies in pyproject.toml: here both parts run
COMPILER = "g++"  # of the kernels for CPUs, which can be done without
PACKAGE_FOLDERS = ("python_backend", "kernels", "openai_adapter")  # each holds one package
TRITON_SERVER = Path("pytriton/tritonserver")  # inside the folder that the package is installed to


class SetupError(Exception):
    """Why this machine or this checkout can't run the server, in one line that says what to do."""


def python_library_folder() -> Path | None:
    """The folder of this Python's own shared library, or None if it has none.

    Triton's Python stub loads it. Another build's library of the same version number is not enough: with it
    the stub starts, and then compiled modules of the standard library fail to import.
    """
    name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"):
        if folder and (Path(folder) / name).exists():
            return Path(folder)
    return None


def check_machine() -> None:
    """Raise a SetupError if this machine or this Python can't run the embedded tritonserver."""
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SetupError(
            f"this is {sys.platform} on {platform.machine()}, and the embedded tritonserver needs Linux on "
            "x86_64: use NVIDIA's tritonserver container instead (docker/)"
        )
    if sys.version_info[:2] not in SUPPORTED_PYTHONS:
        raise SetupError(
            f"{python} is not supported: the embedded tritonserver needs numpy 1.26, so Python 3.11 or 3.12: "
            "install one of these, or name it with PYTHON=/path/to/python3.11"
        )
    _check_glibc()
    if python_library_folder() is None:
        minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            f"{python} has no shared library (libpython{minor}.so.1.0), which tritonserver loads: install "
            f"it (Debian, Ubuntu: libpython{minor}; pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared) or name "
            "another Python with PYTHON=/path/to/python3.11"
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(f"{python} has no venv module: install it (Debian, Ubuntu: python{minor}-venv)")


def _check_glibc() -> None:
    need = ".".join(map(str, MINIMUM_GLIBC))
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):  # not glibc, musl for one
        library = ""
    name, _, version = library.partition(" ")
    if name != "glibc":
        raise SetupError(
            f"this system's C library is not glibc, and the embedded tritonserver needs glibc {need} or "
            "newer: use NVIDIA's tritonserver container instead (docker/)"
        )
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_GLIBC:
        raise SetupError(
            f"glibc {version} is too old: the embedded tritonserver needs {need} or newer (Debian 12, Ubuntu "
            "22.04): use a newer system or NVIDIA's tritonserver container (docker/)"
        )


def check_place(root: Path) -> None:
    """Raise a SetupError if tritonserver could not run the models of a checkout that lies there."""
    if not re.fullmatch(r"[!-~]+", str(root)):
        raise SetupError(
            f"this checkout is at {str(root)!r}, and tritonserver's Python backend takes no path with spaces or "
            "beyond ASCII: move it to another place"
        )


class Checkout:
    """One checkout of the repository, and what set-up puts into it: ``.venv`` and ``.triton``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.triton = root / ".triton"
        self.constraints = root / "constraints.txt"
        # Exists while pip changes the environment: if it is found at start, that run was cut short.
        self.unfinished = self.venv / "set-up-unfinished"
        self._lock_file = -1

    def set_up(self, extra: str | None) -> None:
        """Bring ``.venv`` (with the group ``extra`` of dependencies) and ``.triton`` up to date."""
        with self._lock():
            self._create_venv()
            self._install_packages(extra)
            self._install_triton()
            self._link_stub()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._lock_file = os.open(self.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say("waiting for another set-up of this checkout to end")
                fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(self._lock_file)

    def _run(self, command: list[str], failure: str) -> None:
        # The child holds the lock, too: if this process is killed, the next set-up waits for a pip left over.
        held = (self._lock_file,)
        done = subprocess.run(command, check=False, cwd=self.root, stdin=subprocess.DEVNULL, pass_fds=held)
        if done.returncode:
            raise SetupError(failure)

    def _create_venv(self) -> None:
        if self._venv_fits():
            return
        _say(f"creating .venv with Python {platform.python_version()}")
        if self.venv.is_symlink():
            self.venv.unlink()
        shutil.rmtree(self.venv, ignore_errors=True)
        # Not sys.executable: that may be the Python of the environment just removed.
        base = getattr(sys, "_base_executable", None) or sys.executable
        self._run([base, "-m", "venv", str(self.venv)], "the virtual environment .venv could not be created")

    def _venv_fits(self) -> bool:
        if not os.access(self.python, os.X_OK) or self.unfinished.exists():
            return False
        try:
            # pip's script names the place where the environment was made; a moved one is not usable.
            if f"{self.venv}/bin/python" not in (self.venv / "bin" / "pip").read_text()[:1000]:
                return False
        except (OSError, UnicodeDecodeError):
            return False
        code = "import platform, sys; print(platform.python_version(), sys.base_prefix)"
        command = [str(self.python), "-I", "-S", "-c", code]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        return answer.stdout.strip() == f"{platform.python_version()} {sys.base_prefix}"

    def _install_packages(self, extra: str | None) -> None:
        done = self.venv / f"set-up-done-{extra or 'plain'}"
        want = self._fingerprint()
        if _read(done) == want:
            return
        what = f".[{','.join([*EXTRAS, *([extra] if extra else [])])}]"
        _say(f"installing the dependencies into .venv ({what}, pinned); the first time takes a minute or two")
        self._remove_outdated_kernels()
        self.unfinished.touch()
        try:
            # setuptools first and no build isolation: so the build's own tools are pinned, too.
            self._pip(["setuptools"])
            self._pip(["--no-build-isolation", "--editable", what])
        except SetupError:
            # pip has ended by itself, so it left things whole. Cut short, it leaves the mark.
            self.unfinished.unlink()
            raise
        self._write_paths()
        self.unfinished.unlink()
        for stamp in {done, self.venv / "set-up-done-plain"}:
            stamp.write_text(self._fingerprint())  # anew: the kernels may have been built
        self._tell_of_kernels()

    def _write_paths(self) -> None:
        """Put the folders of the packages on the environment's path.

        The editable install alone finds packages last, by an import hook: in the root of the checkout, its
        folder ``openai_adapter`` would then be taken for the package. Type checkers don't see the hook.
        """
        lines = "".join(f"{self.root / folder}\n" for folder in PACKAGE_FOLDERS)
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        (self.venv / "lib" / python / "site-packages" / "triton-diffusion-checkout.pth").write_text(lines)

    def _kernel_sources(self) -> list[Path]:
        return sorted(path for kind in ("cpp", "h") for path in (self.root / "kernels").glob(f"*/*.{kind}"))

    def _kernel_libraries(self) -> list[Path]:
        return list((self.root / "kernels").glob("*/_cpu*.so"))

    def _remove_outdated_kernels(self) -> None:
        """So that kernels of other sources do not stay where the new ones cannot be built."""
        changed = max((path.stat().st_mtime for path in self._kernel_sources()), default=0.0)
        for library in self._kernel_libraries():
            if library.stat().st_mtime < changed:
                library.unlink()

    def _state_of_kernels(self) -> str:
        if self._kernel_libraries():
            return "built"
        return "to be built" if shutil.which(COMPILER) else "no compiler"

    def _tell_of_kernels(self) -> None:
        """pip says nothing when an extension that can be done without does not compile."""
        why = {
            "no compiler": f"there is no {COMPILER}",
            "to be built": f"{self.python} -m pip install -v --no-build-isolation --no-deps -e {self.root} shows why",
        }.get(self._state_of_kernels())
        if why:
            _say(f"the kernels for CPUs were not built, PyTorch's operations do their work: {why}")

    def _fingerprint(self) -> str:
        parts = [(self.root / "pyproject.toml").read_bytes(), self.constraints.read_bytes()]
        parts += [path.read_bytes() for path in self._kernel_sources()]
        parts.append(self._state_of_kernels().encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def _install_triton(self) -> None:
        version = self._pinned(TRITON_PACKAGE)
        record = f"{TRITON_PACKAGE.replace('-', '_')}-{version}.dist-info"
        program = self.triton / TRITON_SERVER / "bin" / "tritonserver"
        if (self.triton / record).is_dir() and program.exists():
            return
        _say(f"installing tritonserver into .triton ({TRITON_PACKAGE} {version})")
        # Put together aside and moved into place whole, so that a folder with this name is always complete.
        staging = self.venv / "triton-staging"
        shutil.rmtree(staging, ignore_errors=True)
        # Without dependencies: they are for its Python library, which is not used.
        self._pip(["--no-deps", "--target", str(staging), TRITON_PACKAGE])
        shutil.rmtree(self.triton, ignore_errors=True)
        staging.rename(self.triton)

    def _link_stub(self) -> None:
        """Choose the Python backend's stub for this Python: the wheel has one for each minor version."""
        minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
        name = "triton_python_backend_stub"
        target = Path("../../python_backend_stubs") / minor / name
        link = self.triton / TRITON_SERVER / "backends" / "python" / name
        if link.is_symlink() and link.readlink() == target:
            return
        aside = link.with_name(f"{name}.new")
        aside.unlink(missing_ok=True)
        aside.symlink_to(target)
        aside.replace(link)

    def _pinned(self, package: str) -> str:
        for line in self.constraints.read_text().splitlines():
            name, found, version = line.partition("==")
            if found and name == package:
                return version
        raise SetupError(f"{self.constraints} has no line '{package}==VERSION'")

    def _pip(self, arguments: list[str]) -> None:
        quiet = ["--quiet", "--quiet", "--no-input", "--disable-pip-version-check"]  # errors alone
        self._run(
            [str(self.python), "-m", "pip", "install", *quiet, "-c", str(self.constraints), *arguments],
            "pip could not install what is needed (its own words are above): mend that and start again",
        )


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _say(text: str) -> None:
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """``python bootstrap.py ROOT [--extra NAME]``: check this machine and set ROOT up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--extra", help="an optional group of dependencies in pyproject.toml")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    try:
        check_machine()
        check_place(root)
        Checkout(root).set_up(arguments.extra)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: set-up interrupted; the next start goes on with it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
