"""The official Node SDK: scripts of ``tests/node`` that use it as people do."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.running_server import ROOT


def run_script(folder: Path, script: str, *arguments: str, seconds: float = 60) -> Any:
    """What a script prints, which is JSON; the SDK is installed in ``folder``."""
    shutil.copytree(ROOT / "tests/node", folder / "node", ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(install, cwd=folder / "node", check=True, timeout=120)
    run = ["node", script, *arguments]
    done = subprocess.run(run, cwd=folder / "node", check=False, timeout=seconds, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)
