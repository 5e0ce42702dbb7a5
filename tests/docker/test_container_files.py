"""What the Dockerfiles, ``.dockerignore``, the compose file and the containers' constraints say of each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from container_files import (
    DOCKERFILES,
    health_command,
    is_in_build_context,
    normalize,
    only,
    read_compose,
    read_instructions,
    read_pins,
    read_requirements,
)
from diffusion_backend.container import ADMIN_KEY_FILE, PORTS
from diffusion_backend.launcher import ADAPTER_PATIENCE_SECONDS
from openai_adapter.settings import SECRETS_DIR, Settings
from openai_adapter.triton import CLOSE_SECONDS

from tests.running_server import ROOT

CONTAINER_PINS = read_pins(ROOT / "docker/constraints.txt")
SERVICES = read_compose()["services"]
dockerfiles = pytest.mark.parametrize("path", DOCKERFILES.values(), ids=DOCKERFILES.keys())


def _copied(path: Path) -> list[str]:
    copies = [rest.split() for name, rest in read_instructions(path) if name == "COPY"]
    return [word for words in copies for word in words[:-1] if not word.startswith("--")]


@dockerfiles
def test_what_is_copied_is_there_and_in_the_build_context(path: Path) -> None:
    for source in _copied(path):
        assert (ROOT / source).exists(), source
        files = [ROOT / source] if (ROOT / source).is_file() else (ROOT / source).rglob("*")
        assert any(is_in_build_context(str(file.relative_to(ROOT))) for file in files), source


@dockerfiles
def test_the_packages_are_copied_whole(path: Path) -> None:
    for folder in ("kernels", "openai_adapter", "python_backend"):
        assert folder in _copied(path)
        for file in (ROOT / folder).rglob("*.py*"):
            name = str(file.relative_to(ROOT))
            assert is_in_build_context(name) is ("__pycache__" not in name), name


def test_the_model_that_comes_with_the_repository_is_copied_whole() -> None:
    assert "model_repository" in _copied(DOCKERFILES["triton"])
    for folder in (ROOT / "model_repository").glob("emoji-flux*"):
        # Triton wants the folder of a version, also where git keeps it with an empty file.
        assert all(is_in_build_context(str(file.relative_to(ROOT))) for file in folder.glob("1/.gitkeep"))
        assert is_in_build_context(f"model_repository/{folder.name}/config.pbtxt")
        assert is_in_build_context(f"model_repository/{folder.name}/warmup/prompt")
    assert not is_in_build_context("model_repository/emoji-flux/training/emoji.py")


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        ".triton/pytriton/tritonserver/bin/tritonserver",
        ".data/admin-key",
        "docker/.env",
        "docker/compose.yaml",
        "model_repository/my-model/config.pbtxt",
        "tests/conftest.py",
    ],
)
def test_the_rest_stays_out_of_the_images(path: str) -> None:
    assert not is_in_build_context(path)


@dockerfiles
def test_dependencies_come_before_code(path: Path) -> None:
    steps = [rest for name, rest in read_instructions(path) if name in ("RUN", "COPY")]
    (install,) = [index for index, rest in enumerate(steps) if "--requirement" in rest]
    (code,) = [index for index, rest in enumerate(steps) if rest.startswith("python_backend")]
    assert install < code


@pytest.mark.parametrize(("name", "extra"), [("triton", "backend"), ("adapter", "adapter")])
def test_each_image_installs_its_own_dependencies(name: str, extra: str) -> None:
    (install,) = [rest for _, rest in read_instructions(DOCKERFILES[name]) if "--requirement" in rest]
    assert re.findall(r"\['optional-dependencies'\]\['(\w+)'\]", install) == [extra]
    assert read_requirements(extra) <= CONTAINER_PINS.keys()


@dockerfiles
def test_they_run_without_root_and_stop_in_order(path: Path) -> None:
    assert only(path, "USER") == "1000:1000"  # numbers: Kubernetes' runAsNonRoot can't judge a name
    assert only(path, "STOPSIGNAL") == "SIGTERM"


def test_health_checks_ask_the_right_path() -> None:
    triton = only(DOCKERFILES["triton"], "EXPOSE")
    assert triton == f"{PORTS.http} {PORTS.grpc} {PORTS.metrics}"
    assert f"'http://127.0.0.1:{PORTS.http}/v2/health/ready'" in health_command(DOCKERFILES["triton"])[-1]
    adapter = only(DOCKERFILES["adapter"], "EXPOSE")
    assert adapter == str(Settings.model_fields["port"].default)
    assert f"'http://127.0.0.1:{adapter}/health/live'" in health_command(DOCKERFILES["adapter"])[-1]


def test_the_containers_pins_are_those_of_the_checkout_but_for_what_is_said() -> None:
    checkout = read_pins(ROOT / "constraints.txt")
    differing = {
        name for name in CONTAINER_PINS.keys() & checkout.keys() if CONTAINER_PINS[name] != checkout[name]
    }
    assert differing == {"numpy"}
    assert checkout["numpy"].startswith("1.")
    assert CONTAINER_PINS["numpy"].startswith("2.")
    added = CONTAINER_PINS.keys() - checkout.keys()
    assert {name for name in added if name != "cuda-toolkit" and not name.startswith("nvidia-")} == set()


@pytest.mark.parametrize("path", ["constraints.txt", "docker/constraints.txt"])
def test_pins_are_sorted_and_said_once(path: str) -> None:
    lines = [line for line in (ROOT / path).read_text().splitlines() if not line.startswith("#")]
    names = [normalize(line.split("==")[0]) for line in lines]
    assert len(names) == len(set(names))
    if path.startswith("docker/"):
        assert names == sorted(names)


def test_the_adapter_needs_nothing_of_the_stage_models() -> None:
    modules = read_requirements("backend") - read_requirements("adapter")
    assert "torch" in modules
    hide = f"import sys; sys.modules.update(dict.fromkeys({sorted(modules)!r}))"
    command = [sys.executable, "-c", f"{hide}; from openai_adapter.__main__ import main; main(['--help'])"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "--triton-url" in result.stdout


def test_only_the_adapter_can_be_reached() -> None:
    assert SERVICES.keys() == {"triton", "adapter"}
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["adapter"]
    (port,) = SERVICES["adapter"]["ports"]
    assert port.endswith(f":{Settings.model_fields['port'].default}")
    assert not any("network_mode" in service for service in SERVICES.values())


def test_the_keys_are_required_and_shared() -> None:
    triton, adapter = (SERVICES[name] for name in ("triton", "adapter"))
    assert ":?" in adapter["environment"]["OPENAI_ADAPTER_API_KEYS"]
    (secret,) = triton["secrets"]
    assert triton["environment"][ADMIN_KEY_FILE] == f"/run/secrets/{secret}"
    assert adapter["environment"][SECRETS_DIR] == "/run/secrets"
    assert adapter["secrets"] == [{"source": secret, "target": "openai_adapter_triton_admin_key"}]
    assert read_compose()["secrets"] == {secret: {"environment": "TRITON_ADMIN_KEY"}}


def test_services_are_healthy_before_they_are_used_and_have_time_to_stop() -> None:
    triton, adapter = (SERVICES[name] for name in ("triton", "adapter"))
    assert adapter["depends_on"] == {"triton": {"condition": "service_healthy"}}
    assert adapter["environment"]["OPENAI_ADAPTER_TRITON_URL"] == f"triton:{PORTS.grpc}"
    (exit_timeout,) = re.findall(r"--exit-timeout=(\d+)", only(DOCKERFILES["triton"], "CMD"))
    assert _seconds(triton["stop_grace_period"]) > int(exit_timeout)
    stopping = Settings.model_fields["shutdown_seconds"].default + CLOSE_SECONDS
    assert _seconds(adapter["stop_grace_period"]) > stopping
    assert stopping < ADAPTER_PATIENCE_SECONDS
    for service in (triton, adapter):
        assert service["restart"] == "unless-stopped"
        assert service["init"] is True
    assert "healthcheck" not in triton  # the image's own holds
    port = Settings.model_fields["port"].default
    assert f"'http://127.0.0.1:{port}/health/serving'" in adapter["healthcheck"]["test"][-1]


def test_triton_gets_the_gpus_and_shared_memory() -> None:
    (device,) = SERVICES["triton"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert SERVICES["triton"]["shm_size"] == "1gb"


def test_services_build_these_images_and_keep_what_they_write() -> None:
    for name, path in DOCKERFILES.items():
        service = SERVICES[name]
        assert service["build"] == {"context": "..", "dockerfile": str(path.relative_to(ROOT))}
        volumes = {volume.rsplit(":", 1)[1]: volume.rsplit(":", 1)[0] for volume in service["volumes"]}
        assert volumes["/data"] in read_compose()["volumes"]
        assert "1000 --group=1000 /data" in path.read_text()


def _seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))
