"""The bundles and cgroups of a node's process kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from agentd.core.kernel.observation import Leftover, Listing, ObservedKernel
from agentd.core.kernel.plan import kernel_name, name_prefix
from agentd.core.kernel.record import (
    ForeignRecordError,
    MissingRecordError,
    RecordError,
    require_owner,
    require_record,
)
from agentd.core.kernel.states import Ending, ObservedState
from agentd.core.names import is_name, name_or_empty, validate_name
from agentd.failpoints import hit_async
from agentd.host.cgroups.hierarchies import Cgroup, Cgroups
from agentd.host.cgroups.usage import CgroupCounters
from agentd.os_errors import os_error_as_refusal
from agentd.runtimes.host.private_folder import TRASH, Unreadable, list_names
from agentd.runtimes.process.bundle import Bundle
from agentd.runtimes.process.kernel_processes import KernelProcesses, LifeProof
from agentd.runtimes.process.shim import SHIM_BYTE

log = structlog.get_logger()

RUNTIME = "process"
AGENT, DEVICES = "agent", "devices"
"""Attributes of a kernel's cgroup: the agent, and the device attribute."""


class Bundles(msgspec.Struct, frozen=True):
    """The bundles in a folder, and this node's cgroups in the current boot.

    `proofs` are the last ones that kernels lived.
    """

    folder: Path
    node_id: str
    boot_id: str
    cgroups: Cgroups | None
    proofs: dict[str, LifeProof] = {}

    def bundle(self, kernel_id: str) -> Bundle:
        """Return a kernel's bundle, which need not exist."""
        return Bundle(self.folder / validate_name(kernel_id))

    def cgroup(self, kernel_id: str) -> Cgroup | None:
        """Return a kernel's cgroup, which need not exist; None if it has and can have none."""
        if self.cgroups is None:
            return None
        cgroup = self.cgroups.group(kernel_name(self.node_id, kernel_id))
        return cgroup if self.cgroups.is_writable or cgroup.exists() else None

    def kernel_processes(self, kernel_id: str) -> KernelProcesses:
        """Inspect a kernel."""
        return self._inspect(self.bundle(kernel_id), kernel_id)

    def _inspect(self, bundle: Bundle, kernel_id: str) -> KernelProcesses:
        """Inspect a kernel whose bundle may be set aside."""
        last = self.proofs.get(kernel_id)
        return KernelProcesses(bundle, self.cgroup(kernel_id), self.boot_id, last)

    def counters(self, kernel_id: str) -> CgroupCounters:
        """Return the counters of a kernel's cgroup, empty without one."""
        if self.cgroups is None:
            return CgroupCounters()
        return self.cgroups.counters(kernel_name(self.node_id, kernel_id))

    def list_kernels(self) -> Listing:
        """Return every kernel, and the remains of others."""
        names = {name for name in list_names(self.folder) if is_name(name)}
        names |= self._kernel_cgroups().keys() | self.proofs.keys()
        observed = [self.observe(name) for name in sorted(names)]
        kernels = tuple(item for item in observed if item is not None)
        proved_ids = {i.kernel_id for i in kernels if i.handle or not i.is_unreadable}
        return Listing(kernels, tuple(self._find_leftovers(proved_ids)))

    def _kernel_cgroups(self) -> dict[str, Cgroup]:
        """Return the cgroups of this node's kernels, by kernel id."""
        if self.cgroups is None:
            return {}
        prefix = name_prefix(self.node_id)
        names = (name for name in self.cgroups.names() if name.startswith(prefix))
        group_by_kernel = {name.removeprefix(prefix): self.cgroups.group(name) for name in names}
        return {name: group for name, group in group_by_kernel.items() if is_name(name)}

    def _find_leftovers(self, listed: set[str]) -> Iterator[Leftover]:
        for name in sorted(list_names(self.folder)):
            kernel_id = name.removeprefix(TRASH)
            if kernel_id not in listed:
                yield Leftover(kernel_id, f"folder {name}")
        for kernel_id in sorted(self._kernel_cgroups().keys() - listed):
            yield Leftover(kernel_id, f"cgroup of kernel {kernel_id}")

    def observe(self, kernel_id: str) -> ObservedKernel | None:
        """Return the observed kernel, None if nothing exists or another node owns it."""
        bundle, cgroup = self.bundle(kernel_id), self.cgroup(kernel_id)
        processes, unreadable_reason = self.kernel_processes(kernel_id), ""
        try:
            is_bundle = bundle.exists()
            state, ending = processes.state()
        except Unreadable as error:
            is_bundle, unreadable_reason = True, str(error)
            state, ending = _unreadable_state(processes, unreadable_reason)
        is_alive = state is ObservedState.RUNNING
        device_label = cgroup.attribute(DEVICES) if cgroup else ""
        record, problem, is_own = "", unreadable_reason, True
        if not unreadable_reason:
            try:
                record, problem, is_own = self._read_own_record(kernel_id, is_bundle=is_bundle)
            except Unreadable as error:
                problem, is_own = str(error), self._is_own(bundle)
                unreadable_reason = "" if device_label else problem  # the label has its devices
        if not is_own and not processes.has_cgroup_members:
            return None  # otherwise its cgroup proves it
        if not (is_bundle or is_alive):
            self.proofs.pop(kernel_id, None)
            return None
        if is_alive and (proof := processes.life_proof()) is not None:
            self.proofs[kernel_id] = proof
        handle = processes.handle()
        return ObservedKernel(
            kernel_id=kernel_id,
            agent_id=name_or_empty(cgroup.attribute(AGENT)) if cgroup else "",
            runtime=RUNTIME,
            handle=handle,
            state=state,
            record=record,
            device_label=device_label,
            started_at=processes.started_at(),
            ending=ending,
            pid=int(handle) if handle else None,
            record_problem=problem,
            is_unreadable=bool(unreadable_reason),
        )

    def _read_own_record(self, kernel_id: str, *, is_bundle: bool) -> tuple[str, str, bool]:
        """Return a kernel's record, its problem, and whether the bundle is the kernel's own.

        A bundle with the record of another kernel, such as a copy, belongs to that kernel.

        Raises:
            Unreadable: the record is there and cannot be read.
        """
        bundle = self.bundle(kernel_id)
        try:
            record = bundle.read_record() if is_bundle else require_record(None)
            require_owner(record, self.node_id, kernel_id)
        except MissingRecordError:
            return "", "", self._is_own(bundle)
        except ForeignRecordError as error:
            return "", str(error), False
        except RecordError as error:
            return "", str(error), self._is_own(bundle)
        return record, bundle.exposure_problem(), True

    def _is_own(self, bundle: Bundle) -> bool:
        """Return whether a bundle without a readable record is the kernel's own.

        A shim holds its lock, or may do so, which is true of no copy, or it has no foreign files.
        """
        try:
            return bundle.is_locked(SHIM_BYTE) or not bundle.has_foreign_files()
        except Unreadable:
            return True

    async def remove_bundle(self, kernel_id: str) -> bool:
        """Remove the bundle of a dead kernel; return False if the kernel has come alive."""
        bundle = self.bundle(kernel_id)
        trash = Bundle(self.folder / f"{TRASH}{kernel_id}")
        await self.remove_trash(trash)
        try:
            bundle.path.rename(trash.path)
        except OSError as error:
            if bundle.path_exists():  # on a read-only disk that is refused for a missing one, too
                raise os_error_as_refusal(error, str(bundle.path)) from None
            await self.remove_trash(trash)
            return True
        with suppress(Unreadable):  # it was proved to have ended before
            if self._inspect(trash, kernel_id).is_running:
                trash.path.rename(bundle.path)
                return False
        self.proofs.pop(kernel_id, None)
        await hit_async("delete.after_rename")
        await self.remove_trash(trash)
        return True

    async def recover_trash(self) -> None:
        """Remove what a daemon left of removed kernels; restore set aside bundles of live ones."""
        for name in list_names(self.folder):
            kernel_id = name.removeprefix(TRASH)
            if name == kernel_id or not is_name(kernel_id):
                continue
            trash = Bundle(self.folder / name)
            try:
                lives = self._inspect(trash, kernel_id).is_running
            except Unreadable as error:
                log.warning("runtime.leftover_unreadable", reason=str(error))
                continue
            if lives and not self.bundle(kernel_id).path_exists():
                trash.path.rename(self.folder / kernel_id)
            elif not lives:
                await self.remove_trash(trash)
        for kernel_id, cgroup in self._kernel_cgroups().items():  # they could not be removed before
            if not self.bundle(kernel_id).path_exists() and not cgroup.members():
                await cgroup.remove()

    async def remove_trash(self, trash: Bundle) -> None:
        """Remove the remains of a kernel whose bundle was set aside."""
        if (cgroup := self.cgroup(trash.path.name.removeprefix(TRASH))) is not None:
            await cgroup.remove()
            await hit_async("delete.after_group")
        trash.remove()


def _unreadable_state(processes: KernelProcesses, reason: str) -> tuple[ObservedState, Ending]:
    """Return the state of a kernel with an unreadable bundle: running, unless its end is proved."""
    with suppress(Unreadable):
        if not processes.is_running:
            return ObservedState.EXITED, Ending(reason=f"its exit status cannot be read: {reason}")
    return ObservedState.RUNNING, Ending()
