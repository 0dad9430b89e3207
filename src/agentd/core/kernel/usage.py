"""The usage of a kernel, counted by its cgroup."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """The usage of one kernel; None means unknown, never 0.

    Processor seconds and bytes are totals since its creation; `memory_bytes` and `processes` are
    current. Memory is the amount charged to its limit, including its page cache.
    """

    cpu_seconds: float | None = None
    cpu_throttled_seconds: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    processes: int | None = None
    network_rx_bytes: int | None = None
    network_tx_bytes: int | None = None


UNKNOWN_USAGE = Usage()


class UsageReading(msgspec.Struct, frozen=True):
    """The usage of a kernel, and its cgroups: hierarchy and path as in `/proc/PID/cgroup`."""

    usage: Usage = UNKNOWN_USAGE
    groups: frozenset[str] = frozenset()
