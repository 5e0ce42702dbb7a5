"""A TCP connection that a test can cut, for a Triton that the test itself cannot stop."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class TcpLink:
    """Forwards connections from a port of its own to ``target`` (host:port), until it is cut or stalled."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._stalled = threading.Event()
        self._listener = self._listen(0)
        self.address = "{}:{}".format(*self._listener.getsockname())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        for end in (self._listener, *self._ends):
            # close() alone neither wakes a thread that waits in accept() or recv() nor ends the connection.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def mend(self) -> None:
        """Listen again, on the same port."""
        self._listener = self._listen(int(self.address.rpartition(":")[2]))

    def stall(self) -> None:
        """From now on take everything and pass nothing on."""
        self._stalled.set()

    def _listen(self, port: int) -> socket.socket:
        self._ends: list[socket.socket] = []
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not self._stalled.is_set():
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass
