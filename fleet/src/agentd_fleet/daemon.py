"""A gateway as a daemon: start of its parts in order, and stop in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog

from agentd.client.asynchronous import AsyncClient
from agentd.concurrency import call_in_time, wait_event
from agentd.errors import ConfigRefused, DaemonFailed, Problem, RuntimeUnavailable, StartRefused
from agentd.http.credentials import build_endpoint
from agentd.http.server import Endpoint, Server
from agentd.http.static import HOME, NODE_HOME, Pages
from agentd.program.background import Background
from agentd.program.name_service import find_entry
from agentd.program.sd_notify import Notifier
from agentd.program.shutdown import Shutdown
from agentd_fleet.credentials import GatewayCredentials, OwnCredentials, rpc_settings
from agentd_fleet.gateway.handlers import Gateway
from agentd_fleet.gateway.routes import routes
from agentd_fleet.nodes.calls import UNIX, Nodes
from agentd_fleet.nodes.reader import MAX_ANSWER
from agentd_fleet.placement.attempts import PlacementTimeouts
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.placer import Placer
from agentd_fleet.placement.sweep import Sweep
from agentd_fleet.settings import FleetFile
from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_store import EtcdStore
from agentd_fleet.store.route import Store
from agentd_fleet.store.sqlite_store import SqliteStore
from agentd_fleet.view.fleet_state import FleetState

log = structlog.get_logger()

FIRST_VIEW_TIMEOUT_S, LOOK_S = 5.0, 0.05
AFTER_SERVER_S, AFTER_PLACEMENTS_S = 15.0, 3.0
"""Seconds of a stop reserved for the steps after the server and the placements."""


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
        credentials = GatewayCredentials(settings, self._reread)
        state, own = FleetState(), credentials.own
        nodes = await stack.enter_async_context(Nodes(state, own.node_token, own.tls))
        credentials.subscribe(lambda own: nodes.replace_credentials(own.node_token, own.tls))
        store = await self._open_store(stack, state, credentials)
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
        background.run("reload", credentials.run(self._reload, server, backend))
        background.run("credentials", credentials.log_daily())
        await self._wait_first_view(store)
        log.info("gateway.ready", fleet=settings.fleet.name, nodes=len(state.view.nodes))
        self._notifier.ready(f"fleet {settings.fleet.name}")
        await self._notifier.keep_alive_until(self._shutdown.requested)
        self._notifier.stopping()

    async def _open_store(
        self, stack: contextlib.AsyncExitStack, state: FleetState, credentials: GatewayCredentials
    ) -> Store:
        fleet, own = self._settings.fleet, credentials.own
        if fleet.etcd:
            etcd = await stack.enter_async_context(EtcdClient(own.etcd))
            credentials.subscribe(lambda own: etcd.replace_credentials(own.etcd))
            return EtcdStore(etcd, fleet.name, state)
        if not fleet.nodes:
            reason = 'set etcd = ["https://…"], or nodes = ["unix:/…"] for a few nodes'
            raise ConfigRefused([Problem("fleet", reason)])
        clients = [(item, _node_client(item, own)) for item in fleet.nodes]

        def replace_credentials(own: OwnCredentials) -> None:
            for address, client in clients:
                if not address.startswith(UNIX):
                    client.replace_credentials(own.node_token, own.tls)

        credentials.subscribe(replace_credentials)
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


def _node_client(address: str, own: OwnCredentials) -> AsyncClient:
    limits: Any = {"timeout_s": 10.0, "max_bytes": MAX_ANSWER}
    if address.startswith(UNIX):
        return AsyncClient(address.removeprefix(UNIX), **limits)
    return AsyncClient(url=address, token=own.node_token, tls=own.tls, **limits)
