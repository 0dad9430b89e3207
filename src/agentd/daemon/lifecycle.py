"""The life of a daemon: start of its parts in order, and stop in reverse.

Order of the start: state folder and locks, plugins, partition, socket, kernels, ready.
Stopping never touches a kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog
from msgspec.structs import asdict, replace

from agentd import failpoints
from agentd.concurrency import Deadline, start_pool
from agentd.config.loading import LoadedSettings
from agentd.config.settings import Settings
from agentd.core.conditions import Condition
from agentd.daemon import runtime_factory
from agentd.daemon.assembly import Services, build_services, build_site, restore_node
from agentd.daemon.discovery import (
    check_and_discover,
    create_host_lock,
    create_plugin_host,
    refuse_failed_required,
    resolve_node_id,
)
from agentd.daemon.host_names import HostNames
from agentd.daemon.problems import Problems
from agentd.daemon.reload import Reload
from agentd.errors import (
    ConfigRefused,
    DaemonFailed,
    RuntimeUnavailable,
    StartRefused,
)
from agentd.events import EventLog
from agentd.failpoints import hit_async
from agentd.host.lookups import Lookups
from agentd.host.probe import probe
from agentd.http.credentials import build_endpoint, credential_weaknesses
from agentd.http.route import Route
from agentd.http.server import Server
from agentd.http.static import HOME, Pages
from agentd.log import report_lost_lines
from agentd.pluginhost.host import PluginHost
from agentd.program.background import Background
from agentd.program.boot_id import boot_id
from agentd.program.sd_listen import inherited_sockets
from agentd.program.sd_notify import Notifier
from agentd.program.shutdown import Shutdown
from agentd.rpc.rendering import status_line
from agentd.rpc.site import NodeSite
from agentd.services.condition_sources import limit_conditions
from agentd.services.conditions import Conditions
from agentd.services.kernels.records import recorded_runtimes
from agentd.services.kernels.retention import Retention
from agentd.services.node import Node, NodeContext
from agentd.services.protocols import Clock, Runtime
from agentd.state.folder import StateFolder
from agentd.state.locks import lock_folder
from agentd.state.schemas import SavedRecord
from agentd.stderr import LOST
from agentd.tomlfile.folders import write_problem

log = structlog.get_logger()

FIRST_LIST_TIMEOUT_S = 20.0
AFTER_DRAIN_S, AFTER_SERVER_S, AFTER_RUNTIMES_S = 10.0, 7.0, 6.0
"""Seconds of a stop reserved for the steps after the drain, the server and the runtimes."""
STATUS_PAUSE_S = 1.0
LOCK_PAUSE_S = 2.0
"""Seconds between two checks whether the locks' files are still there."""
LOG_RETRY_S = 10.0
"""Seconds after which a log that could not be written is tried again without an event."""


class StopReport(msgspec.Struct, kw_only=True):
    """Requests and creates that a stop cancelled, unresolved creates, and late steps."""

    requests: Sequence[str] = ()
    creates: Sequence[str] = ()
    unresolved: Sequence[str] = ()
    late: Sequence[str]


class Daemon:
    """One running agentd."""

    def __init__(self, loaded: LoadedSettings) -> None:
        self._loaded = loaded
        self._settings = loaded.settings
        self._node_id = resolve_node_id(loaded.settings)
        uptime = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        clock = Clock(wall=time.time, steady=time.monotonic, uptime=uptime)
        self._context = NodeContext(self._node_id, boot_id(), clock)
        self._store = StateFolder(loaded.settings.node.state_dir, self._node_id)
        self._host_lock = create_host_lock(loaded.settings)
        self._notifier = Notifier()
        self._shutdown, self._hangup = Shutdown(), asyncio.Event()
        self._names = HostNames(loaded.settings)
        self._reload: Reload
        self._conditions: Conditions
        self._passed_sockets = inherited_sockets()
        self._status = ""

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            ConfigRefused: the configuration is unusable.
            StartRefused: the daemon cannot run on this host.
            DaemonFailed: a vital part has failed.
        """
        shutdown, loop = self._shutdown, asyncio.get_running_loop()
        if sys.version_info < (3, 12):  # later ones need no thread for each child, either
            watcher = asyncio.PidfdChildWatcher()
            watcher.attach_loop(loop)
            asyncio.get_event_loop_policy().set_child_watcher(watcher)
        try:
            loop.set_default_executor(start_pool())
            shutdown.handle_signals({signal.SIGHUP: self._hangup.set})
        except RuntimeError as error:  # no process id
            raise StartRefused(f"no thread can be started: {error}") from None
        report = StopReport(late=shutdown.late)
        try:
            async with contextlib.AsyncExitStack() as stack:
                services = await self._start_unless_stopped(self._start(stack, report))
                if services is not None:
                    await self._notifier.keep_alive_until(shutdown.requested)
                self._notifier.stopping()
                log.info("daemon.stopping")
                await hit_async("shutdown.before_drain")
                if services is not None:
                    services.node.events.close()
                    report.creates, report.unresolved = await services.creates.drain(
                        shutdown.deadline.earlier(AFTER_DRAIN_S)
                    )
                await hit_async("shutdown.after_drain")
        finally:
            shutdown.finish()
        facts = asdict(report).items()
        log.info("daemon.stopped", **{name: value for name, value in facts if value})
        if report.unresolved or report.late:
            shutdown.end_process()  # the locks are released: nothing may be undone or written now
        if shutdown.failure:
            raise DaemonFailed(shutdown.failure)

    async def _start_unless_stopped(self, start: Coroutine[Any, Any, Services]) -> Services | None:
        """Return the started services, None if a stop comes first."""
        starting = asyncio.create_task(start)
        stop = asyncio.create_task(self._shutdown.requested.wait())
        await asyncio.wait([starting, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if starting.done():
            return starting.result()

        async def cancel_start(_: Deadline) -> None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

        await self._shutdown.step("start", cancel_start, AFTER_DRAIN_S)
        return None

    async def _start(self, stack: contextlib.AsyncExitStack, report: StopReport) -> Services:
        """Start the parts in order; each pushes its stop onto the stack."""
        step = self._shutdown.step
        problem = await asyncio.to_thread(write_problem, self._store.folder)
        if isinstance(problem, TimeoutError):
            raise StartRefused(f"state folder {problem.strerror}")
        self._store.open(lock_folder(self._store.folder))
        stack.callback(self._store.close)
        stack.callback(self._host_lock.release)
        await self._host_lock.acquire()
        if armed := failpoints.armed_points():
            log.warning("failpoints.armed", points=armed)
        await hit_async("start.after_locks")
        plugins = create_plugin_host(self._settings, self._store)
        stack.push_async_callback(hit_async, "shutdown.after_plugins")
        stack.push_async_callback(step, "plugins", lambda _: plugins.close())
        await plugins.open(self._settings.plugins.open_timeout)
        background, problems = Background(self._shutdown.fail), Problems()
        with problems.collect():
            endpoint = await asyncio.to_thread(
                build_endpoint, self._settings.rpc, missing=problems.passing
            )
            missing = tuple(problems.passing)
        services, site, routes = await self._assemble(stack, plugins, background, problems)
        server = Server(
            title="agentd",
            routes=routes,
            site=site,
            endpoint=replace(endpoint, passed=self._passed_sockets),
            node_id=self._node_id,
            pages=Pages({HOME: "agentd"}),
        )
        self._reload = Reload(self._loaded, server, services.runtimes, self._names, missing)
        services.conditions.add(self._reload.conditions, server.address_conditions)
        services.conditions.add_slow("a socket", server.conditions)
        report.requests = server.cancelled
        stack.push_async_callback(hit_async, "shutdown.after_server")
        stack.push_async_callback(step, "server", server.stop, AFTER_SERVER_S)
        await server.start(self._names.group_id)
        await hit_async("start.after_server")
        stack.push_async_callback(
            step, "background tasks", lambda _: background.close(), AFTER_SERVER_S
        )
        background.run("reconciler", services.loops.run())
        background.run("claims", services.claim_ends.run())
        background.run("unclaimed", services.unclaimed.run())
        background.run("cores", services.cores.run())
        background.run("conditions", services.conditions.run())
        background.run("host", services.conditions.run_lookups())
        background.run("locks", self._hold_locks())
        update = services.node.devices.update_withholding
        background.run("host-lock", self._host_lock.watch(update))
        await self._wait_listed(services)
        await hit_async("start.before_ready")
        self._become_ready(services, site, background)
        return services

    def _become_ready(self, services: Services, site: NodeSite, background: Background) -> None:
        """Answer requests from now on, and start the tasks of a ready daemon."""
        node = services.node
        site.open()
        log.info("daemon.ready", node_id=self._node_id, kernels=len(node.state.kernels))
        self._status = self._status_line(services)
        self._notifier.ready(self._status)
        keep_ended, now = self._settings.node.keep_ended, self._context.clock.wall()
        reads = services.end_reads
        retention = Retention(node.state, services.kernels, keep_ended, reads, now=now)
        background.run("retention", retention.run())
        if self._notifier.is_enabled:
            background.run("status", self._update_status(services))
        background.run("reload", self._reload_on_hangup())
        background.run("missing", self._reload.run())
        background.run("log", self._report_lost_lines())

    async def _assemble(
        self,
        stack: contextlib.AsyncExitStack,
        plugins: PluginHost,
        background: Background,
        problems: Problems,
    ) -> tuple[Services, NodeSite, Sequence[Route]]:
        """Build the parts and restore the records.

        Raises:
            ConfigRefused: lists `problems`, and those of plugins, partition and host.
            StartRefused: a required plugin is not ready.
        """
        settings, context, store = self._settings, self._context, self._store
        lock, host, events = self._host_lock, probe(), EventLog()
        devices = await check_and_discover(
            settings, host, plugins, store, events, problems, self._names
        )
        problems.raise_if_any()
        refuse_failed_required(plugins)
        _log_unready_plugins(plugins)
        records = store.load_records()
        names = self._used_runtimes(records)
        runtimes = {
            name: self._create_runtime(name, stack)
            for name in names
            if name in runtime_factory.RUNTIMES
        }
        await hit_async("start.after_discover")
        node, claims = restore_node(settings, context, store, devices, events, names, records)
        await hit_async("start.after_recall")
        services = build_services(settings, context, store, lock, plugins, host, node, runtimes)
        services.claims.resume_claims(claims)
        stack.callback(self._record_accelerator_use, node)
        self._conditions = services.conditions
        for subject, find in (
            ("a credential", _credential_conditions),
            ("registry-auth", runtime_factory.login_conditions),
            ("allowed-mounts", runtime_factory.folder_conditions),
            ("the engine's networks", runtime_factory.network_conditions),
        ):
            self._conditions.add_slow(subject, partial(self._find_conditions, find))
        self._conditions.add(
            partial(limit_conditions, runtimes[settings.node.runtime]),
            lambda: background.conditions,
            lambda: (Condition("log", *texts) for texts in LOST.problems()),
        )
        site, routes = build_site(settings, context, plugins, services, self._reload_now)
        return services, site, routes

    def _record_accelerator_use(self, node: Node) -> None:
        """Note for the host lock, at a stop, whether kernels or claims use real accelerators."""
        by_id, holders = node.devices.inventory.by_id, node.state.ledger.shares_by_device
        is_used = any(
            device_id not in by_id or by_id[device_id].is_real_accelerator for device_id in holders
        )
        self._host_lock.set_in_use(is_used=is_used, is_known=node.state.is_listed)

    async def _wait_listed(self, services: Services) -> None:
        """Wait until every runtime has returned its first list or failed to."""
        state, reconciler = services.node.state, services.reconciler
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LIST_TIMEOUT_S):
                await reconciler.wait_first_lists()
        reconciler.mark_unanswered(f"no list within {FIRST_LIST_TIMEOUT_S:g} s")
        used = {kernel.runtime for kernel in state}
        used |= {name for name, status in state.runtimes.items() if not status.is_listed}
        self._store.save_runtimes(sorted(used | {self._settings.node.runtime}))

    async def _hold_locks(self) -> None:
        """Take locks again whose files were removed or replaced; stop if another daemon has one."""
        lookups, store = Lookups(max_threads=1), self._store
        while True:
            await asyncio.sleep(LOCK_PAUSE_S)
            with contextlib.suppress(RuntimeUnavailable, OSError):  # of the file system
                await lookups.call("the locks", lambda: store.hold_locks(lock_folder(store.folder)))

    async def _reload_now(self) -> list[str]:
        """Reload the configuration and return the keys that require a restart.

        Raises:
            ConfigRefused: the configuration is unusable; nothing has changed.
        """
        self._notifier.reloading()
        try:
            needs_restart = await self._reload.apply_and_log()
            await self._conditions.refresh_lookups()
            return needs_restart
        finally:
            self._notifier.ready(self._status)

    def _find_conditions(self, find: Callable[[Settings], Iterable[Condition]]) -> list[Condition]:
        """Return the conditions of the settings in force."""
        return [*find(self._reload.settings)]

    async def _reload_on_hangup(self) -> None:
        """Reload on each SIGHUP."""
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            with contextlib.suppress(ConfigRefused):  # it was logged
                await self._reload_now()

    @staticmethod
    async def _report_lost_lines() -> None:
        while True:
            await asyncio.sleep(LOG_RETRY_S)
            report_lost_lines()

    async def _update_status(self, services: Services) -> None:
        """Keep systemd's STATUS= line current, at most `STATUS_PAUSE_S` late."""
        while True:
            await asyncio.sleep(STATUS_PAUSE_S)
            if (status := self._status_line(services)) != self._status:
                self._status = status
                self._notifier.status(status)

    def _status_line(self, services: Services) -> str:
        return status_line(self._node_id, services.node, services.conditions.current())

    def _used_runtimes(self, records: Sequence[SavedRecord]) -> list[str]:
        """Return the configured runtime, and the others that may have kernels of this node.

        Without a record of them, every available engine may have some.
        """
        node = self._store.load_node()
        used = {self._settings.node.runtime, *(node.runtimes if node else ())}
        used |= recorded_runtimes(records) | self._store.runtimes_with_folders()
        if node is None and os.access(self._settings.runtime.docker.socket, os.W_OK):
            used.add("docker")
        self._store.save_runtimes(sorted(used))
        return sorted(used)

    def _create_runtime(self, name: str, stack: contextlib.AsyncExitStack) -> Runtime:
        runtime = runtime_factory.create_runtime(
            *(name, self._settings, self._node_id),
            *(self._store.runtime_folders, self._names.accounts),
        )
        step = f"runtime {name}"
        stack.push_async_callback(
            self._shutdown.step, step, lambda _: runtime.close(), AFTER_RUNTIMES_S
        )
        return runtime


def _log_unready_plugins(plugins: PluginHost) -> None:
    for status in plugins.statuses():
        if status.reason:  # a condition warns of those that are needed
            log.info("plugin.unavailable", plugin=status.name, reason=status.reason)


def _credential_conditions(settings: Settings) -> Iterator[Condition]:
    """Yield the conditions of the credentials of callers, as their files are now."""
    texts = credential_weaknesses(settings.rpc)
    return (Condition("host", text, agents=()) for text in texts)
