"""Conditions of a node: what an operator should know, and can mend."""

from __future__ import annotations

import msgspec


class Condition(msgspec.Struct, frozen=True):
    """Something that is missing, refused or unwatched.

    `about` is `device/NAME/ID`, `plugin/NAME`, `runtime/NAME`, `engine/NAME`, `agent/ID`,
    `kernel/ID`, `claim/ID`, `state-dir`, `log` or `host`. `reason` is a sentence for operators that
    names it; `remedy` is what they can do, and may be empty.
    """

    about: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.remedy})" if self.remedy else self.reason


class ActiveCondition(msgspec.Struct, frozen=True):
    """A condition that holds, and since when (epoch seconds)."""

    condition: Condition
    since: float
