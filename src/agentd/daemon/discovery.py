"""The discovery of plugins and devices, which a start and a configuration check share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from agentd.config.settings import Settings
from agentd.core.devices import Withholding, group_by_name
from agentd.core.slots import BUILT_IN
from agentd.daemon import runtime_factory
from agentd.daemon.host_names import HostNames
from agentd.daemon.problems import Problems
from agentd.errors import ConfigRefused, Problem, StartRefused
from agentd.events import EventLog
from agentd.host.probe import Host, derive_node_id
from agentd.plugin_api import NODE_ID_VARIABLE, Features
from agentd.pluginhost.assignment import AssignmentRules
from agentd.pluginhost.host import PluginHost
from agentd.pluginhost.instance import PluginTimeouts
from agentd.program.boot_id import boot_id
from agentd.services.devices import NodeDevices
from agentd.services.protocols import PluginListing
from agentd.state.folder import StateFolder
from agentd.state.host_lock import HostLock
from agentd.state.locks import run_folder


def plugin_timeouts(settings: Settings) -> PluginTimeouts:
    """Return the deadlines and intervals of plugins."""
    return PluginTimeouts(
        call_timeout_s=settings.plugins.call_timeout,
        health_interval_s=settings.plugins.health_interval,
    )


def create_plugin_host(settings: Settings, store: StateFolder) -> PluginHost:
    """Return the configured plugins, not started.

    In auto-split they may assign their devices to agents, unless the store has an assignment
    already. They find the node's id in their environment, which is this process's.
    """
    with contextlib.suppress(ConfigRefused):
        os.environ[NODE_ID_VARIABLE] = resolve_node_id(settings)
    plugins, features = settings.plugins, Features(settings.node.runtime)
    rules = settings.split_rules()
    agents = tuple(rule.agent_id for rule in rules.agents)
    return PluginHost(
        tables=plugins.tables,
        allow=plugins.allow,
        block=plugins.block,
        features=features,
        timeouts=plugin_timeouts(settings),
        dealing_rules=AssignmentRules(agents, store, rules.exclude)
        if rules.uses_plugin_order
        else None,
        stopped=_stopped_plugins(store),
    )


def _stopped_plugins(store: StateFolder) -> dict[str, tuple[str, PluginListing | None]]:
    """Return the plugins that an operator stopped, with the reason and what they listed last."""
    saved = store.load_devices()
    devices = group_by_name(saved.devices)
    return {
        name: (
            plugin.reason,
            PluginListing(
                name,
                plugin.slot_types,
                tuple(device for device in devices.get(name, ()) if not device.gone),
                is_restored=True,
            )
            if plugin.slot_types
            else None,
        )
        for name, plugin in saved.stopped.items()
    }


@contextlib.asynccontextmanager
async def open_plugins(settings: Settings, store: StateFolder) -> AsyncIterator[PluginHost]:
    """Open the configured plugins for a command, and close them afterwards."""
    plugins = create_plugin_host(settings, store)
    try:
        await plugins.open(settings.plugins.open_timeout)
        yield plugins
    finally:
        await plugins.close()


async def check_and_discover(
    settings: Settings,
    host: Host,
    plugins: PluginHost,
    store: StateFolder,
    events: EventLog,
    problems: Problems,
    names: HostNames,
) -> NodeDevices:
    """Check host and node id, discover the devices of open plugins, and divide these.

    This is the second step of a start. It adds every problem of the host, its users and groups,
    the plugins' tables and the partition to `problems`. If any is final, the devices cannot be
    used.
    """
    with problems.collect():
        runtime_factory.refuse_unusable_runtime(settings)
    with problems.collect():
        await names.refresh(settings)
    problems.passing += [p for key, p in names.problems.items() if not key.startswith("rpc.")]
    with problems.collect():
        await runtime_factory.refuse_changed_id(settings, resolve_node_id(settings), store)
    problems.collected += plugins.problems()
    devices = NodeDevices(
        plugins=plugins,
        store=store,
        rules=settings.split_rules(),
        host_types=BUILT_IN,
        host_devices=host.devices(settings.host.cpus, settings.host.mem),
        events=events,
    )
    with problems.collect():
        devices.discover()
    return devices


def refuse_failed_required(plugins: PluginHost) -> None:
    """Refuse a start without a required plugin.

    Raises:
        StartRefused: a required plugin is not ready.
    """
    if missing := plugins.required_failures():
        raise StartRefused("; ".join(missing.values()))


def create_host_lock(settings: Settings) -> HostLock:
    """Return the lock of this host, not acquired.

    Raises:
        ConfigRefused: there is no node id.
        StartRefused: there is no boot id.
    """
    is_user = os.geteuid() != 0
    return HostLock(run_folder(), resolve_node_id(settings), boot_id(), is_unprivileged=is_user)


def withhold_if_served(settings: Settings, devices: NodeDevices) -> list[str]:
    """Withhold the accelerators that another agentd serves, and return the warnings about it.

    Without a node id and a boot id, this agentd could not be told apart from another one.
    """
    with contextlib.suppress(ConfigRefused, StartRefused):
        lock = create_host_lock(settings)
        lock.read()
        devices.set_withholding(lambda _: Withholding(lock.reason))
        return [*map(str, lock.conditions())]
    return []


def resolve_node_id(settings: Settings) -> str:
    """Return the configured node id, or one derived from the machine id.

    Raises:
        ConfigRefused: there is neither.
    """
    if settings.node.id is not None:
        return settings.node.id
    try:
        return derive_node_id()
    except OSError as error:
        cause = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
        reason = f"not set and not derivable: {cause}; set it, or AGENTD__NODE__ID"
        raise ConfigRefused([Problem("node.id", reason)]) from None
