"""Starting a tritonserver: where it is, how it is called, and when it is ready."""

from __future__ import annotations

import http.client
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from diffusion_backend import guard
from diffusion_backend.bootstrap import TRITON_SERVER, python_library_folder
from diffusion_backend.client import ADMIN_KEY_HEADER
from diffusion_backend.model_config import CONFIG_FILE, list_ensembles, read_model_config
from diffusion_backend.process_identity import start_time
from diffusion_backend.processes import LaunchError, ManagedProcess, free_ports, indent
from diffusion_backend.settings import parse_limits
from diffusion_backend.shared_memory import require_room

CHECKOUT = Path(__file__).resolve().parents[2]
LOOPBACK = "127.0.0.1"
# What a stranger on this machine must not do: replace models (which runs code), map memory, change logs.
RESTRICTED_APIS = "model-repository,shared-memory,trace,logging"
_REGION_PREFIX = "triton_diffusion"
LOST_REQUESTS_PATIENCE_SECONDS = 10.0
# The stages' errors in Triton's log: what is left to tell when Triton crashed before it told them.
_STAGE_ERROR_MESSAGE = r"^E (\S+: .*)$"
# An error in Triton's log. The one left out is logged on every machine without a GPU.
_ERROR_MESSAGE = r"^E\d{4} [\d:.]+ \d+ [\w.]+:\d+\] \"?+(?!CudaDriverHelper)(.*?)\"?$"


@dataclass(frozen=True)
class TritonPorts:
    """Where tritonserver listens, on the loopback interface."""

    http: int
    grpc: int
    metrics: int

    @classmethod
    def free(cls) -> Self:
        """Ports that nothing listens on."""
        return cls(*free_ports(3))


class TritonServer:
    """A tritonserver that serves every ensemble of a model repository.

    with TritonServer(Path("model_repository"), data_dir=Path(".data")) as triton:
        ...  # it is ready: triton.grpc_url
    """

    def __init__(
        self,
        repository: Path,
        *,
        data_dir: Path,
        address: str = LOOPBACK,
        ports: TritonPorts | None = None,
        admin_key: str | None = None,
        device: str = "auto",
        exit_timeout: int = 60,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``exit_timeout``: the seconds that running requests get when it stops; longer ones are lost."""
        self.repository = repository.absolute()
        self.models = _ensembles(self.repository)
        self.ports = ports or TritonPorts.free()
        self.data_dir = data_dir.resolve()
        self.admin_key = admin_key or secrets.token_urlsafe(32)
        self.regions = _region_prefix()
        self._address = address
        self._program, self._backends = find_tritonserver()
        self.exit_timeout = exit_timeout
        self._environment = {**_environment(device), **(environment or {})}
        self._process: ManagedProcess | None = None
        self._to_load = set(self.models)
        self._requests_lost = False
        self.was_cut_short = False  # stop() killed it, as it would have waited for requests that were lost

    def pipelines(self) -> list[str]:
        """The ensembles that are ours; an operator may have others beside them."""
        return [
            model
            for model in self.models
            if "pipeline_class" in read_model_config(self.repository / model).parameters
        ]

    @property
    def grpc_url(self) -> str:
        return f"{LOOPBACK}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports.metrics}/metrics"

    @property
    def log(self) -> Path:
        return self.data_dir / "logs" / "tritonserver.log"

    @property
    def process(self) -> ManagedProcess:
        """The running server."""
        if self._process is None:
            raise LaunchError("tritonserver was not started")
        return self._process

    def require_shared_memory(self) -> None:
        """Raise a LaunchError if there is not enough of it."""
        remove_stale_regions()
        require_room(self.repository, self.models)

    def start(self, without: Collection[str] = ()) -> None:
        """Start it, without loading some of its ensembles; it is not ready yet."""
        remove_stale_regions()
        self._write_admin_key()
        self._requests_lost = False
        self._process = ManagedProcess(
            "tritonserver",
            self._command(without),
            log=self.log,
            environment=self._environment,
            # A little more than it gives itself.
            patience=self.exit_timeout + 10,
            regions=self.regions,
        )

    def note_lost_requests(self) -> None:
        """A stub has died. Triton counts the requests that it was at as running, for ever."""
        self._requests_lost = True

    def load_next_time(self, models: set[str]) -> None:
        """What the next ``start()`` loads, instead of every ensemble: what an operator has left loaded.

        One that has been removed from the repository until then is left out: Triton would not start with it.
        """
        self._to_load = models

    def replace_this_process(self) -> NoReturn:
        """Become tritonserver, without a log file and a guard: for a container, which has its own of both."""
        os.execve(self._program, self._command(), self._environment)

    def is_ready(self) -> bool:
        """Whether every model is loaded and warm."""
        return http_status(LOOPBACK, self.ports.http, "/v2/health/ready") == 200

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until it is ready.

        Raises:
            LaunchError: it ended instead, with Triton's reasons, or ``timeout`` seconds passed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_ready():
            if self.process.poll() is not None:
                raise LaunchError(self.failure())
            if deadline is not None and time.monotonic() > deadline:
                raise LaunchError(
                    f"tritonserver was not ready after {timeout:g} s; its log ends:\n{self.process.tail()}"
                )
            time.sleep(0.1)

    def failure(self) -> str:
        """Why it ended by itself: Triton's error messages, or else the end of its log."""
        log = self.log.read_text(errors="replace")
        messages = re.findall(_ERROR_MESSAGE, log, re.MULTILINE)
        messages += re.findall(_STAGE_ERROR_MESSAGE, log, re.MULTILINE)
        # Triton tells a failure again at every level it passes; this line has the model and the whole reason.
        loads = [message for message in messages if message.startswith("failed to load ")]
        reasons = "\n".join(dict.fromkeys(loads or messages)).replace("\\n", "\n")
        text = reasons or self.process.tail()
        return f"tritonserver ended ({self.process.describe_exit()}); see {self.log}:\n{indent(text)}"

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Stop it with all its stubs; returns whether it ended in order. Without a start: nothing to do."""
        if self._process is None:
            return True
        if not self._requests_lost:
            return self._process.stop(hurry)
        # It would wait for the lost requests until its exit timeout, and then end with an error. Nothing tells them
        # from others that still run.
        end = time.monotonic() + LOST_REQUESTS_PATIENCE_SECONDS
        in_order = self._process.stop(lambda: hurry() or time.monotonic() > end)
        self.was_cut_short = not in_order and time.monotonic() > end
        return in_order

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self, without: Collection[str] = ()) -> list[str]:
        # Triton takes the key on its command line only, where other users of this machine can read it (ps),
        # unless /proc is mounted with hidepid.
        restricted = f"{RESTRICTED_APIS}:{ADMIN_KEY_HEADER}={self.admin_key}"
        return [
            str(self._program),
            f"--model-repository={self.repository}",
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in self._ensembles_to_load() if model not in without),
            "--disable-auto-complete-config",
            f"--backend-directory={self._backends}",
            f"--backend-config=python,shm-region-prefix-name={self.regions}",
            f"--exit-timeout-secs={self.exit_timeout}",
            f"--http-address={self._address}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self._address}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self._address}",
            f"--metrics-port={self.ports.metrics}",
            f"--http-restricted-api={restricted}",
            f"--grpc-restricted-protocol={restricted}",
        ]

    def _ensembles_to_load(self) -> list[str]:
        # Triton loads their stages with them. One that was named itself would stay when its ensemble is unloaded.
        return sorted(model for model in self._to_load if _may_be_ensemble(self.repository / model))

    def _write_admin_key(self) -> None:
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.data_dir / "admin-key"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{self.admin_key}\n")


def find_tritonserver() -> tuple[Path, Path]:
    """The program and its folder of backends: TRITONSERVER_DIR, else the checkout's .triton, else PATH."""
    named = os.environ.get("TRITONSERVER_DIR")
    homes = [Path(named)] if named else [CHECKOUT / ".triton" / TRITON_SERVER]
    if not named and (on_path := shutil.which("tritonserver")):
        homes.append(Path(on_path).resolve().parents[1])
    for home in homes:
        program, backends = home / "bin" / "tritonserver", home / "backends"
        if os.access(program, os.X_OK) and backends.is_dir():
            return program, backends
    if named:
        raise LaunchError(f"TRITONSERVER_DIR is {named}, which has no bin/tritonserver and backends/")
    raise LaunchError("no tritonserver found: run ./serve, which installs one, or set TRITONSERVER_DIR")


def http_status(host: str, port: int, path: str) -> int | None:
    """The status of a GET, or None if nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        # Closed on the server's side, too: tritonserver's exit waits for open connections.
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def remove_stale_regions() -> None:
    """Remove shared memory that servers of ours left behind, whose launcher is gone.

    Only those of our own process id namespace: of others we can't know whether they run.
    """
    pattern = re.compile(rf"{_REGION_PREFIX}_(\d+)_(\d+)_(\d+)_")
    for region in guard.SHARED_MEMORY.glob(f"{_REGION_PREFIX}_*"):
        owner = pattern.match(region.name)
        if owner and int(owner[1]) == _pid_namespace() and start_time(int(owner[2])) != int(owner[3]):
            region.unlink(missing_ok=True)


def _region_prefix() -> str:
    # The start time tells this process from a later one with the same id.
    pid = os.getpid()
    return f"{_REGION_PREFIX}_{_pid_namespace()}_{pid}_{start_time(pid)}_{secrets.token_hex(4)}_"


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _ensembles(repository: Path) -> list[str]:
    if not repository.is_dir():
        raise LaunchError(f"there is no model repository {repository}: see --model-repository")
    if not re.fullmatch(r"[!-~]+", str(repository)):
        raise LaunchError(
            f"tritonserver's Python backend takes no path with spaces or beyond ASCII, as {str(repository)!r} is: "
            "move the model repository, or name it by a link (--model-repository)"
        )
    try:
        models = list_ensembles(repository)
        for model in models:
            parameters = read_model_config(repository / model).parameters
            if "pipeline_class" in parameters:
                _check_limits(repository / model, parameters)
    except (OSError, ValueError) as error:
        raise LaunchError(f"not a valid model configuration: {error}") from None
    if not models:
        raise LaunchError(f"{repository} has no ensemble: put a model into it with triton-diffusion add")
    return models


def _check_limits(folder: Path, parameters: Mapping[str, str]) -> None:
    try:
        parse_limits(parameters)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from None


def _may_be_ensemble(folder: Path) -> bool:
    try:
        return read_model_config(folder).is_ensemble
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # Triton will say what is wrong with it


def _environment(device: str) -> dict[str, str]:
    """The environment of tritonserver, and so of its Python stubs."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_ADAPTER_")}
    environment = {**own, "TRITON_DIFFUSION_DEVICE": device}
    # A stub runs the first python3 on PATH, with that environment's packages.
    _prepend(environment, "PATH", Path(sys.executable).parent)
    library = python_library_folder()
    # A system folder is searched anyway, but last: after the CUDA compatibility libraries of a container.
    if library and not library.is_relative_to("/usr/lib"):
        _prepend(environment, "LD_LIBRARY_PATH", library)
    return environment


def _prepend(environment: dict[str, str], name: str, folder: Path) -> None:
    environment[name] = os.pathsep.join(filter(None, [str(folder), environment.get(name)]))
