"""Observation of a node's kernels: the manager's units and the bundles beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentd.core.kernel.observation import Leftover, Listing, ObservedKernel
from agentd.core.kernel.plan import name_prefix
from agentd.core.kernel.record import (
    ForeignRecordError,
    MissingRecordError,
    RecordError,
    decode,
    read_members,
    require_owner,
    require_record,
)
from agentd.core.kernel.states import (
    ENDED,
    NODE_RESTARTED,
    Ending,
    Kernel,
    KernelRef,
    ObservedState,
)
from agentd.core.kernel.usage import UsageReading
from agentd.core.names import is_name, name_or_empty, validate_name
from agentd.errors import RuntimeUnavailable
from agentd.host.cgroups.usage import MOUNT, UNIFIED, CgroupCounters, read_usages
from agentd.host.systemd.dbus import SystemdManager, Unit
from agentd.runtimes.host.private_folder import (
    TRASH,
    Unreadable,
    list_names,
    os_errors_as_unavailable,
)
from agentd.runtimes.systemd.unit import kernel_id_of_unit, slice_name, unit_name
from agentd.runtimes.systemd.unit_bundle import UnitBundle, UnitIdentity
from agentd.runtimes.systemd.unit_state import (
    LIVE_STATES,
    OBSERVED_PROPERTIES,
    parse_end,
    parse_log_fields,
    parse_usage,
    state_of,
)

RUNTIME = "systemd"


async def list_live_kernels(manager: SystemdManager, node_id: str) -> list[str]:
    """Return the kernels whose units live, without writing, unlike `UnitObserver`.

    Raises:
        RuntimeUnavailable: the manager does not answer.
    """
    kernel_ids = []
    for unit in await manager.list_units(f"{name_prefix(node_id)}*.service"):
        kernel_id = kernel_id_of_unit(node_id, unit.name)
        if kernel_id is None:
            continue
        properties = await manager.get_properties(unit.name, ("ControlGroup",))
        group = str(properties["ControlGroup"]) if properties else ""
        if state_of(unit.active, unit.sub, group) in LIVE_STATES:
            kernel_ids.append(kernel_id)
    return kernel_ids


class OwnRecord(msgspec.Struct, frozen=True):
    """A kernel's record, its problem, and whether the bundle is the kernel's own and readable."""

    text: str
    problem: str
    is_own: bool = True
    is_unreadable: bool = False


class UnitObserver:
    """Observes the kernels of one node in one boot."""

    def __init__(self, folder: Path, node_id: str, boot_id: str, manager: SystemdManager) -> None:
        self._folder = folder
        self._node_id = node_id
        self._boot_id = boot_id
        self._manager = manager
        self._is_user = manager.is_user
        self._cgroups: dict[KernelRef, str] = {}
        self._ended: set[str] = set()

    async def list_kernels(self) -> Listing:
        """Return every kernel, with one query for all units."""
        pattern = f"{name_prefix(self._node_id)}*.service"
        units: dict[str, Unit] = {}
        for unit in await self._manager.list_units(pattern):
            kernel_id = kernel_id_of_unit(self._node_id, unit.name)
            if kernel_id is not None:
                units[kernel_id] = unit
        with os_errors_as_unavailable():
            names = list_names(self._folder)
            kernel_ids = {name for name in names if is_name(name)}
            observed = [
                await self._observe_listed(name, units.get(name))
                for name in sorted(kernel_ids | {*units})
            ]
        kernels = tuple(item for item in observed if item is not None)
        listed_ids = {i.kernel_id for i in kernels if i.handle or not i.is_unreadable}
        leftovers = [
            Leftover(name.removeprefix(TRASH), f"folder {name}")
            for name in sorted(names)
            if name.removeprefix(TRASH) not in listed_ids
        ]
        return Listing(kernels, tuple(leftovers))

    async def _observe_listed(self, kernel_id: str, unit: Unit | None) -> ObservedKernel | None:
        bundle = self.bundle(kernel_id)
        if unit is None:
            return self._observe_missing_unit(kernel_id, bundle)
        record = self._read_own_record(bundle)
        identity, agent_id = bundle.read_identity(), self._read_agent(record.text)
        if agent_id is None or identity is None:
            return await self.find(kernel_id)  # the manager knows what the record lacks
        slice_ = "" if self._is_user else f"/agentd.slice/{slice_name(agent_id)}/"
        state = state_of(unit.active, unit.sub, slice_ and f"{slice_}{unit.name}")
        if state is not ObservedState.EXITED and identity.pid:
            return self._to_observed(kernel_id, state, record, identity)
        if (end := bundle.read_end()) is None:  # check whether its processes are gone
            return await self.find(kernel_id)
        return self._to_observed(kernel_id, state, record, identity, ending=end.ending)

    async def find(self, kernel_id: str) -> ObservedKernel | None:
        """Return one kernel, None if nothing of it exists."""
        unit = unit_name(self._node_id, kernel_id)
        bundle = self.bundle(kernel_id)
        properties = await self._manager.get_properties(unit, OBSERVED_PROPERTIES)
        with os_errors_as_unavailable():
            if properties is None:
                return self._observe_missing_unit(kernel_id, bundle)
            state = state_of(
                properties["Unit.ActiveState"],
                properties["Unit.SubState"],
                properties["ControlGroup"],
            )
            record = self._read_own_record(bundle)
            identity = UnitIdentity(
                bytes(properties["Unit.InvocationID"]).hex(),
                self._boot_id,
                properties["ExecMainStartTimestamp"] / 1e6,
                properties["MainPID"],
            )
            if record.text and identity.started_at and bundle.read_identity() != identity:
                with suppress(OSError):  # a full disk; the next observation tries again
                    bundle.save_identity(identity)
            if record.text and properties["Unit.SubState"] == "running":
                bundle.save_group(MOUNT / str(properties["ControlGroup"]).lstrip("/"))
            if state is ObservedState.EXITED:
                bundle.save_end(parse_end(properties))
                bundle.save_usage(parse_usage(properties))
        return self._to_observed(
            kernel_id,
            state,
            record,
            identity,
            ending=parse_end(properties).ending if state is ObservedState.EXITED else Ending(),
            log_fields=parse_log_fields(properties["LogExtraFields"]),
        )

    async def usages(self, kernels: Sequence[Kernel]) -> dict[str, UsageReading]:
        """Return the usage of kernels; of ended ones, the usage at their end."""
        with os_errors_as_unavailable():
            ended_ids = {k.kernel_id for k in kernels if k.state in ENDED}
            for kernel_id in (
                ended_ids - self._ended
            ):  # the manager may still know an unobserved end
                if not self.bundle(kernel_id).has_usage():
                    await self.find(kernel_id)
            self._ended = ended_ids
            alive = [k.ref for k in kernels if k.kernel_id not in ended_ids]
            self._cgroups = {ref: await self._find_cgroup(ref) for ref in alive}
            return await asyncio.to_thread(self._read_usages, ended_ids)

    def _read_usages(self, ended_ids: Iterable[str]) -> dict[str, UsageReading]:
        counters = {
            ref.kernel_id: CgroupCounters({UNIFIED: f"{MOUNT}/{group}"})
            for ref, group in self._cgroups.items()
            if group
        }
        usages = {
            kernel_id: UsageReading(self.bundle(kernel_id).read_usage()) for kernel_id in ended_ids
        }
        return usages | read_usages(counters)

    async def _find_cgroup(self, ref: KernelRef) -> str:
        """Return the path of a kernel's cgroup from the manager, cached."""
        if cached := self._cgroups.get(ref):
            return cached
        with suppress(RuntimeUnavailable):
            unit = unit_name(self._node_id, ref.kernel_id)
            properties = await self._manager.get_properties(unit, ("ControlGroup",))
            return str(properties["ControlGroup"]).lstrip("/") if properties else ""
        return ""

    def _observe_missing_unit(self, kernel_id: str, bundle: UnitBundle) -> ObservedKernel | None:
        """Return a kernel whose unit does not exist (any more)."""
        record = self._read_own_record(bundle)
        if not record.is_own:
            return None
        identity, end = bundle.read_identity(), bundle.read_end()
        has_rebooted = identity is not None and identity.boot_id != self._boot_id
        if record.is_unreadable:
            ending = Ending(reason=f"its exit status cannot be read: {record.problem}")
        elif end is not None:
            ending = end.ending
            if has_rebooted and end.is_by_unknown_signal:
                ending = replace(ending, reason=NODE_RESTARTED)
        elif identity is None:
            return self._to_observed(kernel_id, ObservedState.CREATED, record, None)
        elif has_rebooted:
            ending = Ending(reason=f"{NODE_RESTARTED}; its exit status is lost")
        else:
            ending = Ending(reason="its unit was removed; its exit status is lost")
        return self._to_observed(kernel_id, ObservedState.EXITED, record, identity, ending=ending)

    def _to_observed(
        self,
        kernel_id: str,
        state: ObservedState,
        record: OwnRecord,
        identity: UnitIdentity | None,
        *,
        ending: Ending | None = None,
        log_fields: Mapping[str, str] | None = None,
    ) -> ObservedKernel:
        log_fields = log_fields or {}
        return ObservedKernel(
            kernel_id=kernel_id,
            agent_id=name_or_empty(log_fields.get("AGENTD_AGENT")),
            runtime=RUNTIME,
            handle=identity.invocation_id if identity else "",
            state=state,
            record=record.text,
            device_label=log_fields.get("AGENTD_DEVICES", ""),
            started_at=identity.started_at if identity else None,
            ending=ending or Ending(),
            pid=(identity.pid or None) if identity and state in LIVE_STATES else None,
            unit=unit_name(self._node_id, kernel_id),
            record_problem=record.problem,
            is_unreadable=record.is_unreadable,
        )

    def bundle(self, kernel_id: str) -> UnitBundle:
        """Return the bundle of a kernel, which need not exist."""
        return UnitBundle(self._folder / validate_name(kernel_id))

    def _read_agent(self, record: str) -> str | None:
        """Return the agent of a record, None if it is unreadable."""
        with suppress(RecordError):
            return decode(record).agent_id
        return None

    def _read_own_record(self, bundle: UnitBundle) -> OwnRecord:
        """Return a kernel's record, its problem, and whether the bundle is the kernel's own.

        A bundle without a record, or with that of another kernel, is not.
        """
        try:
            record = bundle.read_record() if bundle.exists() else require_record(None)
            require_owner(record, self._node_id, bundle.path.name)
        except MissingRecordError:
            return OwnRecord("", "", is_own=False)
        except ForeignRecordError as error:
            return OwnRecord("", str(error), is_own=False)
        except RecordError as error:
            return OwnRecord("", str(error))
        except Unreadable as error:
            return OwnRecord("", str(error), is_unreadable=True)
        return OwnRecord(record, bundle.exposure_problem())


def agent_of_record(record: str) -> str:
    """Return the agent that a record of any schema names, empty if it is unreadable."""
    with suppress(RecordError, KeyError):
        return name_or_empty(read_members(record)["agent_id"])
    return ""
