"""[[rpc.tokens]] and [[rpc.sockets]]: who may call, and as what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from agentd.core.access import Caller, Role
from agentd.tomlfile.section import MAX_SOCKET_PATH, Name, Section


class _Entry(Section):
    """What tokens and sockets have in common."""

    role: Role = Field(description='"admin", "agent" or "read".')
    agents: Annotated[tuple[Name, ...], Field(max_length=1024)] = Field(
        default=(), description="Whose agents: needed for agent, narrows read."
    )

    @model_validator(mode="after")
    def _fits(self) -> _Entry:
        if self.role is Role.AGENT and not self.agents:
            raise ValueError('role "agent" needs agents = ["…"]: those that it is for')
        if self.role is Role.ADMIN and self.agents:
            raise ValueError('role "admin" is for all agents; leave agents out')
        return self

    def to_caller(self, name: str) -> Caller:
        """Return whom this lets in."""
        return Caller(name, self.role, frozenset(self.agents) or None)


class TokenSettings(_Entry):
    """[[rpc.tokens]]: one bearer token for TCP."""

    name: Name = Field(description="Shown in the log, in events and on kernels.")
    file: Path = Field(description="One line; mode 0600 or 0640.")
    gateway: bool = Field(
        default=False,
        description="For a gateway of the fleet: may act for callers that it names; admin only.",
    )

    @model_validator(mode="after")
    def _trusted(self) -> TokenSettings:
        if self.gateway and self.role is not Role.ADMIN:
            raise ValueError('gateway = true needs role = "admin": it can name any caller')
        return self


class SocketSettings(_Entry):
    """[[rpc.sockets]]: a further unix socket; the main one is an admin's."""

    name: Name | None = Field(default=None, description="Default: the file's, without suffix.")
    path: Path = Field(description="Where it is made, mode 0660.")
    group: str | None = Field(default=None, description="Who may connect.")

    @field_validator("path")
    @classmethod
    def _short_enough(cls, value: Path) -> Path:
        return short_enough(value)

    @property
    def caller_name(self) -> str:
        """What its callers are called."""
        return self.name or self.path.stem


def short_enough(path: Path) -> Path:
    """Refuse a socket's path that Linux cannot bind."""
    if path == Path():
        raise ValueError('is empty; expected a path such as "/run/agentd/agentd.sock"')
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        raise ValueError(f"longer than {MAX_SOCKET_PATH} bytes, the limit for a socket path")
    return path
