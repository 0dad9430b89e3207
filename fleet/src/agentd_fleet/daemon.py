"""A gateway as a daemon: start of its parts in order, and stop in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog
from pydantic import ValidationError

from agentd.client.asynchronous import AsyncClient
from agentd.client.tls import client_tls
from agentd.concurrency import call_in_time, wait_event
from agentd.errors import ConfigRefused, DaemonFailed, Problem, RuntimeUnavailable, StartRefused
from agentd.http.certificates import load_chain, read_chain_file
from agentd.http.credentials import (
    build_endpoint,
    expiry_problems,
    key_pair_weaknesses,
    read_configured_certificate,
    read_guarded_token,
    read_tokens,
    token_weaknesses,
)
from agentd.http.server import Endpoint, Server
from agentd.http.settings import RpcSettings
from agentd.http.static import HOME, NODE_HOME, Pages
from agentd.program.background import Background
from agentd.program.name_service import find_entry
from agentd.program.sd_notify import Notifier
from agentd.program.shutdown import Shutdown
from agentd.program.weaknesses import Weakness, Weaknesses
from agentd.tomlfile.parsing import translate_error
from agentd.tomlfile.regular_files import SilentFile
from agentd_fleet.gateway.handlers import Gateway
from agentd_fleet.gateway.routes import routes
from agentd_fleet.nodes.calls import UNIX, Nodes
from agentd_fleet.nodes.reader import MAX_ANSWER
from agentd_fleet.placement.attempts import PlacementTimeouts
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.placer import Placer
from agentd_fleet.placement.sweep import Sweep
from agentd_fleet.settings import FleetFile, FleetSettings
from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_store import EtcdStore
from agentd_fleet.store.etcd_transport import EtcdCredentials
from agentd_fleet.store.route import Store
from agentd_fleet.store.sqlite_store import SqliteStore
from agentd_fleet.view.fleet_state import FleetState

log = structlog.get_logger()

FIRST_VIEW_TIMEOUT_S, LOOK_S = 5.0, 0.05
AFTER_SERVER_S, AFTER_PLACEMENTS_S = 15.0, 3.0
"""Seconds of a stop reserved for the steps after the server and the placements."""


def etcd_credentials(fleet: FleetSettings) -> EtcdCredentials:
    """Return the endpoints and credentials of etcd.

    Raises:
        ConfigRefused: the password or a certificate is unusable.
        StartRefused: one cannot be read for now.
    """
    password = _read_secret("fleet.etcd-password-file", fleet.etcd_password_file)
    return EtcdCredentials(fleet.etcd, fleet.etcd_user, password, client_tls_context(fleet))


def client_tls_context(fleet: FleetSettings) -> ssl.SSLContext:
    """Return the TLS context for etcd and nodes, by default with the system's CAs.

    Raises:
        ConfigRefused: a file is unusable.
        StartRefused: one cannot be read for now.
    """
    try:
        ca = read_chain_file(fleet.ca).text if fleet.ca is not None else None
        context = client_tls(cadata=ca)
        if fleet.cert is not None and fleet.key is not None:
            load_chain(context, fleet.cert, fleet.key)
    except SilentFile as error:
        raise StartRefused(str(error)) from None
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(str(f) for f in (fleet.ca, fleet.cert, fleet.key) if f is not None)
        raise ConfigRefused([Problem("fleet.ca", f"{files}: {error}")]) from None
    return context


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
    return [*token_weaknesses(rpc_settings(settings)), *certificate_weaknesses(settings)]


def certificate_weaknesses(settings: FleetFile) -> list[Weakness]:
    """Return the weaknesses of the gateway's certificates."""
    fleet, gateway = settings.fleet, settings.gateway
    own = key_pair_weaknesses(gateway.tls_cert, gateway.tls_key)
    return [*own, *key_pair_weaknesses(fleet.cert, fleet.key)]


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
    expired += expiry_problems("gateway.tls-cert", gateway.tls_cert, gateway.tls_key)
    if expired:
        raise ConfigRefused(expired)


async def find_socket_groups(endpoint: Endpoint) -> Mapping[str, int]:
    """Return the groups of the sockets that this host knows, with their ids.

    Raises:
        StartRefused: the name service does not answer.
    """
    ids: dict[str, int] = {}
    for group in {unix.group for unix in endpoint.sockets if unix.group is not None}:
        find = partial(find_entry, "getgrnam_r", group)
        try:
            entry = await asyncio.to_thread(call_in_time, f"group {group!r}", find)
        except (OSError, RuntimeUnavailable) as error:
            raise StartRefused(f"group {group!r} cannot be looked up: {error}") from None
        ids |= {group: entry.number} if entry is not None else {}
    return ids


class GatewayDaemon:
    """Runs one gateway; `reread` reads the settings again."""

    def __init__(
        self,
        settings: FleetFile,
        reread: Callable[[], FleetFile],
        timeouts: PlacementTimeouts | None = None,
    ) -> None:
        self._settings = settings
        self._reread = reread
        self._timeouts = timeouts or PlacementTimeouts()
        self._shutdown, self._reload = Shutdown(), asyncio.Event()
        self._notifier = Notifier()
        self._weaknesses = Weaknesses()

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            ConfigRefused: the configuration is unusable.
            StartRefused: the gateway cannot run on this host.
            DaemonFailed: a vital part has failed.
        """
        self._shutdown.handle_signals({signal.SIGHUP: self._reload.set})
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._serve(stack)
        finally:
            self._shutdown.finish()
        log.info("gateway.stopped", late=self._shutdown.late)
        if self._shutdown.failure:
            raise DaemonFailed(self._shutdown.failure)

    async def _serve(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the parts in order and serve until the stop."""
        step = self._shutdown.step
        settings = self._settings
        server_endpoint = build_endpoint(rpc_settings(settings), "gateway")
        token = _read_secret("gateway.node-token-file", settings.gateway.node_token_file)
        state, tls = FleetState(), client_tls_context(settings.fleet)
        nodes = await stack.enter_async_context(Nodes(state, token, tls))
        store = await self._open_store(stack, state, token, tls)
        backend = FleetBackend(store=store, state=state, nodes=nodes)
        placer = Placer(backend, settings.gateway.policy, self._timeouts)
        stack.push_async_callback(step, "placements", lambda _: placer.close(), AFTER_PLACEMENTS_S)
        gateway = Gateway(backend, placer)
        background = Background(self._shutdown.fail)
        stack.push_async_callback(
            step, "background tasks", lambda _: background.close(), AFTER_PLACEMENTS_S
        )
        background.run("store", store.run())
        server = Server(
            title="agentd-fleet",
            routes=routes(gateway),
            site=gateway,
            endpoint=server_endpoint,
            pages=Pages({HOME: "agentd_fleet", NODE_HOME: "agentd"}),
        )
        stack.push_async_callback(step, "server", server.stop, AFTER_SERVER_S)
        groups = await find_socket_groups(server_endpoint)
        await server.start(groups.get)
        for unix in server.ungrouped:
            raise StartRefused(f"socket {unix.path}: no group {unix.group!r} on this host")
        sweep = Sweep(backend, placer, self._timeouts)
        background.run("sweep", sweep.run())
        certificates = certificate_weaknesses(settings)
        background.run("reload", self._reload_on_hangup(server, gateway, certificates))
        self._weaknesses.replace([*token_weaknesses(rpc_settings(settings)), *certificates])
        background.run("credentials", self._weaknesses.log_daily())
        await self._wait_first_view(store)
        log.info("gateway.ready", fleet=settings.fleet.name, nodes=len(state.view.nodes))
        self._notifier.ready(f"fleet {settings.fleet.name}")
        await self._notifier.keep_alive_until(self._shutdown.requested)
        self._notifier.stopping()

    async def _open_store(
        self,
        stack: contextlib.AsyncExitStack,
        state: FleetState,
        token: str,
        tls: ssl.SSLContext | None,
    ) -> Store:
        fleet = self._settings.fleet
        if fleet.etcd:
            etcd = await stack.enter_async_context(EtcdClient(etcd_credentials(fleet)))
            return EtcdStore(etcd, fleet.name, state)
        if not fleet.nodes:
            reason = 'set etcd = ["https://…"], or nodes = ["unix:/…"] for a few nodes'
            raise ConfigRefused([Problem("fleet", reason)])
        clients = [(item, _node_client(item, token, tls)) for item in fleet.nodes]
        store = SqliteStore(self._settings.gateway.state_dir / "fleet.sqlite", clients, state)
        await store.open()
        stack.push_async_callback(store.close)
        return store

    async def _wait_first_view(self, store: Store) -> None:
        """Wait for the first view, for a limited time: without it every create would be refused."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FIRST_VIEW_TIMEOUT_S
        while store.stale_reason() and (remaining_s := deadline - loop.time()) > 0:
            if await wait_event(self._shutdown.requested, min(remaining_s, LOOK_S)):
                return

    async def _reload_on_hangup(
        self, server: Server, gateway: Gateway, certificates: Sequence[Weakness]
    ) -> None:
        """Reload the tokens on SIGHUP; an unreadable file changes nothing.

        The certificates that were read at the start stay in use, and so do their weaknesses.
        """
        while True:
            await self._reload.wait()
            self._reload.clear()
            try:
                rpc = rpc_settings(await gateway.compute(self._reread))
                new_tokens = await gateway.compute(partial(read_tokens, rpc))
                weaknesses = await gateway.compute(partial(token_weaknesses, rpc))
                server.replace_tokens(new_tokens)
                self._weaknesses.replace([*weaknesses, *certificates])
            except (ConfigRefused, StartRefused) as error:
                reasons = error.lines() if isinstance(error, ConfigRefused) else [str(error)]
                log.warning("gateway.reload_refused", reasons=reasons)
            else:
                log.info("gateway.reloaded")


def _node_client(address: str, token: str, tls: ssl.SSLContext | None) -> AsyncClient:
    if address.startswith(UNIX):
        return AsyncClient(address.removeprefix(UNIX), timeout_s=10.0, max_bytes=MAX_ANSWER)
    return AsyncClient(url=address, token=token, tls=tls, timeout_s=10.0, max_bytes=MAX_ANSWER)
