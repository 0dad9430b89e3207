"""Every setting of `fleet.toml`, its default and what is allowed.

Keys are kebab-case in TOML and upper snake case in the environment
(`AGENTD_FLEET__GATEWAY__POLICY`), which comes first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from agentd.core.names import repeated
from agentd.errors import ConfigRefused
from agentd.http.settings import TokenSettings, short_enough
from agentd.tomlfile.parsing import parse, read_text
from agentd.tomlfile.section import Name, Section, refuse_bool
from agentd_fleet.placement.choice import PlacementPolicy

ENV_PREFIX = "AGENTD_FLEET__"
SEARCHED = Path("/etc/agentd/fleet.toml")
UNIX = "unix:"


def address(value: str, *schemes: str) -> str:
    """Refuse what is no address; the message of a ValueError says what is expected."""
    if value.startswith(UNIX) and "unix" in schemes and value.removeprefix(UNIX).startswith("/"):
        return value
    parts = urlsplit(value)
    with contextlib.suppress(ValueError):  # of the port
        is_plain = parts.username is None and not parts.path.strip("/") and (parts.port or 1)
        if parts.scheme in schemes and parts.hostname and is_plain:
            return value.rstrip("/")
    shown = " or ".join(
        "unix:/path/of/a/socket" if scheme == "unix" else f"{scheme}://host:port"
        for scheme in schemes
    )
    raise ValueError(f"invalid address {value!r}: expected {shown}")


class FleetSettings(Section):
    """[fleet]: which fleet this is, and where it is kept."""

    name: Name = Field(default="main", description="What its keys in etcd begin with.")
    etcd: tuple[str, ...] = Field(default=(), description="Where etcd answers: https://host:2379.")
    etcd_user: str = Field(default="", description="Who this is for etcd.")
    etcd_password_file: Path | None = Field(default=None, description="Its password, one line.")
    ca: Path | None = Field(
        default=None, description="PEM file of who signs etcd's and the nodes' certificates."
    )
    cert: Path | None = Field(default=None, description="PEM certificate for etcd; without a CN.")
    key: Path | None = Field(default=None, description="Its key.")
    nodes: tuple[str, ...] = Field(
        default=(),
        description="Instead of etcd, for a handful of nodes: where each of them answers.",
    )

    @field_validator("etcd")
    @classmethod
    def _reachable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(address(item, "https", "http") for item in value)

    @field_validator("nodes")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(address(item, "https", "http", "unix") for item in value)
        if twice := repeated(found):
            raise ValueError(f"{', '.join(twice)} is given twice")
        return found

    @model_validator(mode="after")
    def _one_of_them(self) -> FleetSettings:
        if self.etcd and self.nodes:
            raise ValueError(
                "etcd and nodes exclude each other: with etcd, nodes join by themselves"
            )
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if bool(self.etcd_user) != (self.etcd_password_file is not None):
            raise ValueError("etcd-user and etcd-password-file go together")
        return self


class JoinSettings(Section):
    """[join]: the node that this machine's publisher tells the fleet of."""

    socket: Path = Field(
        default=Path("/run/agentd/agentd.sock"), description="Where the node's daemon answers."
    )
    url: str = Field(default="", description="Where gateways reach this node: https://host:6001.")
    labels: Mapping[str, str] = Field(default={}, description="What placement can ask for.")
    lease: Annotated[int, BeforeValidator(refuse_bool), Field(ge=2, le=600)] = Field(
        default=5, description="Seconds without a word after which the node is lost."
    )
    state_dir: Path = Field(
        default=Path("/var/lib/agentd-fleet"), description="Where the id of this install is kept."
    )

    @field_validator("url")
    @classmethod
    def _reachable(cls, value: str) -> str:
        return address(value, "https", "http", "unix") if value else value


class GatewaySettings(Section):
    """[gateway]: where a gateway answers, and how it places."""

    socket: Path = Field(
        default=Path("/run/agentd-fleet/gateway.sock"),
        description="Unix socket of the operator, mode 0660.",
    )
    socket_group: str | None = Field(default=None, description="Group of the socket.")
    listen: str | None = Field(
        default=None, description="Optional TCP address; beyond loopback it needs TLS."
    )
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain for TCP.")
    tls_key: Path | None = Field(default=None, description="PEM private key for TCP.")
    node_token_file: Path | None = Field(
        default=None, description="Token that nodes know with gateway = true; mode 0600 or 0640."
    )
    policy: PlacementPolicy = Field(
        default=PlacementPolicy.RANDOM, description='"random" or "pack".'
    )
    state_dir: Path = Field(
        default=Path("/var/lib/agentd-fleet"),
        description="Without etcd: where routes and slot types are kept.",
    )

    @field_validator("socket")
    @classmethod
    def _short_enough(cls, value: Path) -> Path:
        return short_enough(value)


class CallerSettings(Section):
    """[rpc]: who may call the gateway over TCP, as on a node."""

    token_file: Path | None = Field(default=None, description="File with an admin's bearer token.")
    tokens: tuple[TokenSettings, ...] = ()


class FleetFile(BaseSettings):
    """`fleet.toml`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )
    fleet: FleetSettings = FleetSettings()
    join: JoinSettings = JoinSettings()
    gateway: GatewaySettings = GatewaySettings()
    rpc: CallerSettings = CallerSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings


def load(option: str | None, environ: Mapping[str, str] = os.environ) -> FleetFile:
    """Read the settings: of the option's file, $AGENTD_FLEET_CONFIG's, or the system's.

    Raises:
        ConfigRefused: the file cannot be read, or its settings cannot be used.
    """
    named = option or environ.get("AGENTD_FLEET_CONFIG")
    path = Path(named) if named else (SEARCHED if SEARCHED.exists() else None)
    source = str(path or "defaults")
    parsed = parse(FleetFile, read_text(path), source, environ, ENV_PREFIX)
    if parsed.settings is None or parsed.problems:
        raise ConfigRefused(parsed.problems, source)
    return parsed.settings
