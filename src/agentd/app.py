"""The composition root: builds the parts, starts them in order, stops them in reverse.

Order of the start: state folder and locks, plugins, partition, socket, kernels, ready.
Nothing on the way down touches a kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from agentd import failpoints
from agentd.config.loading import Loaded
from agentd.config.runtimes import DockerSettings
from agentd.config.settings import Settings
from agentd.core.reconcile import FoundState
from agentd.core.slots import BUILT_IN
from agentd.errors import ConfigRefused, Problem, RuntimeUnavailable, StartRefused
from agentd.failpoints import reach
from agentd.host.cgroups import find_memory_groups
from agentd.host.probe import Host, boot_id, derived_node_id, is_port_free, probe
from agentd.host.sd_notify import Notifier
from agentd.plugin_api import Features
from agentd.pluginhost.host import PluginHost
from agentd.pluginhost.instance import Pace
from agentd.rpc.handlers import Handlers
from agentd.rpc.server import Endpoint, Server
from agentd.runtimes.docker.config import DockerRules
from agentd.runtimes.docker.runtime import DockerRuntime
from agentd.runtimes.process.proof import keepers
from agentd.runtimes.process.runtime import ProcessRuntime
from agentd.services.adoption import Adoption
from agentd.services.devices import NodeDevices
from agentd.services.interfaces import Clock, Memory, Runtime
from agentd.services.kernels import KernelService
from agentd.services.monitor import Monitor
from agentd.services.planner import NodeRules, Planner
from agentd.state.folder import StateDir

log = structlog.get_logger()

RUNTIMES = {"docker", "process"}
FIRST_LIST_TIMEOUT_S = 20.0
DRAIN_TIMEOUT_S = 20.0


def pace_of(settings: Settings) -> Pace:
    """Return the deadlines and intervals that plugins are held to."""
    return Pace(settings.plugins.call_timeout, settings.plugins.health_interval)


def plugin_host(settings: Settings) -> PluginHost:
    """Return the plugins that the configuration asks for, none of them started."""
    plugins, features = settings.plugins, Features(settings.node.runtime)
    return PluginHost(
        plugins.tables, plugins.allow, plugins.block, features=features, pace=pace_of(settings)
    )


async def open_plugins(loaded: Loaded) -> PluginHost:
    """Load and open the plugins as the configuration says.

    What is wrong with their tables is reported by `discover`, beside all else.

    Raises:
        StartRefused: a required plugin is not ready.
    """
    settings = loaded.settings
    host = plugin_host(settings)
    await host.open(settings.plugins.open_timeout)
    if missing := host.failed_required():
        await host.close()
        if problems := host.problems():
            raise ConfigRefused(problems, str(loaded.path or "defaults"))
        raise StartRefused("; ".join(missing))
    return host


def discover(loaded: Loaded, host: Host, plugins: PluginHost, memory: Memory) -> NodeDevices:
    """Find the devices and divide them.

    Raises:
        ConfigRefused: the configuration does not fit what was found.
    """
    declared = loaded.settings.host
    devices = NodeDevices(
        plugins,
        memory,
        loaded.settings.split_rules(),
        BUILT_IN,
        host.devices(declared.cpus, declared.mem),
    )
    problems = plugins.problems()
    try:
        devices.discover()
    except ConfigRefused as error:
        problems += error.problems
    if problems:
        raise ConfigRefused(problems, str(loaded.path or "defaults"))
    return devices


def node_id_of(settings: Settings) -> str:
    """Return the configured node id, or one derived from the machine's.

    Raises:
        ConfigRefused: there is neither.
    """
    if settings.node.id is not None:
        return settings.node.id
    try:
        return derived_node_id()
    except OSError as error:
        why = f"is not set, and cannot be derived: {error}"
        raise ConfigRefused([Problem("node.id", why)]) from None


class Daemon:
    """One running agentd."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._settings = loaded.settings
        self._node_id = node_id_of(loaded.settings)
        self._state = StateDir(loaded.settings.node.state_dir.absolute())
        self._notifier = Notifier()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            ConfigRefused, StartRefused: it cannot run like this, or here.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        async with contextlib.AsyncExitStack() as stack:
            self._state.open()
            stack.callback(self._state.close)
            self._state.lock_node(self._node_id, _lock_folder())
            if points := failpoints.armed():
                log.warning("failpoints.armed", points=points)
            await reach("start.after_locks")
            await self._refuse_changed_id()
            plugins = await open_plugins(self._loaded)
            stack.push_async_callback(reach, "shutdown.after_plugins")
            stack.push_async_callback(plugins.close)
            service = await self._service(stack, plugins)
            await reach("start.after_discover")
            adoption = Adoption(service)
            adoption.recall_intents()
            await reach("start.after_recall")
            handlers = Handlers(self._node_id, service, adoption, plugins)
            server = Server(handlers, _endpoint(self._settings))
            await server.start()
            stack.push_async_callback(reach, "shutdown.after_server")
            stack.push_async_callback(server.stop)
            await reach("start.after_server")
            await stack.enter_async_context(_running(Monitor(service, adoption, plugins)))
            await self._until_listed(adoption, service)
            await reach("start.before_ready")
            handlers.is_ready = True
            kernels = len(service.table.kernels)
            log.info("daemon.ready", node_id=self._node_id, kernels=kernels)
            self._notifier.ready(f"serving node {self._node_id}; {kernels} kernels adopted")
            await self._until_stopped()
            self._notifier.stopping()
            log.info("daemon.stopping")
            await reach("shutdown.before_drain")
            await service.drain(DRAIN_TIMEOUT_S)
            await reach("shutdown.after_drain")
        log.info("daemon.stopped")

    async def _service(
        self, stack: contextlib.AsyncExitStack, plugins: PluginHost
    ) -> KernelService:
        host = probe()
        devices = discover(self._loaded, host, plugins, self._state)
        for status in plugins.statuses():
            if status.reason:
                say = log.warning if status.has_table else log.info
                say("plugin.not_ready", plugin=status.name, reason=status.reason)
        for warning in devices.warnings:
            log.warning("node.warning", warning=warning)
        runtimes = self._runtimes()
        for runtime in runtimes.values():
            stack.push_async_callback(runtime.close)
        slots = self._settings.resource.default_slots
        rules = NodeRules(
            self._node_id,
            self._settings.policy(),
            slots,
            host.real_cores,
            self._settings.runtime.docker.ports,
            is_port_free,
        )
        planner = Planner(devices, plugins, rules)
        default = self._settings.node.runtime
        clock = Clock(time.time, time.monotonic)
        return KernelService(devices, planner, runtimes, default, self._state, clock)

    async def _until_listed(self, adoption: Adoption, service: KernelService) -> None:
        """Wait until every runtime gave its first list, or could not."""

        async def all_tried() -> None:
            for event in adoption.first_try.values():
                await event.wait()

        ends = [asyncio.create_task(all_tried()), asyncio.create_task(_until(self._stop))]
        await asyncio.wait(ends, timeout=FIRST_LIST_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        for name, event in adoption.first_try.items():
            if not event.is_set():
                why = f"gave no list within {FIRST_LIST_TIMEOUT_S:g} s"
                adoption.unavailable(name, why)
        used = {kernel.runtime for kernel in service.table} | set(service.not_listed)
        self._state.save_node(self._node_id, sorted(used | {service.default.name}))

    async def _until_stopped(self) -> None:
        """Wait for a signal, and meanwhile keep systemd's watchdog quiet, if it watches."""
        interval_s = self._notifier.watchdog_s
        while not self._stop.is_set():
            try:
                async with asyncio.timeout(interval_s / 2 if interval_s else None):
                    await self._stop.wait()
            except TimeoutError:
                self._notifier.alive()

    def _runtimes(self) -> dict[str, Runtime]:
        """Make the configured runtime, and the other one if it may have kernels of ours.

        Where it is not remembered which ones had some, an engine that can be asked may have.
        """
        default = self._settings.node.runtime
        node = self._state.load_node()
        used = {default, *(node.runtimes if node else ())}
        used |= {intent.runtime for intent in self._state.load_intents()}
        used &= RUNTIMES
        if "process" not in used and (
            any(self._state.kernels.glob("[!.]*")) or keepers(self._node_id)
        ):
            used.add("process")
        if node is None and os.access(self._settings.runtime.docker.socket, os.W_OK):
            used.add("docker")
        self._state.save_node(self._node_id, sorted(used))
        return {name: self._runtime(name, self._node_id) for name in sorted(used)}

    def _runtime(self, name: str, node_id: str) -> Runtime:
        if name == "docker":
            docker = self._settings.runtime.docker
            return DockerRuntime(docker.socket, node_id, _docker_rules(docker))
        user = self._settings.runtime.process.user
        return ProcessRuntime(self._state.kernels, node_id, user, boot_id(), find_memory_groups())

    async def _refuse_changed_id(self) -> None:
        """Refuse another node id while kernels of the old one live.

        Raises:
            ConfigRefused: some do, or it cannot be told.
        """
        node = self._state.load_node()
        if node is None or node.node_id == self._node_id:
            return
        old = node.node_id
        for name in RUNTIMES & {*node.runtimes, "process"}:
            runtime = self._runtime(name, old)
            try:
                found = await runtime.list()
            except RuntimeUnavailable as error:
                why = f"the {name} runtime does not say whether kernels of {old} live: {error}"
                raise ConfigRefused([Problem("node.id", why)]) from None
            finally:
                await runtime.close()
            if live := [k.kernel_id for k in found if k.state is not FoundState.EXITED]:
                why = (
                    f"was {old}, whose kernels {', '.join(sorted(live))} live;"
                    f" go back to it, or remove them first"
                )
                raise ConfigRefused([Problem("node.id", why)], str(self._loaded.path or ""))


async def _until(event: asyncio.Event) -> None:
    await event.wait()


@contextlib.asynccontextmanager
async def _running(monitor: Monitor) -> AsyncIterator[None]:
    task = asyncio.create_task(monitor.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _docker_rules(docker: DockerSettings) -> DockerRules:
    return DockerRules(
        network=docker.network,
        allowed_networks=docker.allowed_networks,
        allowed_mounts=docker.allowed_mounts,
        capabilities=docker.capabilities,
        pids_limit=docker.pids_limit,
        log_max_size=docker.log_max_size,
        log_max_files=docker.log_max_files,
        registry_auth=docker.registry_auth,
        stop_timeout_s=docker.stop_timeout,
    )


def _lock_folder() -> Path:
    if os.geteuid() == 0:
        return Path("/run/agentd")
    return Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"))  # noqa: S108 - a lock, with the user's mode


def _endpoint(settings: Settings) -> Endpoint:
    rpc = settings.rpc
    if rpc.listen is None:
        return Endpoint(rpc.socket.absolute(), rpc.socket_group)
    host, port = rpc.host_port
    return Endpoint(
        rpc.socket.absolute(),
        rpc.socket_group,
        str(host),
        port,
        _token(rpc.token_file),
        _tls(settings),
    )


def _token(path: Path | None) -> str:
    """Read the bearer token.

    Raises:
        ConfigRefused: there is none in the file.
    """
    try:
        token = path.read_text(encoding="utf-8").strip() if path else ""
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}"
        raise ConfigRefused([Problem("rpc.token-file", why)]) from None
    if not token:
        raise ConfigRefused([Problem("rpc.token-file", f"{path} is empty; it needs one line")])
    return token


def _tls(settings: Settings) -> ssl.SSLContext | None:
    rpc = settings.rpc
    if rpc.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(rpc.tls_cert, rpc.tls_key)
    except (OSError, ssl.SSLError) as error:
        why = f"{rpc.tls_cert} and {rpc.tls_key} cannot be used: {error}"
        raise ConfigRefused([Problem("rpc.tls-cert", why)]) from None
    return context
