"""Credentials of a gateway: those of its callers, and its own for nodes and etcd.

Those in files are read again on SIGHUP, and its own ones also while nodes or etcd refuse them. What
cannot be used is refused and logged, and what was in force stays in force.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import replace
from pydantic import ValidationError

from agentd.client.tls import client_tls
from agentd.concurrency import start_pool, wait_event
from agentd.errors import ConfigRefused, Problem, StartRefused
from agentd.http.certificates import load_chain, read_chain_file
from agentd.http.credentials import (
    expiry_problems,
    key_pair_weaknesses,
    read_configured_certificate,
    read_guarded_token,
    read_tokens,
    token_weaknesses,
)
from agentd.http.server import Server
from agentd.http.settings import RpcSettings
from agentd.program.weaknesses import Weakness, Weaknesses
from agentd.tomlfile.parsing import translate_error
from agentd.tomlfile.regular_files import SilentFile
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.settings import FleetFile, FleetSettings
from agentd_fleet.store.etcd_transport import EtcdCredentials
from agentd_fleet.view.fleet_view import NodeStatus

log = structlog.get_logger()
T = TypeVar("T")
_Part = Callable[[], Callable[[], object]]
"""Reads a part of the credentials, and returns the function that applies it."""

RETRY_S = 10.0
"""Seconds after which files are read again that were missing, or whose credentials are refused."""


class OwnCredentials(msgspec.Struct, frozen=True):
    """The credentials of a gateway for nodes and etcd, with the content of their TLS files."""

    node_token: str
    etcd: EtcdCredentials
    tls: ssl.SSLContext
    tls_files: tuple[bytes, ...]

    @property
    def contents(self) -> tuple[object, ...]:
        """The contents of all files."""
        return self.node_token, self.etcd.login, self.tls_files


def _read_node_token(settings: FleetFile) -> str:
    return _read_secret("gateway.node-token-file", settings.gateway.node_token_file)


def etcd_credentials(fleet: FleetSettings, tls: ssl.SSLContext | None = None) -> EtcdCredentials:
    """Return the endpoints and credentials of etcd, by default with the settings' TLS context.

    Raises:
        ConfigRefused: the password or a certificate is unusable.
        StartRefused: one cannot be read for now.
    """
    password = read_etcd_password(fleet)
    return EtcdCredentials(fleet.etcd, fleet.etcd_user, password, tls or read_tls(fleet)[0])


def read_etcd_password(fleet: FleetSettings) -> str:
    """Return the password of the user in etcd, empty without one; it raises as `read_tls` does."""
    return _read_secret("fleet.etcd-password-file", fleet.etcd_password_file)


def read_tls(fleet: FleetSettings) -> tuple[ssl.SSLContext, tuple[bytes, ...]]:
    """Return the TLS context for etcd and nodes, by default of the system, and its files.

    Raises:
        ConfigRefused: a file is unusable.
        StartRefused: one cannot be read for now.
    """
    files = []
    try:
        if fleet.ca is not None:
            files.append(read_chain_file(fleet.ca))
        context = client_tls(cadata=files[0].text if files else None)
        if fleet.cert is not None and fleet.key is not None:
            files += load_chain(context, fleet.cert, fleet.key)
    except SilentFile as error:
        raise StartRefused(str(error)) from None
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        names = ", ".join(str(f) for f in (fleet.ca, fleet.cert, fleet.key) if f is not None)
        raise ConfigRefused([Problem("fleet.ca", f"{names}: {error}")]) from None
    return context, tuple(file.content for file in files)


def _read_secret(where: str, file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return read_guarded_token(file)
    except SilentFile as error:
        raise StartRefused(f"{where}: {file} {error}") from None
    except ValueError as error:
        raise ConfigRefused([Problem(where, f"{file} {error}")]) from None


def rpc_settings(settings: FleetFile) -> RpcSettings:
    """Return the gateway's endpoints in the form of a node's settings.

    Raises:
        ConfigRefused: the settings contradict each other.
    """
    gateway, rpc = settings.gateway, settings.rpc
    try:
        shared = gateway.model_dump(include=set(RpcSettings.model_fields))
        values = {**shared, "token_file": rpc.token_file, "tokens": rpc.tokens}
        return RpcSettings.model_validate(values, by_name=True)
    except ValidationError as error:
        problems = [translate_error(dict(item), {}, RpcSettings) for item in error.errors()]
        raise ConfigRefused(
            [Problem(f"gateway.{p.where}".rstrip("."), p.why) for p in problems]
        ) from None


def credential_weaknesses(settings: FleetFile) -> list[Weakness]:
    """Return the weaknesses of the gateway's credentials."""
    fleet, gateway = settings.fleet, settings.gateway
    pairs = (gateway.tls_cert, gateway.tls_key), (fleet.cert, fleet.key)
    of_pairs = [weakness for pair in pairs for weakness in key_pair_weaknesses(*pair)]
    return [*token_weaknesses(rpc_settings(settings)), *of_pairs]


def refuse_unusable(settings: FleetFile) -> None:
    """Check the files of the settings, for a gateway and for a publisher.

    Raises:
        ConfigRefused: a file is unusable, or a certificate has expired.
        StartRefused: a file cannot be read for now.
    """
    fleet, gateway = settings.fleet, settings.gateway
    read_configured_certificate(rpc_settings(settings), "gateway")
    etcd_credentials(fleet)
    expired = expiry_problems("fleet.cert", fleet.cert, fleet.key)
    _refuse(expired + expiry_problems("gateway.tls-cert", gateway.tls_cert, gateway.tls_key))


class GatewayCredentials:
    """The credentials of a running gateway; `reread` reads its settings again.

    Raises:
        ConfigRefused: a credential for nodes or etcd is unusable.
        StartRefused: one cannot be read for now.
    """

    def __init__(self, settings: FleetFile, reread: Callable[[], FleetFile]) -> None:
        self._settings = settings
        self._reread = reread
        tls, files = read_tls(settings.fleet)
        etcd = etcd_credentials(settings.fleet, tls)
        self.own = OwnCredentials(_read_node_token(settings), etcd, tls, files)
        self._on_change: list[Callable[[OwnCredentials], None]] = []
        self._missing: list[Problem] = []
        self._reasons: list[str] = []
        self._is_complete = True
        """Whether the last reload found all credentials usable; until it does, it is repeated."""
        self._weaknesses = Weaknesses()
        self._own_parts = (self._read_tls, self._read_login, self._read_token)
        """Each may be unusable while another one is replaced."""
        self._threads = start_pool(1)
        """Not the event loop's, whose threads may all wait for the name service."""

    def subscribe(self, on_change: Callable[[OwnCredentials], None]) -> None:
        """Register a user of the own credentials, which is called with other ones."""
        self._on_change.append(on_change)

    async def run(self, hangup: asyncio.Event, server: Server, backend: FleetBackend) -> None:
        """Read all again after each hangup, and what is missing, or refused by nodes or etcd."""
        await self._log_weaknesses()
        while True:
            is_asked = await wait_event(hangup, RETRY_S)
            hangup.clear()
            if is_asked:
                self._is_complete, self._reasons = False, []
            own, was_complete = self.own, self._is_complete
            if not was_complete:
                self._is_complete = await self._read_all(server)
            elif _may_be_refused(backend):
                await self._apply(*self._own_parts)
            is_reloaded = self._is_complete and not was_complete
            if is_asked or is_reloaded or self.own is not own:
                await self._log_weaknesses()
            if is_reloaded:
                log.info("gateway.reloaded")

    async def log_daily(self) -> None:
        """Log weak credentials once a day, forever."""
        await self._weaknesses.log_daily()

    async def _read_all(self, server: Server) -> bool:
        """Read the settings and all credentials; return whether all are in force.

        While the settings are unusable, the files of the old ones are read.
        """
        parts: list[_Part] = [self._read_settings, *self._own_parts]
        parts.append(partial(self._read_tokens, server))
        if server.has_tls:
            parts.append(partial(self._read_certificate, server))
        return await self._apply(*parts)

    def _read_settings(self) -> Callable[[], object]:
        settings = self._reread()
        rpc_settings(settings)
        return partial(setattr, self, "_settings", settings)

    def _read_tls(self) -> Callable[[], object]:
        fleet = self._settings.fleet
        _refuse(expiry_problems("fleet.cert", fleet.cert, fleet.key))
        tls, contents = read_tls(fleet)
        etcd = replace(self.own.etcd, tls=tls)
        return partial(self._use, etcd=etcd, tls=tls, tls_files=contents)

    def _read_login(self) -> Callable[[], object]:
        return partial(self._use, etcd=etcd_credentials(self._settings.fleet, self.own.tls))

    def _read_token(self) -> Callable[[], object]:
        return partial(self._use, node_token=_read_node_token(self._settings))

    def _read_tokens(self, server: Server) -> Callable[[], object]:
        missing: list[Problem] = []
        tokens = read_tokens(rpc_settings(self._settings), missing, server.current_tokens)
        self._missing = missing
        return partial(server.replace_tokens, tokens)

    def _read_certificate(self, server: Server) -> Callable[[], object]:
        gateway = self._settings.gateway
        _refuse(expiry_problems("gateway.tls-cert", gateway.tls_cert, gateway.tls_key))
        certificate = read_configured_certificate(rpc_settings(self._settings), "gateway")
        return partial(server.replace_tls, certificate.context if certificate else None)

    def _use(self, **changes: object) -> None:
        own = replace(self.own, **changes)
        if own.contents != self.own.contents:
            self.own = own
            for on_change in self._on_change:
                on_change(own)
            log.info("credential.replaced")

    async def _apply(self, *parts: _Part) -> bool:
        """Read parts and apply each; those that are unusable are logged and stay as they are."""
        reasons: list[str] = []
        for part in parts:
            try:
                apply = await self._compute(part)
            except (ConfigRefused, StartRefused) as error:
                reasons += str(error).splitlines()
            else:
                apply()
        reasons += map(str, self._missing)
        if reasons and reasons != self._reasons:
            log.warning("gateway.reload_refused", reasons=reasons)
        self._reasons = reasons
        return not reasons

    async def _log_weaknesses(self) -> None:
        weaknesses = partial(credential_weaknesses, self._settings)
        self._weaknesses.replace(await self._compute(weaknesses))

    async def _compute(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _may_be_refused(backend: FleetBackend) -> bool:
    """Return whether etcd, or a node, may refuse the credentials of this gateway."""
    return bool(backend.store.stale_reason()) or any(
        node.unreachable or node.status is NodeStatus.DAEMON_DOWN
        for node in backend.state.view.nodes.values()
    )


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigRefused(problems)
