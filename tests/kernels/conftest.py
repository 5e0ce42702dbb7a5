"""Kernels are tested on the GPU, or where there is none, in Triton's interpreter in processes of their own.

Triton reads TRITON_INTERPRET when it is imported, and other tests import it with diffusers. So without a GPU each file
here is one test, which runs that file in another pytest. To run a single test of it:
``TRITON_INTERPRET=1 pytest tests/kernels -k name``
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TIMEOUT = 240


class InterpretedTests(pytest.Item):
    """All tests of a file, in another process."""

    def runtest(self) -> None:
        command = [sys.executable, "-m", "pytest", str(self.path), "-q", "-p", "no:cacheprovider"]
        command += [f"--confcutdir={self.path.parent}"]
        subprocess.run(
            command,
            cwd=self.config.rootpath,
            # The tensors are small: threads of PyTorch's would only wait for each other.
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        if isinstance(excinfo.value, subprocess.CalledProcessError | subprocess.TimeoutExpired):
            return f"{excinfo.value}\n{excinfo.value.stdout}"
        return super().repr_failure(excinfo, *args)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class InterpretedModule(pytest.Module):
    """A file that isn't imported here."""

    def collect(self) -> Iterator[pytest.Item]:
        test = InterpretedTests.from_parent(self, name="interpreted")
        test.add_marker("parallel")
        yield test


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Takes the files of this folder where this process can't run them itself."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return InterpretedModule.from_parent(parent, path=module_path)
