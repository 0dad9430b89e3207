"""[rpc], [[rpc.tokens]] and [[rpc.sockets]]: endpoints, callers and their roles."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from agentd.core.access import Caller, Role
from agentd.core.names import find_duplicates, is_name
from agentd.tomlfile.section import (
    MAX_SOCKET_PATH,
    Name,
    Section,
    refuse_bool,
)


def _validate_socket_path(path: Path) -> Path:
    """Refuse a socket path that is too long for Linux, or empty."""
    if path == Path():
        raise ValueError('is empty; expected a path such as "/run/agentd/agentd.sock"')
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        raise ValueError(f"longer than {MAX_SOCKET_PATH} bytes, the limit for a socket path")
    return path


SocketPath = Annotated[Path, AfterValidator(_validate_socket_path)]
"""The path of a unix socket."""


class _CallerSettings(Section):
    """The members that tokens and sockets share."""

    role: Role = Field(description='"admin", "agent" or "read".')
    agents: Annotated[tuple[Name, ...], Field(max_length=1024)] = Field(
        default=(), description="Agents in scope (required for role agent)."
    )

    @model_validator(mode="after")
    def _validate_agents(self) -> _CallerSettings:
        if self.role is Role.AGENT and not self.agents:
            raise ValueError('role "agent" requires agents = ["…"], the agents in scope')
        if self.role is Role.ADMIN and self.agents:
            raise ValueError('role "admin" covers all agents; remove agents')
        return self

    def to_caller(self, name: str) -> Caller:
        """Return the caller that this entry authenticates."""
        return Caller(name, self.role, frozenset(self.agents) or None)


class TokenSettings(_CallerSettings):
    """[[rpc.tokens]]: one bearer token for TCP."""

    name: Name = Field(description="Name of the caller in logs, events and kernels.")
    file: Path = Field(description="File with the token on one line; mode 0600 or 0640.")
    gateway: bool = Field(
        default=False,
        description="Fleet gateway: may act for other callers (role admin only).",
    )

    @model_validator(mode="after")
    def _validate_gateway(self) -> TokenSettings:
        if self.gateway and self.role is not Role.ADMIN:
            raise ValueError('gateway = true requires role = "admin": it may act for any caller')
        return self


class SocketSettings(_CallerSettings):
    """[[rpc.sockets]]: an additional unix socket; the main one has the role admin."""

    name: Name | None = Field(
        default=None, description="Name of the caller. Default: the file's, without suffix."
    )
    path: SocketPath = Field(description="Path of the socket; mode 0660.")
    group: str | None = Field(default=None, description="Group that may connect.")

    @property
    def caller_name(self) -> str:
        """The name of its callers."""
        return self.name or self.path.stem


class RpcSettings(Section):
    """[rpc]: the daemon's endpoints."""

    socket: SocketPath = Field(
        default=Path("/run/agentd/agentd.sock"), description="Unix socket, mode 0660."
    )
    socket_group: str | None = Field(
        default=None, description="Group of the socket. Default: the daemon's own."
    )
    listen: str | None = Field(
        default=None,
        description="TCP address; requires token-file, and TLS beyond loopback.",
    )
    token_file: Path | None = Field(
        default=None, description="File with an admin's bearer token; mode 0600 or 0640."
    )
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain for TCP.")
    tls_key: Path | None = Field(default=None, description="PEM private key for TCP.")
    max_connections: Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=65536)] = Field(
        default=1024, description="Maximum TCP connections (at most a quarter of all descriptors)."
    )
    tokens: tuple[TokenSettings, ...] = ()
    sockets: tuple[SocketSettings, ...] = ()

    @model_validator(mode="after")
    def _validate_unique(self) -> RpcSettings:
        names = [self.socket.stem, *(token.name for token in self.tokens)]
        names += [socket.caller_name for socket in self.sockets]
        names += [self.token_file.stem] if self.token_file else []
        if invalid := [name for name in names[1:] if not is_name(name)]:
            raise ValueError(f"invalid caller name {invalid[0]!r}: set the name of the socket")
        if duplicates := find_duplicates(names):
            raise ValueError(f"duplicate name {', '.join(duplicates)} of tokens and sockets")
        paths = [self.socket, *(socket.path for socket in self.sockets)]
        if duplicates := find_duplicates(paths):
            raise ValueError(f"duplicate socket {', '.join(duplicates)}")
        return self

    @field_validator("listen")
    @classmethod
    def _validate_listen(cls, value: str | None) -> str | None:
        if value is not None:
            _parse_host_port(value)
        return value

    @model_validator(mode="after")
    def _validate_tcp(self) -> RpcSettings:
        if self.listen is None:
            return self
        if self.token_file is None and not self.tokens:
            raise ValueError(
                "listen requires token-file or [[rpc.tokens]]: TCP callers must send a bearer token"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls-cert and tls-key must be set together")
        if not self.host_port[0].is_loopback and self.tls_cert is None:
            raise ValueError("listen beyond loopback requires tls-cert and tls-key")
        return self

    @property
    def host_port(self) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
        """The TCP address; valid only if `listen` is set."""
        return _parse_host_port(self.listen or "")


def _parse_host_port(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
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
