"""Every setting of `fleet.toml` with its default and validation.

Keys are kebab-case in TOML and upper snake case in the environment
(`AGENTD_FLEET__GATEWAY__POLICY`), which takes precedence.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from agentd.core.names import find_duplicates
from agentd.http.settings import SocketPath, TokenSettings
from agentd.tomlfile.environment import FileSettings
from agentd.tomlfile.parsing import parse_settings, read_text
from agentd.tomlfile.section import AbsolutePath, Name, Section, refuse_bool
from agentd_fleet.placement.choice import PlacementPolicy

ENV_PREFIX = "AGENTD_FLEET__"
SYSTEM_FILE = Path("/etc/agentd/fleet.toml")
UNIX = "unix:"


def validate_address(value: str, *schemes: str) -> str:
    """Validate an address; the message of a ValueError has the expectation."""
    if value.startswith(UNIX) and "unix" in schemes and value.removeprefix(UNIX).startswith("/"):
        return value
    parts = urlsplit(value)
    with contextlib.suppress(ValueError):  # an invalid port
        is_plain = parts.username is None and not parts.path.strip("/") and (parts.port or 1)
        if parts.scheme in schemes and parts.hostname and is_plain:
            return value.rstrip("/")
    expected = " or ".join(
        "unix:/path/of/a/socket" if scheme == "unix" else f"{scheme}://host:port"
        for scheme in schemes
    )
    raise ValueError(f"invalid address {value!r}: expected {expected}")


class FleetSettings(Section):
    """[fleet]: the name of the fleet, and its store."""

    name: Name = Field(default="main", description="Name of the fleet, part of its keys in etcd.")
    etcd: tuple[str, ...] = Field(default=(), description="Endpoints of etcd: https://host:2379.")
    etcd_user: str = Field(default="", description="User in etcd.")
    etcd_password_file: Path | None = Field(default=None, description="File with its password.")
    ca: Path | None = Field(
        default=None, description="PEM file of the CA of etcd's and the nodes' certificates."
    )
    cert: Path | None = Field(default=None, description="PEM certificate for etcd; without a CN.")
    key: Path | None = Field(default=None, description="PEM private key of cert.")
    nodes: tuple[str, ...] = Field(
        default=(),
        description="Addresses of a few nodes, instead of etcd.",
    )

    @field_validator("etcd")
    @classmethod
    def _reachable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(validate_address(item, "https", "http") for item in value)

    @field_validator("nodes")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        addresses = tuple(validate_address(item, "https", "http", "unix") for item in value)
        if twice := find_duplicates(addresses):
            raise ValueError(f"duplicate address {', '.join(twice)}")
        return addresses

    @model_validator(mode="after")
    def _one_of_them(self) -> FleetSettings:
        if self.etcd and self.nodes:
            raise ValueError(
                "etcd and nodes exclude each other: with etcd, nodes join by themselves"
            )
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key must be set together")
        if bool(self.etcd_user) != (self.etcd_password_file is not None):
            raise ValueError("etcd-user and etcd-password-file must be set together")
        return self


class JoinSettings(Section):
    """[join]: the node that the publisher on this host reports to the fleet."""

    socket: Path = Field(
        default=Path("/run/agentd/agentd.sock"), description="Socket of the node's daemon."
    )
    url: str = Field(default="", description="Address for gateways: https://host:6001.")
    labels: Mapping[str, str] = Field(default={}, description="Labels for placement constraints.")
    lease: Annotated[int, BeforeValidator(refuse_bool), Field(ge=2, le=600)] = Field(
        default=5, description="Lease TTL in seconds."
    )
    state_dir: AbsolutePath = Field(
        default=Path("/var/lib/agentd-fleet"), description="State folder: the id of this install."
    )

    @field_validator("url")
    @classmethod
    def _reachable(cls, value: str) -> str:
        return validate_address(value, "https", "http", "unix") if value else value


class GatewaySettings(Section):
    """[gateway]: the endpoints and the placement policy of a gateway."""

    socket: SocketPath = Field(
        default=Path("/run/agentd-fleet/gateway.sock"),
        description="Unix socket of the operator, mode 0660.",
    )
    socket_group: str | None = Field(default=None, description="Group of the socket.")
    listen: str | None = Field(
        default=None, description="TCP address; requires TLS beyond loopback."
    )
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain for TCP.")
    tls_key: Path | None = Field(default=None, description="PEM private key for TCP.")
    node_token_file: Path | None = Field(
        default=None, description="Token with gateway = true on the nodes; mode 0600 or 0640."
    )
    policy: PlacementPolicy = Field(
        default=PlacementPolicy.RANDOM, description='Placement policy: "random" or "pack".'
    )
    state_dir: AbsolutePath = Field(
        default=Path("/var/lib/agentd-fleet"),
        description="State folder without etcd: routes and slot types.",
    )


class CallerSettings(Section):
    """[rpc]: callers of the gateway over TCP, as on a node."""

    token_file: Path | None = Field(default=None, description="File with an admin's bearer token.")
    tokens: tuple[TokenSettings, ...] = ()


class FleetFile(FileSettings):
    """`fleet.toml`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )
    fleet: FleetSettings = FleetSettings()
    join: JoinSettings = JoinSettings()
    gateway: GatewaySettings = GatewaySettings()
    rpc: CallerSettings = CallerSettings()


def load(option: str | None, environ: Mapping[str, str] = os.environ) -> FleetFile:
    """Load the settings from the option's file, $AGENTD_FLEET_CONFIG's, or the system's.

    Raises:
        ConfigRefused: the file is unreadable or its settings are unusable.
        StartRefused: its file system does not answer.
    """
    file = option or environ.get("AGENTD_FLEET_CONFIG")
    path = Path(file) if file else (SYSTEM_FILE if SYSTEM_FILE.exists() else None)
    settings, _ = parse_settings(FleetFile, read_text(path), path, environ, ENV_PREFIX)
    return settings
