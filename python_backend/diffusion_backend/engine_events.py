"""What the step engine tells of itself; here it goes nowhere, ``stages.metrics`` tells Triton."""

from __future__ import annotations


class EngineEvents:
    """Called on the engine's outbox thread, in the order in which things happened."""

    def counted(self, running: int, waiting: int) -> None:
        """So many requests are in the engine, and so many of them have had no step yet."""

    def waited(self, seconds: float) -> None:
        """A request had its first step so long after it came."""

    def stepped(self, rows: int, seconds: float) -> None:
        """One forward of so many rows, with all that their pipelines did until the next one."""

    def ended(self, outcome: str) -> None:
        """A request is over: succeeded, failed, cancelled, deadline, or refused."""

    def freed(self, seconds: float) -> None:
        """A request's place is free, so long after it was cancelled."""
