"""Misbehaviour on request, to test the containment of plugins.

fault = "hang"           raise, absent, hang, exit, crash, flood
fault-at = "list"        import, open, list, clear, partition, edits, measure, close
fault-after = 2          this many of these calls succeed first
fault-until = "/x"       there is no fault once this file exists
lie = "negative"         twice, odd-id, negative, nan, huge, prefix, other-api, unequal

`import` acts while the table is validated, the first moment at which settings are known.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentd.plugin_api import DeviceInfo, NotPresent, SettingProblem

FAULTS = ("raise", "absent", "hang", "exit", "crash", "flood")
FAULT_POINTS = ("import", "open", "list", "clear", "partition", "edits", "measure", "close")
LIES = ("twice", "odd-id", "negative", "nan", "huge", "prefix", "other-api", "unequal")
KEYS = ("fault", "fault-at", "fault-after", "fault-until", "lie")
_FLOOD_LINES = 200_000


def problems(settings: Mapping[str, Any]) -> list[SettingProblem]:
    """Return the problems of this module's keys."""
    setting_problems = []
    for key, allowed in (("fault", FAULTS), ("fault-at", FAULT_POINTS), ("lie", LIES)):
        if key in settings and settings[key] not in allowed:
            reason = f"invalid value {settings[key]!r}: expected {', '.join(allowed)}"
            setting_problems.append(SettingProblem(key, reason))
    if ("fault" in settings) != ("fault-at" in settings):
        setting_problems.append(SettingProblem("fault", "fault and fault-at must be set together"))
    if not isinstance(settings.get("fault-until", ""), str):
        setting_problems.append(SettingProblem("fault-until", "expected the path of a file"))
    after = settings.get("fault-after", 0)
    if not isinstance(after, int) or isinstance(after, bool) or after < 0:
        setting_problems.append(
            SettingProblem("fault-after", f"invalid number of calls {after!r}: expected 0 or more")
        )
    return setting_problems


class Faults:
    """Counts calls, and performs the configured fault at the right one."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._fault = settings.get("fault")
        self._point = settings.get("fault-at")
        self._after = settings.get("fault-after", 0)
        self._until = settings.get("fault-until")
        self._calls: Counter[str] = Counter()

    def trigger(self, point: str) -> None:
        """Misbehave if this is the configured place."""
        self._calls[point] += 1
        if point != self._point or self._calls[point] <= self._after:
            return
        if self._until and Path(self._until).exists():
            return
        if self._fault == "absent":
            raise NotPresent("the simulated bus has no such device")
        if self._fault == "raise":
            raise RuntimeError(f"the simulated driver fails at {point}")
        if self._fault == "hang":
            while True:
                time.sleep(3600)
        if self._fault == "exit":
            os._exit(3)
        if self._fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        sys.stdout.write("the simulated driver has much to say\n" * _FLOOD_LINES)
        sys.stdout.flush()


def apply_lie(lie: str | None, devices: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """Return a listing with the configured lie."""
    if lie == "twice":
        return [*devices, *devices[:1]]
    changes: dict[str | None, dict[str, Any]] = {
        "odd-id": {"id": "no id/at all"},
        "negative": {"capacity": "-1"},
        "nan": {"capacity": "NaN"},
        "huge": {"capacity": "9" * 400},
    }
    return [replace(device, **changes.get(lie, {})) for device in devices]
