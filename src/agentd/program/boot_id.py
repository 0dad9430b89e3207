"""The id of the current boot of the host."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Return the id of this boot (random(4)), different after every reboot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii", "replace").strip()
