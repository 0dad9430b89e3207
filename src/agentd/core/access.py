"""Who may do what: roles, the rights of each, and what a caller can see at all.

What a caller cannot see is for it as if it were not there; what it can see and may not do is
refused with the roles that may.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Right(StrEnum):
    """What a call does; every route needs one."""

    LOOK = "look"
    OUTPUT = "output"
    """Reading what a kernel printed, and running something inside it."""
    KERNELS = "kernels"
    """Creating, stopping and removing kernels."""
    NODE = "node"
    """Changing devices, plugins and runtimes."""


class Role(StrEnum):
    """What a token or a socket is given out for."""

    ADMIN = "admin"
    AGENT = "agent"
    READ = "read"


RIGHTS = {
    Role.ADMIN: frozenset(Right),
    Role.AGENT: frozenset({Right.LOOK, Right.OUTPUT, Right.KERNELS}),
    Role.READ: frozenset({Right.LOOK}),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the name of its token or socket, and what that was given out for.

    `agents` None means all of the node; `uid` is the peer's on a unix socket.
    """

    name: str
    role: Role
    agents: frozenset[str] | None = None
    uid: int | None = None

    def sees(self, agent_id: str) -> bool:
        """Tell whether an agent, and its kernels, are there for this caller."""
        return self.agents is None or agent_id in self.agents

    def may(self, right: Right) -> bool:
        """Tell whether this caller may do that to what it sees."""
        return right in RIGHTS[self.role]


def roles_with(right: Right) -> list[str]:
    """Return the roles that may do something."""
    return [role.value for role in Role if right in RIGHTS[role]]
