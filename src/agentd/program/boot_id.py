"""The id of the current boot of the host."""

from __future__ import annotations

from pathlib import Path

from agentd.errors import StartRefused

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of this boot (random(4)), different after every reboot.

    Raises:
        StartRefused: it cannot be read; processes of an earlier boot would look alive.
    """
    try:
        text, reason = BOOT_ID.read_text("ascii", "replace").strip(), "is empty"
    except OSError as error:
        text, reason = "", f"cannot be read: {error.strerror}"
    if not text:
        raise StartRefused(f"{BOOT_ID} {reason}; agentd needs /proc/sys to tell boots apart")
    return text
