"""The node's devices and their partition, over the life of the daemon.

Listings of plugins, devices of the host and saved devices become one inventory and one partition.
The slots of a plugin are fixed when it opens. Health, drains and devices that are known only from
kernels change the inventory, and each change raises `generation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import structlog
from msgspec.structs import replace

from agentd.core.allocation.ledger import Holder
from agentd.core.conditions import Condition
from agentd.core.device_conditions import (
    about_device,
    about_name,
    device_conditions,
    unmatched_exclusions,
)
from agentd.core.devices import Device, Health, Inventory, Withholding, by_any_name
from agentd.core.hardware_names import normal_name
from agentd.core.listings import apply_listing
from agentd.core.partition.manual import missing_by_name
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.core.partition.rules import SplitRules
from agentd.core.partition.split import Partition, Split, split, split_late_devices
from agentd.core.places import in_places, place_new_devices
from agentd.core.slots import CPU, MEM, SlotType, device_name_of
from agentd.errors import (
    ConfigRefused,
    Conflict,
    StateUnavailable,
    UnknownAgent,
    UnknownDevice,
)
from agentd.events import EventKind, EventLog
from agentd.failpoints import hit
from agentd.services.device_listings import (
    devices_to_save,
    merge_devices,
    missing_slot_types,
    unlisted_reasons,
)
from agentd.services.protocols import PluginListing, Plugins, PluginState, PluginStatus
from agentd.state.folder import StateFolder
from agentd.state.schemas import SavedDevices, StoppedPlugin

log = structlog.get_logger()

_REMEDIES = {
    PluginState.STOPPED: "to start it: agentctl plugins start",
    PluginState.PENDING: "to retry at once: agentctl plugins retry",
    PluginState.FAILED: "to retry at once: agentctl plugins retry",
}


class NodeDevices:
    """The inventory and partition of this node; call `discover` first."""

    def __init__(
        self,
        plugins: Plugins,
        store: StateFolder,
        rules: SplitRules,
        host_types: Sequence[SlotType],
        host_devices: Sequence[Device],
        events: EventLog,
    ) -> None:
        self._plugins = plugins
        self._store = store
        self._rules = rules
        self._host_types = tuple(host_types)
        self._host_devices = tuple(host_devices)
        self._split: Split | None = None
        self._listing_conditions: dict[str, tuple[Condition, ...]] = {}
        """The conditions of the last listing of each plugin."""
        self._events = events
        self._added_plugins: frozenset[str] = frozenset()
        self._restored: frozenset[str] = frozenset()
        self._unsaved = ""
        self._statuses: dict[str, PluginStatus] = {}
        self._dealings: dict[str, PluginAssignment] = {}
        self._stopped: Mapping[str, StoppedPlugin] = {}
        self._stop_lock = asyncio.Lock()
        self._generation = 0
        self._withholding: Callable[[Inventory], Withholding] = lambda _: Withholding()
        self._on_relisted: Callable[[], None] = lambda: None

    @property
    def split(self) -> Split:
        """The current partition.

        Raises:
            RuntimeError: `discover` has not run.
        """
        if self._split is None:
            raise RuntimeError("devices have not been discovered")
        return self._split

    @property
    def inventory(self) -> Inventory:
        return self.split.inventory

    @property
    def warnings(self) -> tuple[str, ...]:
        """The texts of the conditions."""
        return tuple(dict.fromkeys(map(str, self.conditions())))

    def conditions(self) -> Iterator[Condition]:
        """Yield the conditions of plugins, devices, the partition and the state folder."""
        yield from self._plugins.conditions()
        yield from self._reported_conditions()
        yield from self._unready_plugins()
        for conditions in self._listing_conditions.values():
            yield from conditions
        yield from device_conditions(self.inventory)
        yield from self.split.conditions
        yield from missing_by_name(self.inventory, self._added_plugins, self._rules)
        for name in self._rules.exclude.keys() & self._added_plugins:
            yield from unmatched_exclusions(self.inventory, name, self._rules.exclude[name])
        yield from self._store.conditions()
        if self._unsaved:
            yield Condition("state-dir", self._unsaved)

    def _reported_conditions(self) -> Iterator[Condition]:
        """Yield the conditions that plugins report about themselves and their devices."""
        for listing in self._plugins.listings():
            for info in listing.conditions:
                device = self.inventory.by_stable_id.get(info.stable_id)
                about = about_device(device) if device else about_name(listing.name)
                yield Condition(about, info.reason, info.remedy)

    def _unready_plugins(self) -> Iterator[Condition]:
        """Yield the conditions of plugins that are needed and not ready."""
        for status in self._plugins.statuses():
            if status.state is PluginState.READY or not self._is_needed(status):
                continue
            name, remedy = status.name, _REMEDIES.get(status.state, "")
            reason = f"plugin {name} is {status.text}"
            yield Condition(f"plugin/{name}", reason, remedy and f"{remedy} {name}")

    def _plugin_status(self, name: str) -> PluginStatus | None:
        return next((s for s in self._plugins.statuses() if s.name == name), None)

    def _is_needed(self, status: PluginStatus) -> bool:
        """Return whether a plugin has a table, or an agent or a known device names it."""
        named = any(status.name in {*rule.devices, *rule.limits} for rule in self._rules.agents)
        has_table = status.has_table and status.state is not PluginState.ABSENT
        return has_table or named or status.name in self.inventory.by_name

    @property
    def generation(self) -> int:
        """The generation of the inventory; it rises with each change."""
        return self._generation

    def discover(self) -> None:
        """Merge listings, host devices and saved devices, and divide them among the agents.

        Raises:
            ConfigRefused: the rules do not fit the devices.
        """
        self._statuses = {status.name: status for status in self._plugins.statuses()}
        saved = self._store.load_devices()
        self._dealings, self._stopped = dict(saved.dealings), saved.stopped
        self._rules = replace(self._rules, forgotten=frozenset(saved.forgotten))
        self._merge_listings(self._plugins.listings())

    def refresh(self, name: str) -> None:
        """Apply a plugin's current status and listing."""
        status = self._plugin_status(name)
        if status is not None and status != self._statuses.get(name):
            self._statuses[name] = status
            self._events.publish(EventKind.PLUGIN, status)
        listing = next((item for item in self._plugins.listings() if item.name == name), None)
        if status is None or listing is None:
            return
        is_first = name in self._restored and not listing.is_restored
        self._listing_conditions[name] = ()
        is_late = is_first or name not in self._added_plugins
        if is_late and (self._add_late(listing) or not is_first):
            return
        if status.state is PluginState.READY:
            inventory = place_new_devices(self._apply_listing(listing), self.inventory)
        else:
            inventory = self.inventory.with_health_unknown(
                name,
                f"plugin {name}: {status.reason}",
                keeps_unhealthy=status.state is not PluginState.STOPPED,
            )
        if self._apply(inventory):
            log.info("devices.changed", plugin=name, generation=self._generation)
            self._save()

    def _apply_listing(self, listing: PluginListing) -> Inventory:
        """Return the inventory with a plugin's listing, and keep its conditions."""
        inventory, reasons = apply_listing(self.inventory, listing.name, listing.devices)
        self._listing_conditions[listing.name] += tuple(
            Condition(about_name(listing.name), reason) for reason in reasons
        )
        return inventory

    def _add_late(self, listing: PluginListing) -> bool:
        """Add the devices of a plugin that opened late; no known device moves.

        A device that another plugin serves, or used to serve, stays with that plugin.
        """
        before = self.split
        try:
            self._merge_listings([listing], before)
        except ConfigRefused as error:
            reason = (
                f"plugin {listing.name} opened late and does not fit: {'; '.join(error.lines())}"
            )
            agents = tuple(rule.agent_id for rule in self._rules.agents)
            about = about_name(listing.name)
            self._listing_conditions[listing.name] = (Condition(about, reason, agents=agents),)
            return False
        log.info("plugin.added", plugin=listing.name)
        self._announce(before.inventory)
        return True

    def _merge_listings(
        self, listings: Sequence[PluginListing], before: Split | None = None
    ) -> None:
        """Merge listings with known and saved devices.

        Without `before` everything is new, including the devices of the host. With it, only the
        listed devices change.

        Raises:
            ConfigRefused: the rules do not fit; nothing changed.
        """
        names = {listing.name for listing in listings}
        restored = {listing.name for listing in listings if listing.is_restored}
        known = before.inventory if before else None
        remembered = (
            self._store.load_devices().devices if known is None else devices_to_save(known, names)
        )
        listings = [listing.with_last_form(remembered) for listing in listings]
        devices = merge_devices(
            known.devices if known else self._host_devices,
            listings,
            names=None if known is None else names,
            remembered=remembered,
            statuses=self._plugins.statuses(),
        )
        types = [*(known.slot_types.values() if known else self._host_types)]
        types = [slot for slot in types if device_name_of(slot.name) not in names]
        types += (slot for listing in listings for slot in listing.slot_types)
        types += missing_slot_types(devices, types, names)
        inventory = Inventory.of(types, devices).with_excluded(self._rules.exclude)
        needed = {name for rule in self._rules.agents for name in (*rule.devices, *rule.limits)}
        needed |= {device.device_id.name for device in devices}
        unlisted = unlisted_reasons(self._plugins.statuses(), needed, self._added_plugins | names)
        dealings = self._merge_dealings(listings)
        dealt = (self._added_plugins - self._restored | names) - restored
        valid = self._valid_dealings(inventory, dealings, dealt)
        if before is None:
            self._split = split(inventory, self._rules, unlisted, valid)
        else:
            self._split = split_late_devices(before, names, inventory, self._rules, unlisted, valid)
        self._dealings = dealings
        self._added_plugins |= names
        self._restored = self._restored - names | restored
        self._split = self._split.with_inventory(self._mark_unavailable(self._split.inventory))
        for listing in listings:
            self._listing_conditions[listing.name] = ()
            if not listing.is_restored:
                self._apply_listing(listing)
        self._generation += 1
        self._save()

    def _merge_dealings(self, listings: Iterable[PluginListing]) -> dict[str, PluginAssignment]:
        """Return the kept dealings, those of listings in place of their earlier ones."""
        dealings = dict(self._dealings)
        for listing in listings if self._rules.uses_plugin_order else ():
            if listing.is_restored:
                continue
            dealings.pop(listing.name, None)
            if listing.assignment is not None:
                dealings[listing.name] = listing.assignment
        return dealings

    def _valid_dealings(
        self,
        inventory: Inventory,
        dealings: Mapping[str, PluginAssignment],
        listed: Collection[str],
    ) -> dict[str, PluginAssignment | None]:
        """Return the dealing of each device name that has one.

        None stands for a plugin that has not listed yet, unless its kept dealing is for the
        same agents and devices.
        """
        if not self._rules.uses_plugin_order:
            return {}
        agents = [rule.agent_id for rule in self._rules.agents]
        valid: dict[str, PluginAssignment | None] = {}
        for name, named_devices in inventory.by_name.items():
            devices = in_places(device for device in named_devices if not device.is_excluded)
            dealing = dealings.get(name)
            if name not in listed and name not in (CPU, MEM):
                valid[name] = dealing if dealing and dealing.is_for(agents, devices) else None
            elif dealing is not None:
                valid[name] = dealing
        return valid

    def partition(self, agent_id: str) -> Partition:
        """Return an agent's partition.

        Raises:
            UnknownAgent: the agent does not exist.
        """
        partitions = self.split.partitions
        if agent_id not in partitions:
            raise UnknownAgent(f"unknown agent {agent_id} (this node has: {', '.join(partitions)})")
        return partitions[agent_id]

    def find(self, name: str, device_id: str) -> Device:
        """Return a device by id, stable id or alias.

        Raises:
            UnknownDevice: the device does not exist.
        """
        devices = self.inventory.by_name.get(name, ())
        if (device := by_any_name(devices).get(normal_name(device_id))) is not None:
            return device
        available = ", ".join(d.device_id.id for d in devices) or "none"
        raise UnknownDevice(f"unknown device {name}/{device_id} (this node has: {available})")

    def set_drained(self, name: str, device_id: str, *, drained: bool) -> Device:
        """Start or end the drain of a device; survives restarts.

        Raises:
            UnknownDevice: the device does not exist.
            StateUnavailable: the drain cannot be saved; nothing changed.
        """
        device = self.find(name, device_id)
        if device.drained is not drained:
            device = replace(device, drained=drained)
            hit("drain.before_save")
            self._apply_operator_change(self.inventory.with_device(device))
            hit("drain.after_save")
        return device

    async def clear(self, name: str, device_id: str) -> Device:
        """Clear what waits for an operator about an unhealthy device.

        Raises:
            UnknownDevice: the device does not exist.
            Conflict: there is nothing to clear.
            PluginUnavailable: the plugin does not answer, or failed to clear it.
        """
        device = self.find(name, device_id)
        is_unhealthy = device.health is Health.UNHEALTHY and not device.gone
        if not (is_unhealthy or device.needs_clear):
            raise Conflict(f"{device.device_id} is not unhealthy; there is nothing to clear")
        await self._plugins.clear(name, sorted({device.stable_id, device.physical_id}))
        self._split = self.split.with_inventory(self.inventory.with_cleared(device))
        self.refresh(name)
        self._save()
        cleared = self.find(name, device.stable_id)
        if cleared == device:
            raise Conflict(f"{device.device_id} is unhealthy as before: {device.reason}")
        return cleared

    def forget(self, name: str, device_id: str, *, holders: Iterable[Holder]) -> None:
        """Forget a missing device; its id is free again after the next start.

        Raises:
            UnknownDevice: the device does not exist.
            Conflict: the device is present, or a kernel holds it.
            StateUnavailable: the change cannot be saved; nothing changed.
        """
        device = self.find(name, device_id)
        _require_forgettable(device, holders)
        rules = replace(self._rules, forgotten=self._rules.forgotten | {device.device_id})
        self._apply_operator_change(self.inventory.without(device.device_id), rules)

    def add_missing(self, devices: Iterable[Device]) -> None:
        """Add devices that are known only from kernels."""
        inventory = self.inventory
        for device in devices:
            if device.stable_id not in inventory.by_identity:
                inventory = inventory.with_device(device)
        if self._apply(inventory):
            self._save()

    def _apply_operator_change(self, inventory: Inventory, rules: SplitRules | None = None) -> None:
        """Apply an operator's change: save it first, or refuse it."""
        rules = rules or self._rules
        self._store.save_devices(self._to_save(inventory, self._stopped, rules))
        self._rules, self._unsaved = rules, ""
        self._apply(inventory)

    def _to_save(
        self, inventory: Inventory, stopped: Mapping[str, StoppedPlugin], rules: SplitRules
    ) -> SavedDevices:
        forgotten = sorted(rules.forgotten - inventory.by_id.keys())
        devices = devices_to_save(inventory)
        return SavedDevices(devices, dealings=self._dealings, stopped=stopped, forgotten=forgotten)

    async def stop_plugin(self, name: str, caller: str) -> PluginStatus:
        """Release a plugin's devices until it is started, also after a restart.

        Raises:
            UnknownPlugin: the plugin does not exist.
            Conflict: the plugin is blocked, or its process cannot be ended.
            StateUnavailable: the stop cannot be saved; nothing changed.
        """
        async with self._stop_lock:
            status = self._plugin_status(name)
            if status is not None and status.state is PluginState.STOPPED:
                return status
            before, reason = self._stopped, f"stopped by {caller}"
            types = self.inventory.slot_types.values()
            listed = tuple(slot for slot in types if device_name_of(slot.name) == name)
            if status is not None and status.state is not PluginState.BLOCKED:
                self._save_stopped({**before, name: StoppedPlugin(reason, listed)})
            try:
                status = await self._plugins.stop(name, reason)
            except Conflict:
                self._stopped = before
                self._save()
                raise
            self.refresh(name)
            return status

    async def start_plugin(self, name: str) -> PluginStatus:
        """Start a stopped plugin; returns when it is ready, or its first attempt has failed.

        Raises:
            UnknownPlugin: the plugin does not exist.
            Conflict: the plugin is blocked.
            StateUnavailable: the start cannot be saved; nothing changed.
        """
        async with self._stop_lock:
            if name in self._stopped:
                self._save_stopped({k: v for k, v in self._stopped.items() if k != name})
            status = await self._plugins.start(name)
            self.refresh(name)
            return status

    def _save_stopped(self, stopped: Mapping[str, StoppedPlugin]) -> None:
        self._store.save_devices(self._to_save(self.inventory, stopped, self._rules))
        self._stopped, self._unsaved = stopped, ""

    def set_withholding(self, withholding: Callable[[Inventory], Withholding]) -> None:
        """Register a function that tells which devices are not allocated for now."""
        self._withholding = withholding
        self.update_withholding()

    def update_withholding(self) -> None:
        """Mark the devices that are not allocated for now."""
        self._apply(self.inventory)

    def _mark_unavailable(self, inventory: Inventory) -> Inventory:
        """Mark the devices that are not allocated for now, and those that no plugin serves."""
        reasons = {
            status.name: f"plugin {status.name}: {status.reason or status.state.value}"
            for status in self._plugins.statuses()
            if not status.is_serving and status.name in self._added_plugins
        }
        excluded = inventory.with_excluded(self._rules.exclude)
        return excluded.with_withheld(self._withholding(inventory), reasons)

    def _apply(self, inventory: Inventory) -> bool:
        """Apply an inventory with its marks, and return whether that changed anything."""
        before, marked = self.inventory, self._mark_unavailable(inventory)
        if marked is before:
            return False
        self._split = self.split.with_inventory(marked)
        self._generation += 1
        self._announce(before)
        return True

    def on_relisted(self, callback: Callable[[], None]) -> None:
        """Register a callback for devices that are new, or offer other slots.

        Kernels and claims may hold them by what their records say.
        """
        self._on_relisted = callback

    def _announce(self, before: Inventory) -> None:
        """Publish the changes of devices since `before`."""
        now = self.inventory
        for device in [d for d in now.devices if before.by_id.get(d.device_id) != d]:
            self._events.publish(EventKind.DEVICE, device)
        for device in [d for d in before.devices if d.device_id not in now.by_id]:
            self._events.publish(EventKind.DEVICE_REMOVED, device)
        if now.listed != before.listed:
            self._on_relisted()

    def _save(self) -> None:
        try:
            self._store.save_devices(self._to_save(self.inventory, self._stopped, self._rules))
        except StateUnavailable as error:
            if not self._unsaved:
                log.warning("devices.save_failed", reason=str(error))
            self._unsaved = f"the inventory is not saved: {error}"
        else:
            self._unsaved = ""

    def retry(self) -> None:
        """Retry saves that failed."""
        if self._unsaved:
            self._save()
        self._store.retry()


def _require_forgettable(device: Device, holders: Iterable[Holder]) -> None:
    if not device.gone:
        raise Conflict(f"{device.device_id} is not missing; only missing devices can be forgotten")
    if device.health is Health.UNKNOWN:
        raise Conflict(f"it is unknown whether {device.device_id} is missing: {device.reason}")
    if holders_text := ", ".join(map(str, holders)):
        raise Conflict(f"{device.device_id} is held by {holders_text}")
