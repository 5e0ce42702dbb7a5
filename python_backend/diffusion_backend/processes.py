"""Child processes that are stopped whole and never left behind, and the ports they listen on."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from diffusion_backend import guard

_POLL_SECONDS = 0.05


class LaunchError(Exception):
    """Why something could not be started, or why it ended, in words for the operator."""


class ManagedProcess:
    """A child in a process group of its own, with a log file and a guard (see ``guard.py``).

    The group of its own keeps the terminal's Ctrl-C away from it: who started it stops it, in order.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        patience: float,
        regions: str = "",
    ) -> None:
        """``patience``: the seconds it gets to end after SIGTERM. ``regions``: a prefix of /dev/shm names."""
        self.name = name
        self.log = log
        self.patience = patience
        self.regions = regions
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            log.replace(log.with_name(f"{log.name}.1"))
        self._guard = self._start_guard()
        with log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._dismiss_guard()
                raise LaunchError(f"{name} could not be started: {error}") from None
        self._tell_guard(str(self._process.pid))

    @property
    def pid(self) -> int:
        """The process id, which is its group's id as well."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """SIGTERM, then SIGKILL to all that is left after ``patience``, or as soon as ``hurry()`` is true.

        Returns whether it ended in order: with exit code 0, or by that SIGTERM, as long as it is starting.
        """
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + self.patience
            while self.poll() is None and time.monotonic() < deadline and not hurry():
                time.sleep(_POLL_SECONDS)
        guard.kill_group(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            self._process.wait(timeout=1)
        if self.regions:
            guard.remove_regions(self.regions)
        self._dismiss_guard()
        return self.poll() in (0, -signal.SIGTERM)

    def describe_exit(self) -> str:
        """How it ended, for a message."""
        code = self.poll()
        if code is None:
            return "still running"
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def obituary(self) -> str:
        """That it ended by itself, how, and the end of its log."""
        return f"{self.name} ended ({self.describe_exit()}); the end of {self.log}:\n{indent(self.tail())}"

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _start_guard(self) -> subprocess.Popen[str]:
        script = Path(guard.__file__)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), self.regions, str(self.patience)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def _tell_guard(self, word: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # a guard that somebody killed is no reason to fail
            self._guard.stdin.write(f"{word}\n")
            self._guard.stdin.flush()

    def _dismiss_guard(self) -> None:
        assert self._guard.stdin is not None
        if self._guard.stdin.closed:
            return
        self._tell_guard(guard.DONE)
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait()


def indent(text: str) -> str:
    """Text of others inside a message of ours."""
    return "\n".join(f"  {line}" for line in text.splitlines() if line.strip("; "))


def check_port(host: str, port: int, host_option: str, port_option: str) -> None:
    """Raise a LaunchError that names the option if ``port`` of ``host`` can't be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # Servers set it, too: without it a connection closed a moment ago would count as "in use".
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise LaunchError(
            f"{host!r} is not an address of this machine ({error.strerror}): see {host_option}"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} is in use on {host}: stop what listens there, "
                f"or choose another with {port_option}"
            ) from None
        option = port_option if error.errno == errno.EACCES else host_option
        raise LaunchError(
            f"cannot listen on {host} port {port} ({os.strerror(error.errno or 0)}): see {option}"
        ) from None


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback interface that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
