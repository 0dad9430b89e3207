"""The parts of a node, and what each is given. Nothing runs yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from agentd.config.settings import Settings
from agentd.core.claim.claim import Claim
from agentd.daemon import runtime_factory
from agentd.events import EventLog
from agentd.host.cgroups.usage import read_cgroups
from agentd.host.claim_holders import HolderObserver
from agentd.host.probe import Host, is_port_free
from agentd.http.route import Route
from agentd.pluginhost.host import PluginHost
from agentd.rpc.claims import ClaimHandlers
from agentd.rpc.devices import DeviceHandlers
from agentd.rpc.events import EventHandlers
from agentd.rpc.kernels import KernelHandlers
from agentd.rpc.metrics import Metrics
from agentd.rpc.node import NodeHandlers, RuntimeHandlers
from agentd.rpc.rendering import node_view
from agentd.rpc.routes import routes
from agentd.rpc.site import NodeSite
from agentd.rpc.visibility import Visibility
from agentd.services.access import Access
from agentd.services.claims.claim_service import ClaimService
from agentd.services.claims.counts import ClaimCounts
from agentd.services.claims.records import restore_claims
from agentd.services.counts import NodeCounts
from agentd.services.devices import NodeDevices
from agentd.services.engines import AwaitedEngines
from agentd.services.kernels.exec_service import ExecService
from agentd.services.kernels.kernel_service import KernelService
from agentd.services.kernels.reconciler import Reconciler, ReconcilerLoops
from agentd.services.kernels.records import persist_changes, restore_kernels
from agentd.services.node import Node, NodeContext
from agentd.services.planner import NodeRules, Planner
from agentd.services.protocols import Runtime
from agentd.services.refusals import Refusals
from agentd.services.selfcheck import SelfCheck
from agentd.services.state import NodeState
from agentd.services.statistics import Statistics
from agentd.services.unclaimed import UnclaimedProcesses
from agentd.state.folder import StateFolder
from agentd.state.host_lock import HostLock
from agentd.state.schemas import SavedRecord


class RestoredNode(msgspec.Struct, frozen=True):
    """The recorded node, before any runtime was called."""

    node: Node
    planner: Planner
    claims: Sequence[Claim]


class Services(msgspec.Struct, frozen=True):
    """The services of a node."""

    kernels: KernelService
    reconciler: Reconciler
    loops: ReconcilerLoops
    access: Access
    refusals: Refusals
    self_check: SelfCheck
    statistics: Statistics
    execs: ExecService
    claims: ClaimService
    engines: AwaitedEngines
    unclaimed: UnclaimedProcesses
    holder_observer: HolderObserver


class Assembly:
    """The parts of one node, built from its settings and its host, bottom up."""

    def __init__(
        self,
        settings: Settings,
        context: NodeContext,
        store: StateFolder,
        lock: HostLock,
        plugins: PluginHost,
        host: Host,
    ) -> None:
        self._settings = settings
        self._context = context
        self._store = store
        self._lock = lock
        self._plugins = plugins
        self._host = host

    def restore_node(
        self,
        devices: NodeDevices,
        events: EventLog,
        runtimes: Sequence[str],
        records: Sequence[SavedRecord],
        claim_records: Mapping[str, str],
    ) -> RestoredNode:
        """Return the node's state with its recorded kernels and claims."""
        node_id, clock = self._context.node_id, self._context.clock
        node = Node(
            state=NodeState(runtimes, events),
            devices=devices,
            events=events,
            counts=NodeCounts(clock.steady),
            claim_counts=ClaimCounts(),
        )
        rules = NodeRules(
            node_id=node_id,
            policy=self._settings.policy(),
            default_slots=self._settings.resource.default_slots,
            real_cores=self._host.real_cores,
            ports=self._settings.runtime.docker.ports,
            is_port_free=is_port_free,
        )
        planner = Planner(devices=devices, plugins=self._plugins, rules=rules)
        claims = restore_claims(node.state, devices, claim_records, clock.wall())
        persist_changes(node.state, self._store, node_id)
        restore_kernels(node.state, devices, records, self._settings.node.runtime, clock)
        node.state.subscribe(planner.notify_plugins)
        node.state.subscribe(node.counts.on_kernel_change)
        return RestoredNode(node, planner, claims)

    def build_services(self, recalled: RestoredNode, runtimes: Mapping[str, Runtime]) -> Services:
        """Return the services on top of a node's state."""
        node, planner = recalled.node, recalled.planner
        plugins, store, clock = self._plugins, self._store, self._context.clock
        default, resource = self._settings.node.runtime, self._settings.resource
        holders = HolderObserver()
        reconciler = Reconciler(
            node=node, runtimes=runtimes, default=default, store=store, clock=clock
        )
        engines = AwaitedEngines(
            devices=node.devices,
            store=store,
            boot_id=self._context.boot_id,
            wanted=resource.engine_devices,
        )
        unclaimed = UnclaimedProcesses(
            node=node, plugins=plugins, clock=clock.steady, withholds=resource.withhold_busy
        )
        node.devices.set_withholding(
            lambda inventory: inventory.with_withheld(self._lock.reason).with_awaited_and_busy(
                engines.awaited_devices(inventory), unclaimed.busy_reasons
            )
        )
        claims = ClaimService(
            node=node,
            context=self._context,
            planner=planner,
            plugins=plugins,
            store=store,
            holders=holders,
        )
        node.state.subscribe(claims.on_kernel_change)
        return Services(
            kernels=KernelService(
                node=node,
                planner=planner,
                runtimes=runtimes,
                default=default,
                store=store,
                clock=clock,
            ),
            reconciler=reconciler,
            loops=ReconcilerLoops(
                reconciler=reconciler, node=node, runtimes=runtimes, plugins=plugins
            ),
            access=Access(node),
            refusals=Refusals(counts=node.counts, events=node.events, now=clock.wall),
            self_check=SelfCheck(node=node, runtimes=runtimes, store=store, holders=holders),
            statistics=Statistics(
                node=node, runtimes=runtimes, plugins=plugins, clock=clock, groups_of=read_cgroups
            ),
            execs=ExecService(state=node.state, runtimes=runtimes, plugins=plugins),
            claims=claims,
            engines=engines,
            unclaimed=unclaimed,
            holder_observer=holders,
        )

    def build_site(
        self,
        node: Node,
        services: Services,
        reload: Callable[[], Awaitable[list[str]]],
        warnings: Callable[[], Sequence[str]],
    ) -> tuple[NodeSite, Sequence[Route]]:
        """Return the site and its routes; `warnings` are those of the running daemon."""
        settings, plugins, node_id = self._settings, self._plugins, self._context.node_id
        access, refusals, unclaimed = services.access, services.refusals, services.unclaimed
        visibility = Visibility(node, access)
        site = NodeSite(node, access, refusals)
        lasting = runtime_factory.settings_warnings(settings)
        table = routes(
            site=site,
            node=NodeHandlers(
                view=lambda: node_view(
                    node_id=node_id,
                    default_runtime=settings.node.runtime,
                    node=node,
                    plugins=plugins,
                    warnings=[*lasting, *unclaimed.warnings(), *warnings()],
                ),
                host_warnings=partial(runtime_factory.runtime_warnings, settings, plugins),
                state=node.state,
                access=access,
                check=services.self_check,
                metrics=Metrics(
                    node_id=node_id,
                    node=node,
                    plugins=plugins,
                    access=access,
                    statistics=services.statistics,
                    unclaimed=unclaimed,
                    is_per_kernel=settings.metrics.per_kernel,
                ),
                reload=reload,
            ),
            runtimes=RuntimeHandlers(node.state, services.reconciler, plugins),
            devices=DeviceHandlers(
                node=node, access=access, visibility=visibility, engines=services.engines
            ),
            kernels=KernelHandlers(
                site=site,
                node=node,
                access=access,
                service=services.kernels,
                execs=services.execs,
                statistics=services.statistics,
            ),
            events=EventHandlers(
                events=node.events,
                refusals=refusals,
                visibility=visibility,
                streams=site.streams,
            ),
            claims=ClaimHandlers(
                node=node, service=services.claims, holders=services.holder_observer
            ),
        )
        return site, table
