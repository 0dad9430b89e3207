"""Three ways in which a call to the Docker Engine fails.

EngineError         it was asked, and refused or failed: a status and a message
EngineUnreachable   it was not asked: there was no connection
EngineAnswerLost          it was asked, and its answer was lost or is not one of the Engine API
"""

from __future__ import annotations

import re

MOST_DETAIL, MOST_MESSAGE = 16 << 10, 1000
"""Characters of an error message that are understood, and that are passed on."""
_STORAGE = re.compile(
    r"(?<![^\s\"':=(])[^\s\"':=(]*/(?:[0-9a-f]{64}|l/[A-Z0-9]{26})"
    r"(?:-init)?(?:/merged|/rootfs|/diff)?"
)
"""Where an engine keeps a container or a layer: nothing that a caller may know."""


class EngineError(Exception):
    """The engine refused or failed, and said so; the `message` is for callers."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.detail = _STORAGE.sub("", text[:MOST_DETAIL])
        self.message = shortly(self.detail)
        super().__init__(self.message)


class EngineUnreachable(Exception):
    """No connection could be made, so the engine knows of nothing."""


class EngineAnswerLost(Exception):
    """The engine may have acted, and did not say so."""


def shortly(text: str) -> str:
    """Return a message, cut where it is long."""
    return text if len(text) <= MOST_MESSAGE else f"{text[:MOST_MESSAGE]}..."


def presentable(text: str) -> str:
    """Return what an engine says, without the paths of its storage and cut where it is long."""
    return shortly(_STORAGE.sub("", text[:MOST_DETAIL]))
