"""[[rpc.tokens]] and [[rpc.sockets]]: who may call, and as what."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator, model_validator

from agentd.core.access import Caller, Role
from agentd.core.names import is_name, repeated
from agentd.tomlfile.section import (
    MAX_SOCKET_PATH,
    Name,
    Section,
    refuse_bool,
)


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


class RpcSettings(Section):
    """[rpc]: where the daemon answers."""

    socket: Path = Field(
        default=Path("/run/agentd/agentd.sock"), description="Unix socket, mode 0660."
    )
    socket_group: str | None = Field(
        default=None, description="Group of the socket. Default: the daemon's own."
    )
    listen: str | None = Field(
        default=None,
        description="Optional TCP address; needs token-file, beyond loopback TLS too.",
    )
    token_file: Path | None = Field(
        default=None, description="File with an admin's bearer token for TCP; mode 0600 or 0640."
    )
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain for TCP.")
    tls_key: Path | None = Field(default=None, description="PEM private key for TCP.")
    max_connections: Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=65536)] = Field(
        default=1024, description="The most TCP connections; never over half of all descriptors."
    )
    tokens: tuple[TokenSettings, ...] = ()
    sockets: tuple[SocketSettings, ...] = ()

    @field_validator("socket")
    @classmethod
    def _short_enough(cls, value: Path) -> Path:
        return short_enough(value)

    @model_validator(mode="after")
    def _distinct(self) -> RpcSettings:
        names = [self.socket.stem, *(token.name for token in self.tokens)]
        names += [socket.caller_name for socket in self.sockets]
        names += [self.token_file.stem] if self.token_file else []
        if odd := [name for name in names[1:] if not is_name(name)]:
            raise ValueError(f"no caller can be called {odd[0]!r}: give the socket a name")
        if twice := repeated(names):
            raise ValueError(f"duplicate name {', '.join(twice)} of tokens and sockets")
        paths = [self.socket, *(socket.path for socket in self.sockets)]
        if twice := repeated(paths):
            raise ValueError(f"socket {', '.join(twice)} is given twice")
        return self

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            _host_port(value)
        return value

    @model_validator(mode="after")
    def _protected(self) -> RpcSettings:
        if self.listen is None:
            return self
        if self.token_file is None and not self.tokens:
            raise ValueError(
                "listen needs token-file or [[rpc.tokens]]: TCP callers must send a bearer token"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls-cert and tls-key go together")
        if not self.host_port[0].is_loopback and self.tls_cert is None:
            raise ValueError("listen beyond loopback needs tls-cert and tls-key")
        return self

    @property
    def host_port(self) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
        """The TCP address; only where `listen` is set."""
        return _host_port(self.listen or "")


def _host_port(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        number = int(port)
    except ValueError:
        raise ValueError(
            f"invalid address {text!r}: expected IP:PORT, such as 127.0.0.1:6001 or [::1]:6001"
        ) from None
    if not 0 <= number < 2**16:
        raise ValueError(f"invalid port {number}: expected 0 to 65535")
    return address, number
