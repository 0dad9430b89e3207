"""Assembly of the parts of a node, bottom up: state, services, site. Nothing runs yet."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import structlog

from agentd.config.loading import Loaded
from agentd.config.settings import Settings
from agentd.core.claim.claim import Claim
from agentd.core.slots import BUILT_IN
from agentd.daemon import runtime_factory
from agentd.daemon.problems import Problems
from agentd.errors import ConfigRefused, Problem, StartRefused
from agentd.events import EventLog
from agentd.host.cgroups.usage import groups_of
from agentd.host.claim_holders import HostHolders
from agentd.host.probe import Host, derived_node_id, is_port_free
from agentd.http.route import Route
from agentd.plugin_api import NODE_ID_VARIABLE, Features
from agentd.pluginhost.dealing import DealingRules
from agentd.pluginhost.host import PluginHost
from agentd.pluginhost.instance import PluginTimeouts
from agentd.rpc.claims import ClaimHandlers
from agentd.rpc.devices import DeviceHandlers
from agentd.rpc.events import EventHandlers
from agentd.rpc.kernels import KernelHandlers
from agentd.rpc.metrics import Metrics
from agentd.rpc.node import NodeHandlers
from agentd.rpc.rendering import node_view, status_line
from agentd.rpc.routes import routes
from agentd.rpc.site import NodeSite
from agentd.rpc.visibility import Visibility
from agentd.service.boot_id import boot_id
from agentd.services.access import Access
from agentd.services.claims.counts import ClaimCounts
from agentd.services.claims.lifecycle import ClaimService
from agentd.services.claims.records import recall_claims
from agentd.services.counts import NodeCounts
from agentd.services.devices import NodeDevices
from agentd.services.engines import Engines
from agentd.services.kernels.exec import Execs
from agentd.services.kernels.lifecycle import KernelService
from agentd.services.kernels.reconciler import Loops, Reconciler
from agentd.services.kernels.records import recall, remember
from agentd.services.planner import NodeRules, Planner
from agentd.services.protocols import Clock, Runtime
from agentd.services.refusals import Refusals
from agentd.services.selfcheck import SelfCheck
from agentd.services.state import NodeState
from agentd.services.statistics import Statistics
from agentd.services.unclaimed import UnclaimedProcesses
from agentd.state.folder import StateFolder
from agentd.state.host_lock import HostLock, run_folder
from agentd.state.schemas import SavedRecord

log = structlog.get_logger()


def pace_of(settings: Settings) -> PluginTimeouts:
    """Return the deadlines and intervals of plugins."""
    return PluginTimeouts(settings.plugins.call_timeout, settings.plugins.health_interval)


def plugin_host(settings: Settings, store: StateFolder) -> PluginHost:
    """Return the configured plugins, not started.

    In auto-split they may deal their devices, unless the store has a dealing already. They find
    the node's id in their environment, which is this process's.
    """
    with contextlib.suppress(ConfigRefused):
        os.environ[NODE_ID_VARIABLE] = node_id_of(settings)
    plugins, features = settings.plugins, Features(settings.node.runtime)
    rules = settings.split_rules()
    agents = tuple(rule.agent_id for rule in rules.agents)
    return PluginHost(
        plugins.tables,
        plugins.allow,
        plugins.block,
        features=features,
        pace=pace_of(settings),
        dealing_rules=DealingRules(agents, store) if rules.are_plugins_asked else None,
    )


@contextlib.asynccontextmanager
async def opened_plugins(settings: Settings, store: StateFolder) -> AsyncIterator[PluginHost]:
    """Open the configured plugins for a command, and close them afterwards."""
    plugins = plugin_host(settings, store)
    try:
        await plugins.open(settings.plugins.open_timeout)
        yield plugins
    finally:
        await plugins.close()


async def discover(
    settings: Settings,
    host: Host,
    plugins: PluginHost,
    store: StateFolder,
    events: EventLog,
    problems: Problems,
) -> NodeDevices:
    """Discover the devices of open plugins and divide them; this is the second step of a start.

    Adds every problem of the plugins' tables, the partition and the host to `problems`. If there
    are any, the devices cannot be used.
    """
    with problems.collecting():
        runtime_factory.refuse_unfit(settings)
    with problems.collecting():
        await runtime_factory.refuse_changed_id(settings, node_id_of(settings), store)
    problems.found += plugins.problems()
    declared = settings.host
    devices = NodeDevices(
        plugins,
        store,
        settings.split_rules(),
        BUILT_IN,
        host.devices(declared.cpus, declared.mem),
        events,
    )
    with problems.collecting():
        devices.discover()
    return devices


def refuse_failed_required(plugins: PluginHost) -> None:
    """Refuse a start without a required plugin.

    Raises:
        StartRefused: a required plugin is not ready.
    """
    if missing := plugins.failed_required():
        raise StartRefused("; ".join(missing.values()))


def host_lock(settings: Settings) -> HostLock:
    """Return the lock of this host, not acquired.

    Raises:
        ConfigRefused: there is no node id.
    """
    is_user = os.geteuid() != 0
    return HostLock(run_folder(), node_id_of(settings), boot_id(), is_user=is_user)


def withhold_if_served(settings: Settings, devices: NodeDevices) -> list[str]:
    """Withhold the accelerators that another agentd serves, and return the warnings about it.

    Without a node id, this agentd could not be told apart from another one.
    """
    with contextlib.suppress(ConfigRefused):
        lock = host_lock(settings)
        lock.read()
        devices.suspend_by(lambda inventory: inventory.with_withheld(lock.reason))
        return lock.warnings()
    return []


def node_id_of(settings: Settings) -> str:
    """Return the configured node id, or one derived from the machine id.

    Raises:
        ConfigRefused: there is neither.
    """
    if settings.node.id is not None:
        return settings.node.id
    try:
        return derived_node_id()
    except OSError as error:
        why = f"not set and not derivable: {error}"
        raise ConfigRefused([Problem("node.id", why)]) from None


class Recalled(NamedTuple):
    """The recorded node, before any runtime was called."""

    events: EventLog
    devices: NodeDevices
    state: NodeState
    planner: Planner
    counts: NodeCounts
    claims: Sequence[Claim]


class Services(NamedTuple):
    """The services of a node."""

    kernels: KernelService
    reconciler: Reconciler
    loops: Loops
    access: Access
    refusals: Refusals
    check: SelfCheck
    statistics: Statistics
    execs: Execs
    claims: ClaimService
    claim_counts: ClaimCounts
    engines: Engines
    unclaimed: UnclaimedProcesses
    holders: HostHolders


class Assembly:
    """The parts of one node, built from its settings and its host."""

    def __init__(
        self,
        loaded: Loaded,
        node_id: str,
        store: StateFolder,
        lock: HostLock,
        plugins: PluginHost,
        host: Host,
        clock: Clock,
    ) -> None:
        self._loaded = loaded
        self._settings = loaded.settings
        self._node_id = node_id
        self._store = store
        self._lock = lock
        self._plugins = plugins
        self._host = host
        self._clock = clock

    def recalled(
        self,
        devices: NodeDevices,
        events: EventLog,
        runtimes: Sequence[str],
        records: Sequence[SavedRecord],
        claim_records: Mapping[str, str],
    ) -> Recalled:
        """Return the node's state with its recorded kernels and claims."""
        state, clock = NodeState(runtimes, events), self._clock
        planner = Planner(devices, self._plugins, self._rules())
        claims = recall_claims(state, devices, claim_records, clock.wall())
        remember(state, self._store, self._node_id)
        recall(state, devices, records, self._settings.node.runtime, clock)
        state.listen(planner.notify_plugins)
        counts = NodeCounts(clock.steady)
        state.listen(counts.note)
        return Recalled(events, devices, state, planner, counts, claims)

    def services(self, node: Recalled, runtimes: Mapping[str, Runtime]) -> Services:
        """Return the services on top of a node's state."""
        state, devices = node.state, node.devices
        default, store, clock = self._settings.node.runtime, self._store, self._clock
        reconciler = Reconciler(state, devices, runtimes, default, store, clock)
        holders, claim_counts = HostHolders(), ClaimCounts()
        engines = Engines(devices, store, boot_id(), self._settings.resource.engine_devices)
        unclaimed = UnclaimedProcesses(
            state,
            devices,
            self._plugins,
            clock.steady,
            withholds=self._settings.resource.withhold_busy,
        )
        devices.suspend_by(
            lambda inventory: inventory.with_withheld(self._lock.reason).with_suspended(
                engines.awaited(inventory), unclaimed.busy
            )
        )
        claims = ClaimService(
            state,
            devices,
            node.planner,
            self._plugins,
            store,
            holders,
            clock,
            partial(time.clock_gettime, time.CLOCK_BOOTTIME),
            self._node_id,
            boot_id(),
            node.events,
            claim_counts,
        )
        return Services(
            KernelService(state, devices, node.planner, runtimes, default, store, clock),
            reconciler,
            Loops(reconciler, state, devices, runtimes, self._plugins),
            Access(state, devices),
            Refusals(node.counts, node.events, clock.wall),
            SelfCheck(state, devices, runtimes, store, holders),
            Statistics(state, devices, runtimes, self._plugins, clock, groups_of),
            Execs(state, runtimes, self._plugins),
            claims,
            claim_counts,
            engines,
            unclaimed,
            holders,
        )

    def site(
        self,
        node: Recalled,
        services: Services,
        reload: Callable[[], Awaitable[list[str]]],
        warnings: Callable[[], Sequence[str]],
    ) -> tuple[NodeSite, Sequence[Route], Callable[[], str]]:
        """Return the site, its routes, and the status line for systemd.

        `warnings` are those of the running daemon.
        """
        settings, plugins = self._settings, self._plugins
        state, devices, access = node.state, node.devices, services.access
        visibility = Visibility(state, devices, access)
        site = NodeSite(state, devices, access, node.events, services.refusals)
        metrics = Metrics(
            self._node_id,
            state,
            devices,
            plugins,
            access,
            services.statistics,
            node.counts,
            services.claim_counts,
            services.unclaimed,
            is_per_kernel=settings.metrics.per_kernel,
        )
        lasting = runtime_factory.settings_warnings(settings)
        handlers = NodeHandlers(
            partial(node_view, self._node_id, settings.node.runtime, state, devices, plugins),
            state,
            access,
            plugins,
            services.reconciler,
            services.check,
            metrics,
            reload,
            lambda: [*lasting, *services.unclaimed.warnings(), *warnings()],
            partial(runtime_factory.runtime_warnings, settings, plugins),
        )
        kernels = KernelHandlers(
            site,
            state,
            devices,
            access,
            services.kernels,
            services.execs,
            services.statistics,
        )
        table = routes(
            site,
            handlers,
            DeviceHandlers(state, devices, access, visibility, services.engines),
            kernels,
            EventHandlers(node.events, services.refusals, visibility, site.streams),
            ClaimHandlers(
                devices,
                services.claims,
                services.holders,
                lambda: list(state),
            ),
        )
        return site, table, partial(status_line, self._node_id, state, devices)

    def _rules(self) -> NodeRules:
        return NodeRules(
            self._node_id,
            self._settings.policy(),
            self._settings.resource.default_slots,
            self._host.real_cores,
            self._settings.runtime.docker.ports,
            is_port_free,
        )
