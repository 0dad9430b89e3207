"""The three ways in which a call to the Docker Engine fails.

DockerError         the engine refused or failed: a status and a message
DockerUnreachable   the engine was not called: there was no connection
DockerResponseLost  the engine was called, and its response was lost or is malformed
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_DETAIL_BYTES, MAX_MESSAGE = 16 << 10, 1000
"""Characters of an error message that are searched, and that are passed on."""
_STORAGE_PATH = re.compile(
    r"(?<![^\s\"':=(])[^\s\"':=(]*/(?:"
    r"(?:[0-9a-f]{64}|l/[A-Z0-9]{26})(?:-init)?(?:/merged|/rootfs|/diff)?"
    r"|(?:io\.containerd\.|tmpmounts/|network/files/|docker/(?:image|containers|network|tmp)/)"
    r"[^\s\"':,)]*)"
)
"""Paths of the engine's storage, which no caller may learn."""
_ANY_PATH = re.compile(r"(?<![^\s\"'(=])/[^\s\"':,)]+")


class DockerError(Exception):
    """The engine returned an error; `message` is safe to show to clients."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.detail = _STORAGE_PATH.sub("", text[:MAX_DETAIL_BYTES])
        self.message = truncate_message(self.detail)
        super().__init__(self.message)


class DockerUnreachable(Exception):
    """No connection could be made, so the engine did nothing."""


class DockerResponseLost(Exception):
    """The engine may have acted, but its response is missing."""


def truncate_message(text: str) -> str:
    """Cut a long message."""
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def clean_message(text: str) -> str:
    """Return an engine's message without storage paths, cut if it is long."""
    return truncate_message(_STORAGE_PATH.sub("", text[:MAX_DETAIL_BYTES]))


def hide_paths(text: str, kept: Sequence[str] = ()) -> str:
    """Return a message without any path but those in or below `kept`, cut if it is long."""

    def shown(found: re.Match[str]) -> str:
        return found[0] if any(f"{found[0]}/".startswith(f"{k}/") for k in kept) else "[path]"

    return truncate_message(_ANY_PATH.sub(shown, text[:MAX_DETAIL_BYTES]))
