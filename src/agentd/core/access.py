"""Who may do what: roles, the rights of each, and what a caller can see at all.

What a caller cannot see is for it as if it were not there; what it can see and may not do is
refused with the roles that may.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Self

import msgspec

from agentd.core.names import is_name


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


class Caller(msgspec.Struct, frozen=True):
    """Who calls: the name of its token or socket, and what that was given out for.

    `agents` None means all of the node; `uid` is the peer's on a unix socket; `via` is the gateway
    that acts for this caller, if one does.
    """

    name: str
    role: Role
    agents: frozenset[str] | None = None
    uid: int | None = None
    via: str = ""

    @classmethod
    def named_in(cls, text: str, via: Caller) -> Self:
        """Read the caller that a gateway acts for; inverse of `to_text`.

        Raises:
            ValueError: it names none, or one that no token could be for.
        """
        try:
            content = json.loads(text)
            name, role, agents = content["name"], Role(content["role"]), content.get("agents")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError('expected {"name": …, "role": …, "agents": […] or null}') from None
        if not is_name(name):
            raise ValueError("expected a name of letters, digits, _ . and - (at most 63)")
        if agents is not None and not (
            isinstance(agents, list) and agents and all(isinstance(item, str) for item in agents)
        ):
            raise ValueError("expected agents as a list of names, or null for all")
        if (role is Role.AGENT and agents is None) or (role is Role.ADMIN and agents is not None):
            raise ValueError(f"the role {role.value} does not go with these agents")
        mine = None if agents is None else frozenset(agents)
        return cls(name, role, mine, via.uid, via.name)

    def to_text(self) -> str:
        """Return the caller as a gateway names it to a node: one line of ASCII."""
        agents = None if self.agents is None else sorted(self.agents)
        return json.dumps({"name": self.name, "role": self.role.value, "agents": agents})

    def sees(self, agent_id: str) -> bool:
        """Tell whether an agent, and its kernels, are there for this caller."""
        return self.agents is None or agent_id in self.agents

    def may(self, right: Right) -> bool:
        """Tell whether this caller may do that to what it sees."""
        return right in RIGHTS[self.role]


def roles_with(right: Right) -> list[str]:
    """Return the roles that may do something."""
    return [role.value for role in Role if right in RIGHTS[role]]
