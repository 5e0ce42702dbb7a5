"""What a stage does with the memory that its tensors free, and an adapter with that of pictures."""

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


def test_an_adapter_gives_the_memory_of_pictures_back() -> None:
    """Those that were decoded in many threads; without the option a part of it stays in their arenas."""
    script = """if True:
        import io, re, sys, threading
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from PIL import Image
        from diffusion_backend import malloc, input_image

        def held():
            return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

        if sys.argv[1] == "tuned":
            assert malloc.return_freed_memory()
        file = io.BytesIO()
        Image.new("RGBA", (3000, 3000)).save(file, "PNG")
        barrier = threading.Barrier(8)

        def decode():
            barrier.wait()
            return input_image.open_upright(file.getvalue()).size

        before = held()
        with ThreadPoolExecutor(8) as pool:
            for _ in range(3):
                list(pool.map(lambda _: decode(), range(8)))
            print(held() - before)
    """
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    kept = {}
    for how in ("tuned", "plain"):
        command = [sys.executable, "-c", script, how]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        kept[how] = int(done.stdout)
    assert kept["tuned"] < 30 * 2**20 < kept["plain"]


def _has_huge_pages() -> bool:
    """Where the kernel gives them to whoever asks for memory, there are 512 times fewer faults to count."""
    return "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
