"""A small file from the launcher to the adapter: what is being healed, and how often what was started again.

The launcher knows of a dead process at once; the adapter has the routes that tell others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TRITON = "tritonserver"  # as a part; the others are models, and the adapter


@dataclass(frozen=True)
class HealingReport:
    """``ailing``: the parts that do not work now, each with the reason. ``restarts``: by part and reason."""

    ailing: Mapping[str, str] = field(default_factory=dict)
    restarts: Mapping[tuple[str, str], int] = field(default_factory=dict)


def read_report(path: Path) -> HealingReport:
    """What the file says; nothing where there is none, or none that can be read."""
    try:
        fields = json.loads(path.read_text())
        restarts = {(entry["part"], entry["reason"]): entry["count"] for entry in fields["restarts"]}
        return HealingReport(dict(fields["ailing"]), restarts)
    except (OSError, ValueError, KeyError, TypeError):
        return HealingReport()


class ReportFile:
    """The launcher's end of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restarts: Counter[tuple[str, str]] = Counter()
        self._ailing: dict[str, str] = {}
        self._is_true = False

    def count(self, part: str, reason: str) -> None:
        """``part`` is started again because of ``reason``."""
        self._restarts[part, reason] += 1
        self.write()

    def set_ailing(self, ailing: dict[str, str]) -> None:
        """Which parts do not work now."""
        if ailing != self._ailing or not self._is_true:
            self._ailing = ailing
            self.write()

    def write(self) -> None:
        """Bring the file up to date. Where that fails (a full disk, say) ``set_ailing`` tries again."""
        restarts = [
            {"part": part, "reason": reason, "count": count}
            for (part, reason), count in sorted(self._restarts.items())
        ]
        new = self.path.with_suffix(".new")
        try:
            new.write_text(json.dumps({"ailing": self._ailing, "restarts": restarts}))
            new.replace(self.path)  # whole, for whoever reads it just now
        except OSError:
            self._is_true = False
        else:
            self._is_true = True

    def remove(self) -> None:
        """There is nobody any more who would keep it true."""
        self.path.unlink(missing_ok=True)
