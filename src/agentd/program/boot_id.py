"""The id of the current boot of the host."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from agentd.errors import StartRefused

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of this boot (random(4)), different after every reboot.

    Raises:
        StartRefused: it cannot be read; processes of an earlier boot would look alive.
    """
    with suppress(OSError):
        if text := BOOT_ID.read_text("ascii", "replace").strip():
            return text
    raise StartRefused(f"{BOOT_ID} is hidden or empty; without it, boots cannot be told apart")
