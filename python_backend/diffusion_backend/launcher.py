"""``triton-diffusion serve``: tritonserver and the OpenAI adapter, started, watched and stopped together."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import ipaddress
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from diffusion_backend.healing import Healer
from diffusion_backend.healing_report import ReportFile
from diffusion_backend.processes import LaunchError, ManagedProcess, check_port
from diffusion_backend.tritonserver import (
    CHECKOUT,
    LOOPBACK,
    LOST_REQUESTS_PATIENCE_SECONDS,
    TritonPorts,
    TritonServer,
    http_status,
)

ADAPTER_PATIENCE_SECONDS = 60  # more than the adapter takes: see docs/operations.md, "Stopping"
_STILL_WAITING_SECONDS = 60
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class ServeOptions:
    """What to serve, and where."""

    repository: Path
    data_dir: Path
    host: str
    port: int
    triton_ports: TritonPorts
    device: str = "auto"
    exit_timeout: int = 60

    def check_device(self) -> None:
        """Raise a LaunchError if a GPU is demanded and there is none."""
        if self.device == "cuda":
            import torch  # only here: it takes a second

            if not torch.cuda.is_available():
                raise LaunchError("--device is cuda, but torch finds no CUDA device; allowed here: auto, cpu")

    def check_ports(self) -> None:
        """Raise a LaunchError if one of the ports is taken, or asked for twice."""
        ports = {
            "--port": (self.host, self.port),
            "--http-port": (LOOPBACK, self.triton_ports.http),
            "--grpc-port": (LOOPBACK, self.triton_ports.grpc),
            "--metrics-port": (LOOPBACK, self.triton_ports.metrics),
        }
        owners: dict[int, str] = {}
        for option, (host, port) in ports.items():
            if port in owners:
                raise LaunchError(f"{owners[port]} and {option} are both {port}: give each a port of its own")
            owners[port] = option
            check_port(host, port, host_option="--host", port_option=option)


class Adapter:
    """The OpenAI adapter beside a tritonserver."""

    def __init__(self, triton: TritonServer, report: ReportFile, *, host: str, port: int) -> None:
        self.triton = triton
        self.report = report
        self.host = host
        self.port = port
        self._process: ManagedProcess | None = None

    @property
    def url(self) -> str:
        """Where clients on this machine reach it."""
        host = self._connect_host()
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def log(self) -> Path:
        return self.triton.data_dir / "logs" / "adapter.log"

    @property
    def process(self) -> ManagedProcess:
        """The running adapter."""
        if self._process is None:
            raise LaunchError("the adapter was not started")
        return self._process

    def start(self) -> None:
        """Start it; tritonserver need not be ready."""
        self._process = ManagedProcess(
            "the adapter",
            [
                *(sys.executable, "-P", "-m", "openai_adapter"),
                f"--host={self.host}",
                f"--port={self.port}",
                f"--triton-url={self.triton.grpc_url}",
                f"--data-dir={self.triton.data_dir}",
                f"--healing-report={self.report.path}",
            ],
            log=self.log,
            environment={**os.environ, "OPENAI_ADAPTER_TRITON_ADMIN_KEY": self.triton.admin_key},
            patience=ADAPTER_PATIENCE_SECONDS,
        )

    def is_ready(self) -> bool:
        """Whether it answers, and tritonserver with it."""
        return http_status(self._connect_host(), self.port, "/health") == 200

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Stop it; returns whether it ended in order. Without a start: nothing to do."""
        return self._process is None or self._process.stop(hurry)

    def _connect_host(self) -> str:
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(self.host)
            if address.is_unspecified:
                return LOOPBACK if address.version == 4 else "::1"
        return self.host


class Server:
    """The whole: a tritonserver and an adapter.

    with Server(options) as server:
        ...  # it is ready: server.adapter.url
    """

    def __init__(self, options: ServeOptions) -> None:
        self.triton = TritonServer(
            options.repository,
            data_dir=options.data_dir,
            ports=options.triton_ports,
            device=options.device,
            exit_timeout=options.exit_timeout,
        )
        self.report = ReportFile(self.triton.data_dir / "healing.json")
        self.adapter = Adapter(self.triton, self.report, host=options.host, port=options.port)

    def start(self) -> None:
        """Start both; neither is ready yet."""
        self.triton.start()
        self.report.write()
        try:
            self.adapter.start()
        except LaunchError:
            self.triton.stop()
            raise

    def is_ready(self) -> bool:
        """Whether requests are answered.

        Raises:
            LaunchError: one of the two has ended, with the reason.
        """
        self.check()
        return self.triton.is_ready() and self.adapter.is_ready()

    def wait_ready(self, timeout: float) -> None:
        """Wait until requests are answered; raise a LaunchError if that fails or takes too long."""
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"not ready after {timeout:g} s; the logs end:\n"
                    f"{self.triton.process.tail()}\n{self.adapter.process.tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise a LaunchError with the reason if one of the two has ended."""
        adapter = self.adapter.process
        if self.triton.process.poll() is not None:
            raise LaunchError(self.triton.failure())
        if adapter.poll() is not None:
            raise LaunchError(adapter.obituary())

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Stop both; returns whether they ended in order. ``hurry()`` is asked whether to kill instead."""
        # The adapter first: tritonserver's exit waits for open HTTP connections and for requests.
        adapter = self.adapter.stop(hurry)
        self.report.remove()
        return self.triton.stop(hurry) and adapter

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready(timeout=600)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def default_repository() -> Path:
    """The checkout's model repository; without a checkout, that of the current folder."""
    repository = CHECKOUT / "model_repository"
    return repository if repository.is_dir() else Path("model_repository")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``triton-diffusion serve``."""
    parser.description = "Run tritonserver and the OpenAI adapter until Ctrl-C."
    parser.add_argument("--host", default=LOOPBACK, help="the adapter's address (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=9000, help="the adapter's port (default: %(default)s)")
    for name, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(
            f"--{name}-port",
            type=_port,
            default=default,
            help=f"Triton's {name} port, on {LOOPBACK} (default: %(default)s)",
        )
    parser.add_argument(
        "--model-repository",
        type=Path,
        default=default_repository(),
        help="the models: every ensemble in this folder is served (default: %(default)s)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="folder for generated files and logs (default: .data beside the model repository)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where models run; auto: on the GPU if there is one (default: %(default)s)",
    )


def serve(args: argparse.Namespace) -> int:
    """Serve until a signal says stop, or a part cannot be kept alive; returns the exit code."""
    repository: Path = args.model_repository
    options = ServeOptions(
        repository=repository,
        data_dir=args.data_dir or repository.resolve().parent / ".data",
        host=args.host,
        port=args.port,
        triton_ports=TritonPorts(http=args.http_port, grpc=args.grpc_port, metrics=args.metrics_port),
        device=args.device,
    )
    try:
        options.check_device()
        options.check_ports()
        with _lock(options.data_dir), _StopSignals() as signals:
            return _run(Server(options), signals)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


class _StopSignals:
    """Counts the signals that ask to stop."""

    def __init__(self) -> None:
        self.count = 0
        self._arrived = threading.Event()
        self._before: dict[int, Any] = {}

    def wait(self, seconds: float) -> bool:
        """Wait for the first signal, at most so long; returns whether it has come."""
        return self._arrived.wait(seconds)

    def hurry(self) -> bool:
        """Whether a second one came."""
        return self.count > 1

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self._arrived.set()


def _run(server: Server, signals: _StopSignals) -> int:
    server.triton.require_shared_memory()
    started = time.monotonic()
    _say(f"starting tritonserver with {', '.join(server.triton.models)} (log: {server.triton.log})")
    healer = Healer(server, _say, signals.hurry)
    server.start()
    orderly = False
    try:
        if _wait_until_ready(server, healer, signals):
            _announce(server, time.monotonic() - started)
            while not signals.wait(_POLL_SECONDS):
                healer.tick()
        _say("stopping: running requests may end first; Ctrl-C again kills")
    finally:
        healer.close()
        orderly = server.stop(signals.hurry)
    if not orderly:
        _say("stopped, but not in order: something had to be killed, or requests were still running")
    if server.triton.was_cut_short:
        _say(
            f"tritonserver was killed {LOST_REQUESTS_PATIENCE_SECONDS:g} s after it was told to stop: a stage's "
            "process had died, and Triton waits for the requests that were lost with it; those that still ran "
            "were cut off"
        )
    return 0 if orderly else 1


def _wait_until_ready(server: Server, healer: Healer, signals: _StopSignals) -> bool:
    remind = time.monotonic() + _STILL_WAITING_SECONDS
    loaded = False
    while not server.is_ready():
        if signals.wait(_POLL_SECONDS):
            return False
        loaded = loaded or server.triton.is_ready()
        if loaded:  # a stage that dies now would keep the adapter from ever being ready
            healer.tend_models()
        if time.monotonic() > remind:
            late = server.adapter if server.triton.is_ready() else server.triton
            _say(f"still waiting; see {late.log}")
            remind += _STILL_WAITING_SECONDS
    return True


def _announce(server: Server, seconds: float) -> None:
    url = server.adapter.url
    models = server.triton.pipelines()
    keys = " (with one of your keys in OPENAI_API_KEY)" if os.environ.get("OPENAI_ADAPTER_API_KEYS") else ""
    hint = f" Try{keys}:\n\n{curl_line(url, models[0])}\n" if models else ""
    _say(
        f"ready after {seconds:.0f} s: {url}/v1 serves {', '.join(models) or 'no model'}\nCtrl-C stops it.{hint}"
    )


def curl_line(url: str, model: str) -> str:
    """A command that can be pasted into a shell and writes ``fox.png``."""
    keys = os.environ.get("OPENAI_ADAPTER_API_KEYS")
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if keys else ""
    body = shlex.quote(json.dumps({"model": model, "prompt": "a fox on a blue background"}))
    return (
        f"curl -s {url}/v1/images/generations -H 'Content-Type: application/json'{key} -d {body} \\\n"
        r"""  | sed -n 's/.*"b64_json": *"\([^"]*\)".*/\1/p' | base64 -d > fox.png"""
    )


@contextmanager
def _lock(data_dir: Path) -> Iterator[None]:
    """Two servers in one data folder would overwrite each other's logs and key."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise LaunchError(f"cannot use {data_dir} ({error.strerror}): see --data-dir") from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"{data_dir} is in use by another server: see --data-dir") from None
        yield
    finally:
        os.close(folder)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _say(text: str) -> None:
    print(text, flush=True)
