"""Is the first request after ready as fast as the tenth? Fresh starts of the real server, ten requests each.

Single latencies are noisy, so the first request is held against the median of requests 2 to 10 as well.
"""

from __future__ import annotations

import statistics
import sys
import time

import httpx
import measure

REQUESTS = 10
POLL_SECONDS = 0.1


def measure_start() -> tuple[float, list[float]]:
    """Start a server: the seconds until ``/health`` is 200, and the milliseconds of the requests after it."""
    started = time.perf_counter()
    with measure.unstarted_server() as server, httpx.Client(timeout=120) as client:
        url = server.adapter.url
        # The client asks for /health on the connection that it then uses, as a client that waits would.
        while not _is_healthy(client, url):
            server.check()
            if time.perf_counter() - started > measure.START_SECONDS:
                sys.exit(f"error: not ready after {measure.START_SECONDS} s\n{server.triton.process.tail()}")
            time.sleep(POLL_SECONDS)
        startup = time.perf_counter() - started
        latencies = []
        for seed in range(REQUESTS):
            sent = time.perf_counter()
            client.post(f"{url}/v1/images/generations", json=measure.request_body(seed)).raise_for_status()
            latencies.append((time.perf_counter() - sent) * 1000)
    return startup, latencies


def _is_healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    """Measure and report."""
    options = measure.parse_options("The first request after ready against the tenth, over fresh starts.")
    columns: dict[str, list[float]] = {}
    for _ in range(2 if options.quick else 5):
        startup, latencies = measure_start()
        rest = statistics.median(latencies[1:])
        values = {
            "startup_seconds": startup,
            "first_ms": latencies[0],
            "tenth_ms": latencies[-1],
            "rest_ms": rest,
            "first_over_tenth": latencies[0] / latencies[-1],
            "first_over_rest": latencies[0] / rest,
        }
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    figures = {name: statistics.median(values) for name, values in columns.items()}
    starts = len(columns["first_ms"])
    rows: list[list[str | float]] = [
        [f"start {number + 1}", *(values[number] for values in columns.values())] for number in range(starts)
    ]
    measure.report(
        f"{measure.MODEL}: ten requests, one at a time, after each of {starts} starts (rest: median of 2 to 10)",
        ["", "start-up s", "first ms", "tenth ms", "rest ms", "first/tenth", "first/rest"],
        [*rows, ["median", *figures.values()]],
    )
    measure.write_json(options.json, {"starts": starts, **figures})


if __name__ == "__main__":
    main()
