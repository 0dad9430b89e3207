"""Times and durations as people write them."""

from __future__ import annotations

import re
from datetime import datetime

TIME_EXPECTED = "expected 2026-11-21T12:00:00Z, or seconds since 1970"
_TIME = re.compile(
    r"([0-9]{1,12}|[0-9-]{10}T[0-9:]{8})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?"
)
_DURATION = re.compile(
    r"(?:([0-9]{1,4})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)s)?"
)
_UNITS_S = (86400, 3600, 60, 1)


def parse_time_ns(text: str) -> int:
    """Return a time in nanoseconds since the epoch, the resolution of container engines.

    Raises:
        ValueError: the text is not a time.
    """
    day_or_seconds, fraction, zone = (
        match.groups("") if (match := _TIME.fullmatch(text)) else ("", "", "")
    )
    try:
        if "T" in day_or_seconds:
            moment = datetime.fromisoformat(day_or_seconds + (zone or "Z"))
            seconds = int(moment.timestamp())
        else:
            seconds = int(day_or_seconds)
        if not zone or "T" in day_or_seconds:
            return seconds * 10**9 + int(fraction.ljust(9, "0"))
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"invalid time {text!r}: {TIME_EXPECTED}")


def parse_duration_s(text: str) -> float:
    """Return the seconds of a duration such as 1h30m; each number has its unit.

    Raises:
        ValueError: the text is not a duration.
    """
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError(f"invalid duration {text!r}: expected a duration such as 90s or 1h30m")
    return sum(
        unit_s * float(part) for unit_s, part in zip(_UNITS_S, match.groups("0"), strict=True)
    )
