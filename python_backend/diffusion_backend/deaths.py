"""How often a part has died of late, and so how long to wait before it is started again."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 600.0
BACK_OFF_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Deaths:
    """The deaths of one part."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def note(self, now: float) -> int:
        """Note a death; how many there were within ``WINDOW_SECONDS``, this one among them."""
        while self._times and now - self._times[0] > WINDOW_SECONDS:
            self._times.popleft()
        self._times.append(now)
        return len(self._times)


def back_off(deaths: int) -> float:
    """The seconds to wait after so many."""
    return BACK_OFF_SECONDS[min(deaths, len(BACK_OFF_SECONDS)) - 1]
