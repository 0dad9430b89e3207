"""Roles, rights and visibility of callers.

A thing that a caller cannot see does not exist for it. A thing that it can see but must not change
is refused, with the roles that may.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Self

import msgspec

from agentd.core.names import is_name
from agentd.errors import Forbidden

ENGINE_PREFIXES = ("slurm-", "k8s-")
"""Beginnings of the ids that engines give to kernels and claims. An engine derives them from ids of
its own, so that others could take them in advance."""


class Right(StrEnum):
    """The right that a call requires."""

    LOOK = "look"
    OUTPUT = "output"
    """Reading a kernel's output, and exec."""
    KERNELS = "kernels"
    """Creating, stopping and removing kernels."""
    NODE = "node"
    """Changing devices, plugins and runtimes."""


class Role(StrEnum):
    """The role of a token or a socket."""

    ADMIN = "admin"
    AGENT = "agent"
    READ = "read"


RIGHTS = {
    Role.ADMIN: frozenset(Right),
    Role.AGENT: frozenset({Right.LOOK, Right.OUTPUT, Right.KERNELS}),
    Role.READ: frozenset({Right.LOOK}),
}


class Caller(msgspec.Struct, frozen=True):
    """A caller: the name, role and agents of its token or socket.

    `agents` None means the whole node; `uid` is that of the far end of a unix socket; `via` is the
    gateway that acts for this caller, if any.
    """

    name: str
    role: Role
    agents: frozenset[str] | None = None
    uid: int | None = None
    via: str = ""

    @classmethod
    def from_text(cls, text: str, via: Caller) -> Self:
        """Parse the caller that a gateway acts for; inverse of `to_text`.

        Raises:
            ValueError: the text is malformed, or no token could have this caller.
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
            raise ValueError(f"role {role.value} does not match these agents")
        agent_ids = None if agents is None else frozenset(agents)
        return cls(name, role, agent_ids, via.uid, via.name)

    def to_text(self) -> str:
        """Encode the caller for a node, as one line of ASCII."""
        agents = None if self.agents is None else sorted(self.agents)
        return json.dumps({"name": self.name, "role": self.role.value, "agents": agents})

    def sees(self, agent_id: str) -> bool:
        """Return whether this caller sees an agent and its kernels."""
        return self.agents is None or agent_id in self.agents

    def has_right(self, right: Right) -> bool:
        """Return whether this caller's role has a right."""
        return right in RIGHTS[self.role]


def require_unreserved_id(caller: Caller, new_id: str | None) -> None:
    """Refuse an id of a new kernel or claim that only engines, which are admins, may choose.

    Raises:
        Forbidden: it begins with a prefix of engines, and the caller is not an admin.
    """
    if new_id and new_id.startswith(ENGINE_PREFIXES):
        require_admin(caller, f"create ids that begin with {new_id.partition('-')[0]}-")


def require_admin(caller: Caller, right: str) -> None:
    """Refuse a caller that is not an admin.

    Raises:
        Forbidden: it is not.
    """
    if caller.role is not Role.ADMIN:
        raise Forbidden(caller.name, caller.role.value, right, [Role.ADMIN.value])


def roles_with(right: Right) -> list[str]:
    """Return the roles with a right."""
    return [role.value for role in Role if right in RIGHTS[role]]
