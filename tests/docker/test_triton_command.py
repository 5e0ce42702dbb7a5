"""``triton-diffusion triton``: what the container of tritonserver runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc
from diffusion_backend.client import ADMIN_KEY_METADATA
from diffusion_backend.container import ADMIN_KEY, ADMIN_KEY_FILE
from diffusion_backend.guard import SHARED_MEMORY
from diffusion_backend.processes import free_ports
from diffusion_backend.tritonserver import http_status
from tritonclient.utils import InferenceServerException

KEY = "0123456789-abcdef"
START_SECONDS = 200


def _command(*arguments: str, ports: tuple[int, ...] = (1, 2, 3)) -> list[str]:
    # As the command does it, but for the ports: those of the container may be taken on this machine.
    code = (
        "import sys; from diffusion_backend import cli, container, tritonserver;"
        f"container.PORTS = tritonserver.TritonPorts(*{ports}); sys.exit(cli.main(['triton', *sys.argv[1:]]))"
    )
    return [sys.executable, "-c", code, *arguments]


def _environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (ADMIN_KEY, ADMIN_KEY_FILE)}
    return {**kept, **variables}


def test_it_becomes_a_tritonserver_that_the_key_controls(model_repository: Path, tmp_path: Path) -> None:
    http, grpc, metrics = free_ports(3)
    (tmp_path / "key").write_text(f"{KEY}\n")
    log = tmp_path / "log"
    command = _command(
        f"--model-repository={model_repository}",
        "--device=cpu",
        "--exit-timeout=20",
        ports=(http, grpc, metrics),
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=_environment(**{ADMIN_KEY_FILE: str(tmp_path / "key")}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while http_status("127.0.0.1", http, "/v2/health/ready") != 200:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        assert "tritonserver" in Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[0]
        assert list(SHARED_MEMORY.glob(f"triton_diffusion_*_{process.pid}_*"))
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{grpc}") as client:
            assert client.is_model_ready("emoji-flux")
            with pytest.raises(InferenceServerException, match="restricted"):
                client.get_model_repository_index()
            index = client.get_model_repository_index(headers={ADMIN_KEY_METADATA: KEY})
            assert "emoji-flux" in {model.name for model in index.models}
        assert http_status("127.0.0.1", metrics, "/metrics") == 200
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert not list(SHARED_MEMORY.glob(f"triton_diffusion_*_{process.pid}_*"))


@pytest.mark.parametrize("key", ["", "short", "a-key:with,signs=of-triton", "a key of several words"])
def test_a_key_that_protects_nothing_is_refused(model_repository: Path, key: str) -> None:
    result = _run(f"--model-repository={model_repository}", **{ADMIN_KEY: key})
    assert result.stderr.startswith(f"error: the key in {ADMIN_KEY} must be 16 or more")


def test_a_key_file_that_is_not_there_is_named(model_repository: Path) -> None:
    result = _run(f"--model-repository={model_repository}", **{ADMIN_KEY_FILE: "/nowhere/key"})
    assert "error: cannot read the key" in result.stderr
    assert "/nowhere/key" in result.stderr


def test_a_repository_that_is_not_there_is_named() -> None:
    assert "error: there is no model repository /nowhere" in _run("--model-repository=/nowhere").stderr


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        _command(*arguments),
        env=_environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (1, "")
    return result
