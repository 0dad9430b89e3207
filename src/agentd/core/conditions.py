"""Conditions of a node: what an operator should know, and can mend."""

from __future__ import annotations

import msgspec


class Condition(msgspec.Struct, frozen=True):
    """Something that is missing, refused or unwatched.

    `about` is `device/NAME/ID`, `plugin/NAME`, `runtime/NAME`, `engine/NAME`, `agent/ID`,
    `kernel/ID`, `claim/ID`, `state-dir`, `log` or `host`. `reason` is a sentence for operators that
    names it; `remedy` is what they can do, and may be empty.

    `agents` are those whose things it names where `about` does not tell them: who does not see all
    of them does not see it. If it is empty, only who sees the whole node does.
    """

    about: str
    reason: str
    remedy: str = ""
    agents: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.remedy})" if self.remedy else self.reason


class ActiveCondition(msgspec.Struct, frozen=True):
    """A condition that holds, and since when (epoch seconds).

    `owners` are the agents whose thing its subject was then; None for a subject of the node.
    """

    condition: Condition
    since: float
    owners: tuple[str, ...] | None
