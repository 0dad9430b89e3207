"""The parts of a node, and what each is given.

No task is started here. Restoring charges the recorded kernels and claims, and devices that nothing
may be allocated from yet are published as withheld.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from agentd.config.settings import Settings
from agentd.core.claim.claim import Claim
from agentd.core.devices import Inventory, Withholding
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
from agentd.services.claims.claim_ends import ClaimEnds
from agentd.services.claims.claim_service import ClaimService
from agentd.services.claims.counts import ClaimCounts
from agentd.services.claims.records import restore_claims
from agentd.services.condition_sources import (
    agent_conditions,
    engine_conditions,
    excess_conditions,
    kernel_conditions,
    runtime_conditions,
)
from agentd.services.conditions import Conditions
from agentd.services.counts import NodeCounts
from agentd.services.devices import NodeDevices
from agentd.services.engines import AwaitedEngines
from agentd.services.kernels.exec_service import ExecService
from agentd.services.kernels.kernel_service import KernelService
from agentd.services.kernels.pending_creates import PendingCreates
from agentd.services.kernels.reconciler import Reconciler, ReconcilerLoops
from agentd.services.kernels.records import persist_changes, restore_kernels
from agentd.services.kernels.retention import EndReads
from agentd.services.lost_cores import LostCores
from agentd.services.node import Node, NodeContext
from agentd.services.planner import NodeRules, Planner
from agentd.services.protocols import Clock, Runtime
from agentd.services.refusals import Refusals
from agentd.services.selfcheck import SelfCheck
from agentd.services.state import NodeState
from agentd.services.statistics import Statistics
from agentd.services.unclaimed import UnclaimedProcesses
from agentd.state.folder import StateFolder
from agentd.state.host_lock import HostLock
from agentd.state.schemas import SavedRecord


class Services(msgspec.Struct, frozen=True):
    """A node, its runtimes, and the services on top of them."""

    node: Node
    runtimes: Mapping[str, Runtime]
    planner: Planner
    creates: PendingCreates
    kernels: KernelService
    end_reads: EndReads
    reconciler: Reconciler
    loops: ReconcilerLoops
    access: Access
    refusals: Refusals
    self_check: SelfCheck
    statistics: Statistics
    execs: ExecService
    claims: ClaimService
    claim_ends: ClaimEnds
    engines: AwaitedEngines
    unclaimed: UnclaimedProcesses
    cores: LostCores
    holder_observer: HolderObserver
    conditions: Conditions


def restore_node(
    settings: Settings,
    context: NodeContext,
    store: StateFolder,
    devices: NodeDevices,
    events: EventLog,
    runtimes: Sequence[str],
    records: Sequence[SavedRecord],
) -> tuple[Node, Sequence[Claim]]:
    """Return the node with its recorded kernels and claims, before any runtime was called."""
    clock = context.clock
    node = Node(
        state=NodeState(runtimes, events),
        devices=devices,
        events=events,
        counts=NodeCounts(clock.steady),
        claim_counts=ClaimCounts(),
    )
    claims = restore_claims(node.state, devices, store.load_claims(), clock.wall())
    persist_changes(node.state, store, context.node_id)  # before kernels change, even restored ones
    restore_kernels(node.state, devices, records, settings.node.runtime, clock)
    return node, claims


def build_services(
    settings: Settings,
    context: NodeContext,
    store: StateFolder,
    lock: HostLock,
    plugins: PluginHost,
    host: Host,
    node: Node,
    runtimes: Mapping[str, Runtime],
) -> Services:
    """Return the services on top of a restored node."""
    clock, default, resource = context.clock, settings.node.runtime, settings.resource
    rules = NodeRules(
        node_id=context.node_id,
        policy=settings.policy(),
        default_slots=resource.default_slots,
        real_cores=host.real_cores,
        ports=settings.runtime.docker.ports,
        is_port_free=is_port_free,
    )
    planner = Planner(devices=node.devices, plugins=plugins, rules=rules)
    creates = PendingCreates(node.state, clock)
    holders = HolderObserver()
    reconciler = Reconciler(
        node=node, runtimes=runtimes, default_runtime_name=default, store=store, clock=clock
    )
    engines = AwaitedEngines(
        devices=node.devices,
        store=store,
        boot_id=context.boot_id,
        wanted=resource.engine_devices,
    )
    unclaimed = UnclaimedProcesses(
        node=node, plugins=plugins, clock=clock.steady, withholds=resource.withhold_busy
    )
    cores = LostCores(node.devices, host.real_cores, partial(os.sched_getaffinity, 0), clock.steady)
    node.devices.set_withholding(partial(_withhold, lock, cores, engines, unclaimed))
    claim_ends = ClaimEnds(node=node, store=store, holders=holders, clock=clock)
    claims = ClaimService(
        node=node,
        context=context,
        planner=planner,
        plugins=plugins,
        store=store,
        ends=claim_ends,
    )
    # Restored kernels are neither news to plugins nor creates to count: these subscribe after them,
    # and `Retention`, which counts those that had ended, when the daemon is ready.
    node.state.subscribe(planner.notify_plugins)
    node.state.subscribe(node.counts.on_kernel_change)
    node.state.subscribe(claims.on_kernel_change)
    return Services(
        node=node,
        runtimes=runtimes,
        planner=planner,
        creates=creates,
        kernels=KernelService(node, planner, creates, runtimes, default, store, clock, cores),
        end_reads=EndReads(clock.steady),
        reconciler=reconciler,
        loops=ReconcilerLoops(reconciler=reconciler, node=node, runtimes=runtimes, plugins=plugins),
        access=Access(node),
        refusals=Refusals(counts=node.counts, events=node.events, now=clock.wall),
        self_check=SelfCheck(node=node, runtimes=runtimes, store=store, holders=holders),
        statistics=Statistics(
            node=node, runtimes=runtimes, plugins=plugins, clock=clock, groups_of=read_cgroups
        ),
        execs=ExecService(state=node.state, runtimes=runtimes, plugins=plugins),
        claims=claims,
        claim_ends=claim_ends,
        engines=engines,
        unclaimed=unclaimed,
        cores=cores,
        holder_observer=holders,
        conditions=_build_conditions(settings, node, clock, plugins, unclaimed, engines, lock),
    )


def _build_conditions(
    settings: Settings,
    node: Node,
    clock: Clock,
    plugins: PluginHost,
    unclaimed: UnclaimedProcesses,
    engines: AwaitedEngines,
    lock: HostLock,
) -> Conditions:
    conditions = Conditions(node.events, clock, Access(node).owners)
    conditions.add(
        node.devices.conditions,
        partial(runtime_conditions, node.state),
        partial(excess_conditions, node),
        unclaimed.conditions,
        partial(kernel_conditions, node.state),
        partial(agent_conditions, node),
        partial(engine_conditions, engines),
        lock.conditions,
    )
    find_host_conditions = runtime_factory.find_host_conditions
    conditions.add_slow("this host", partial(find_host_conditions, settings, plugins, node.state))
    return conditions


def _withhold(
    lock: HostLock,
    cores: LostCores,
    engines: AwaitedEngines,
    unclaimed: UnclaimedProcesses,
    inventory: Inventory,
) -> Withholding:
    awaited = engines.awaited_devices(inventory)
    return Withholding(lock.reason, cores.reasons, awaited, unclaimed.busy_reasons)


def build_site(
    settings: Settings,
    context: NodeContext,
    plugins: PluginHost,
    services: Services,
    reload: Callable[[], Awaitable[list[str]]],
) -> tuple[NodeSite, Sequence[Route]]:
    """Return the site and its routes."""
    node, access, refusals = services.node, services.access, services.refusals
    visibility = Visibility(node, access)
    site = NodeSite(node, access, refusals)
    table = routes(
        site=site,
        node=NodeHandlers(
            view=partial(node_view, context.node_id, settings.node.runtime, node, plugins),
            conditions=services.conditions,
            access=access,
            check=services.self_check,
            metrics=Metrics(
                node_id=context.node_id,
                node=node,
                plugins=plugins,
                access=access,
                statistics=services.statistics,
                unclaimed=services.unclaimed,
                is_per_kernel=settings.metrics.per_kernel,
            ),
            reload=reload,
        ),
        runtimes=RuntimeHandlers(node, services.reconciler, plugins),
        devices=DeviceHandlers(
            node=node, access=access, visibility=visibility, engines=services.engines
        ),
        kernels=KernelHandlers(
            site=site,
            node=node,
            access=access,
            planner=services.planner,
            service=services.kernels,
            execs=services.execs,
            statistics=services.statistics,
            end_reads=services.end_reads,
        ),
        events=EventHandlers(
            events=node.events,
            refusals=refusals,
            visibility=visibility,
            streams=site.streams,
        ),
        claims=ClaimHandlers(node=node, service=services.claims, holders=services.holder_observer),
    )
    return site, table
