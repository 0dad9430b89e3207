"""What a kernel uses: figures that its cgroup counts."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """What one kernel has used and uses; None is not known, and never stands for 0.

    Seconds of processor time and bytes since it was created, but for `memory_bytes` and
    `processes`, which are now. Memory is what counts against its limit, the cache of its files
    too.
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


UNKNOWN = Usage()


class UsageReading(NamedTuple):
    """What a kernel uses, and its cgroups: hierarchy and path, as `/proc/PID/cgroup` has them."""

    usage: Usage = UNKNOWN
    groups: frozenset[str] = frozenset()
