"""What a stage does with the memory that its tensors free."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="options of glibc's malloc")

MIB = 100
TURNS = 10
# Minor page faults of TURNS times a tensor of MIB and one of half of it, in the thread that is named.
SCRIPT = f"""
import resource, sys, threading
from diffusion_backend.stages.common import tune_process
if sys.argv[1] == "tuned":
    tune_process()
import torch

def turn():
    held = torch.empty({MIB} << 20, dtype=torch.uint8).fill_(1)
    torch.empty({MIB} << 19, dtype=torch.uint8).fill_(1)
    del held

def work():
    for _ in range({TURNS}):  # until the heap is as large as it gets
        turn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({TURNS}):
        turn()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[2] == "main":
    work()
else:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def faults(how: str, thread: str, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    environment |= {"TRITON_DIFFUSION_DEVICE": "cpu", **variables}
    command = [sys.executable, "-c", SCRIPT, how, thread]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.parametrize("thread", ["main", "other"])
def test_freed_memory_is_used_again(thread: str) -> None:
    """Once at most, not at each turn, are the pages of a tensor new: the engine's thread's, too."""
    pages = MIB * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert faults("tuned", thread) < pages
    assert faults("plain", thread) > TURNS * pages or _has_huge_pages()


def test_the_operators_own_options_stay() -> None:
    pages = MIB * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert faults("tuned", "main", MALLOC_TOP_PAD_="0") > TURNS * pages or _has_huge_pages()


def _has_huge_pages() -> bool:
    """Where the kernel gives them to whoever asks for memory, there are 512 times fewer faults to count."""
    return "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
