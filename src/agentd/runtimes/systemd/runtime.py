"""Kernels as transient service units of systemd, which keeps them, their limits and their logs.

A kernel is the unit of its name (see `unit`), and beside it a folder (see `bundle`). What lives is
what the manager says: only root can make a unit of the system's manager. No process of agentd's
stands beside a kernel.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentd.core.container_options import over_ceiling
from agentd.core.kernel import Ending, KernelRef, KernelSpec, KernelState, is_kernel_id
from agentd.core.observation import Leftover, Listing, ObservedKernel, ObservedState
from agentd.core.plan import KernelPlan
from agentd.core.record import MALFORMED
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    KernelConflict,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)
from agentd.failpoints import reach
from agentd.host.probe import numa_nodes_of
from agentd.host.units import Manager, Unit, UnitExists, UnitRefused
from agentd.plugin_api import Features
from agentd.runtimes.folder import names_in
from agentd.runtimes.systemd.bundle import NODE_RESTARTED, End, Identity, UnitBundle
from agentd.runtimes.systemd.journal import Source, read_lines
from agentd.runtimes.systemd.slices import Slices
from agentd.runtimes.systemd.unit import (
    PATH,
    SystemdRules,
    kernel_of,
    own_variables,
    properties,
    request_problems,
    unit_name,
)
from agentd.services.interfaces import LogQuery, LogStream, Progress, Support

RUNTIME = "systemd"
TRASH = ".removed-"
"""Prefix of the name of a folder that is being removed."""
LOOK_S = 1.0
"""How long to wait at most before a unit is looked at again that is about to end."""
_EXIT_CHDIR, _EXIT_EXEC = 200, 203
"""What systemd's own child exits with where it cannot change the folder, or execute
(systemd.exec(5), "Process Exit Codes")."""
_SEEN = (
    "Unit.ActiveState", "Unit.SubState", "Unit.InvocationID", "LogExtraFields", "Result",
    "ExecMainCode", "ExecMainStatus", "ExecMainStartTimestamp", "ExecMainExitTimestamp",
)  # fmt: skip
_CLD = {1: "exited", 2: "killed", 3: "dumped"}
"""How a process ended, by the `CLD_` numbers of sigaction(2)."""


class SystemdRuntime:
    """Runs commands as units; see `agentd.services.interfaces.Runtime`."""

    name = RUNTIME
    minimum_memory_bytes = 1 << 20

    def __init__(self, folder: Path, node_id: str, boot_id: str, rules: SystemdRules) -> None:
        self._folder = folder
        self._node_id = node_id
        self._boot_id = boot_id
        self._rules = rules
        self._manager = Manager(is_user=rules.is_user)
        self._slices = Slices(self._manager)

    def renew(self, rules: SystemdRules) -> None:
        """Have other rules from now on; kernels that are there keep theirs."""
        self._rules = rules

    async def close(self) -> None:
        await self._manager.close()

    def problems(self, spec: KernelSpec) -> Sequence[Problem]:
        over = over_ceiling(spec.container.ulimits, self._rules.ulimits)
        return [
            *request_problems(spec, self._rules),
            *(Problem(f"ulimits.{name}", why) for name, why in over),
        ]

    async def support(self, spec: KernelSpec) -> Support:
        is_user = self._rules.is_user
        missing = {
            "image": spec.image is not None,
            "separation": is_user or self._rules.user_of(spec.agent_id) is not None,
            "cpu": is_user,
            "devices": is_user,
            "logs": is_user,
        }
        return Support(
            Features(self.name),
            frozenset(name for name, is_missing in missing.items() if is_missing),
        )

    async def create(self, plan: KernelPlan, progress: Progress) -> ObservedKernel:
        kernel_id = plan.spec.kernel_id
        bundle, unit = self._bundle(kernel_id), unit_name(self._node_id, kernel_id)
        nodes = numa_nodes_of(plan.cpus)
        wanted = properties(plan, str(bundle.path), self._rules, nodes)
        progress(KernelState.CREATING)
        if bundle.is_taken():
            raise KernelConflict(f"{bundle.path} exists, and is not a kernel of this node")
        try:
            with looking():
                bundle.make(plan.record, {"PATH": PATH, **plan.env, **own_variables(plan)})
            await reach("create.after_record")
            if not self._rules.is_user:
                await self._slices.fence(plan)
            await reach("create.after_group")
            result = await self._manager.start(unit, wanted)
            await reach("create.after_spawn")
            if result != "done":
                raise await self._failure(plan, unit, result)
            found = await self.find(KernelRef(kernel_id))
        except UnitExists as error:
            bundle.remove()
            raise KernelConflict(str(error)) from error
        except BaseException as error:
            await self._undo(KernelRef(kernel_id), error)
            if isinstance(error, UnitRefused):
                raise RuntimeFailure(f"systemd: {error}") from error
            raise
        if found is None:
            raise RuntimeFailure(f"{unit} was removed while its kernel was started")
        return found

    async def _failure(self, plan: KernelPlan, unit: str, result: str) -> AgentdError:
        """Return why a unit's start ended as it did."""
        seen = await self._manager.properties(unit, ("Result", "ExecMainStatus")) or {}
        status = seen.get("ExecMainStatus", 0)
        if status == _EXIT_EXEC:
            return CommandNotFound(f"command {plan.spec.command[0]!r}: cannot be executed")
        if status == _EXIT_CHDIR:
            where = repr(plan.spec.working_dir)
            return InvalidRequest([Problem("working_dir", f"{where}: cannot be entered")])
        why = f"its start {result}: {seen.get('Result', 'for an unknown reason')}, status {status}"
        return RuntimeFailure(f"systemd did not start the kernel; {why}")

    async def _undo(self, ref: KernelRef, error: BaseException) -> None:
        """Remove what a failed create left behind.

        Raises:
            OutcomeUnknown: it cannot be removed.
        """
        try:
            await self.remove(ref)
        except (RuntimeUnavailable, RuntimeFailure, UnitRefused) as left:
            raise OutcomeUnknown(f"{error}; and it cannot be undone: {left}") from error

    async def stop(self, ref: KernelRef, timeout_s: float | None) -> None:
        unit = unit_name(self._node_id, ref.kernel_id)
        if not await self._lives(unit):
            return
        grace_s = self._rules.stop_timeout_s if timeout_s is None else timeout_s
        if grace_s > 0:
            await self._manager.kill(unit, signal.SIGTERM)
            await reach("stop.after_term")
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._until_ended(unit)
        while await self._lives(unit):
            await self._manager.kill(unit, signal.SIGKILL)
            await reach("stop.after_kill")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._until_ended(unit)

    async def _lives(self, unit: str) -> bool:
        seen = await self._manager.properties(unit, ("Unit.ActiveState", "Unit.SubState"))
        return seen is not None and _state_of(*seen.values()) is ObservedState.RUNNING

    async def _until_ended(self, unit: str) -> None:
        changes = self._manager.changes()
        try:
            async for changed in changes:
                if changed in ("", unit) and not await self._lives(unit):
                    return
        finally:
            await changes.aclose()

    async def remove(self, ref: KernelRef, *, unless_alive: bool = False) -> bool:
        unit = unit_name(self._node_id, ref.kernel_id)
        if unless_alive and await self._lives(unit):
            return False
        await self.stop(ref, 0)
        await self._manager.drop(unit)
        await reach("delete.after_group")
        with looking():
            bundle = self._bundle(ref.kernel_id)
            trash = UnitBundle(self._folder / f"{TRASH}{ref.kernel_id}")
            trash.remove()
            with suppress(FileNotFoundError):
                bundle.path.rename(trash.path)
            await reach("delete.after_rename")
            trash.remove()
        return True

    async def list(self) -> Listing:
        pattern = unit_name(self._node_id, "*")
        units: dict[str, Unit] = {}
        for unit in await self._manager.units(pattern):
            kernel_id = kernel_of(self._node_id, unit.name)
            if kernel_id is not None and is_kernel_id(kernel_id):
                units[kernel_id] = unit
        with looking():
            names = names_in(self._folder)
            kept = {name for name in names if is_kernel_id(name)}
            found = [await self._listed(name, units.get(name)) for name in sorted(kept | {*units})]
        kernels = tuple(item for item in found if item is not None)
        listed = {item.kernel_id for item in kernels}
        left = [
            Leftover(name.removeprefix(TRASH), f"folder {name}")
            for name in sorted(names)
            if name.removeprefix(TRASH) not in listed
        ]
        return Listing(kernels, tuple(left))

    async def _listed(self, kernel_id: str, unit: Unit | None) -> ObservedKernel | None:
        bundle = self._bundle(kernel_id)
        record, identity = self._own_record(bundle), bundle.identity()
        if unit is None:
            return self._gone(kernel_id, bundle)
        if record is None or identity is None:
            return await self.find(KernelRef(kernel_id))
        state = _state_of(unit.active, unit.sub)
        end = bundle.end() if state is ObservedState.EXITED else None
        return self._observed(
            kernel_id,
            state,
            record,
            identity,
            ending=end.ending if end else Ending(),
            is_partial=state is ObservedState.EXITED and end is None,
        )

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        unit = unit_name(self._node_id, ref.kernel_id)
        bundle = self._bundle(ref.kernel_id)
        seen = await self._manager.properties(unit, _SEEN)
        with looking():
            if seen is None:
                return self._gone(ref.kernel_id, bundle)
            state = _state_of(seen["Unit.ActiveState"], seen["Unit.SubState"])
            record = self._own_record(bundle) or ""
            identity = Identity(
                bytes(seen["Unit.InvocationID"]).hex(),
                self._boot_id,
                seen["ExecMainStartTimestamp"] / 1e6,
            )
            if record and identity.started_at and bundle.identity() != identity:
                bundle.identify(identity)
            if state is ObservedState.EXITED:
                bundle.finish(_end_of(seen))
        return self._observed(
            ref.kernel_id,
            state,
            record,
            identity,
            ending=_end_of(seen).ending if state is ObservedState.EXITED else Ending(),
            said=_fields(seen["LogExtraFields"]),
        )

    def _gone(self, kernel_id: str, bundle: UnitBundle) -> ObservedKernel | None:
        """Return what is known of a kernel whose unit is not there (any more)."""
        record = self._own_record(bundle)
        if record is None:
            return None
        identity, end = bundle.identity(), bundle.end()
        if end is not None:
            ending = end.ending
        elif identity is None:
            return self._observed(kernel_id, ObservedState.CREATED, record, None)
        elif identity.boot_id != self._boot_id:
            ending = Ending(reason=f"{NODE_RESTARTED}; its exit status is lost")
        else:
            ending = Ending(reason="its unit was removed; its exit status is lost")
        return self._observed(kernel_id, ObservedState.EXITED, record, identity, ending=ending)

    def _observed(
        self,
        kernel_id: str,
        state: ObservedState,
        record: str,
        identity: Identity | None,
        *,
        ending: Ending | None = None,
        said: Mapping[str, str] | None = None,
        is_partial: bool = False,
    ) -> ObservedKernel:
        said = said or {}
        return ObservedKernel(
            kernel_id=kernel_id,
            agent_id=said.get("AGENTD_AGENT", ""),
            runtime=RUNTIME,
            handle=identity.invocation_id if identity else "",
            state=state,
            record=record,
            statement=said.get("AGENTD_DEVICES", ""),
            started_at=identity.started_at if identity else None,
            ending=ending or Ending(),
            is_partial=is_partial,
        )

    def _bundle(self, kernel_id: str) -> UnitBundle:
        if not is_kernel_id(kernel_id):
            raise RuntimeFailure(f"invalid kernel id {kernel_id!r}")
        return UnitBundle(self._folder / kernel_id)

    def _own_record(self, bundle: UnitBundle) -> str | None:
        """Return a record, empty if it cannot be read; None if it is missing, or another's."""
        if not bundle.exists():
            return None
        record = bundle.record()
        try:
            raw = json.loads(record)
            is_own = (raw["node_id"], raw["kernel_id"]) == (self._node_id, bundle.path.name)
        except MALFORMED:
            return ""
        return record if is_own else None

    async def follow(self) -> AsyncIterator[str]:
        with looking():
            for name in names_in(self._folder):
                if name.startswith(TRASH):
                    UnitBundle(self._folder / name).remove()
        changes = self._manager.changes()
        try:
            async for unit in changes:
                if not unit:
                    yield ""
                elif (kernel_id := kernel_of(self._node_id, unit)) is not None:
                    yield kernel_id
        finally:
            await changes.aclose()

    async def logs(self, ref: KernelRef, query: LogQuery) -> AsyncGenerator[bytes]:
        if len(query.streams) < len(LogStream):
            why = "the systemd runtime keeps both streams in one"
            raise InvalidRequest([Problem("stream", why)])
        found = await self.find(ref)
        if found is None or not found.handle:
            return
        unit = unit_name(self._node_id, ref.kernel_id)
        agent_id = None if self._rules.is_user else self._agent_of(found)
        source = Source(unit, found.handle, agent_id)
        lines = read_lines(source, query, lambda: self._until_ended(unit))
        try:
            async for line in lines:
                yield line
        finally:
            await lines.aclose()

    @staticmethod
    def _agent_of(found: ObservedKernel) -> str:
        with suppress(*MALFORMED):
            return str(json.loads(found.record)["agent_id"])
        return found.agent_id


def _state_of(active: str, sub: str) -> ObservedState:
    """Return what the manager's states mean; a unit that is being stopped lives until it has."""
    if active == "activating":
        return ObservedState.CREATED
    if active in ("failed", "inactive") or (active, sub) == ("active", "exited"):
        return ObservedState.EXITED
    return ObservedState.RUNNING


def _end_of(seen: Mapping[str, Any]) -> End:
    code = _CLD.get(seen["ExecMainCode"], "")
    finished_at = seen["ExecMainExitTimestamp"] / 1e6 or time.time()
    return End(seen["Result"], code, str(seen["ExecMainStatus"]), finished_at)


def _fields(raw: Sequence[bytes]) -> dict[str, str]:
    """Return the fields that PID 1 has every line of a unit carry."""
    pairs = (bytes(item).decode(errors="replace").partition("=") for item in raw)
    return {name: value for name, _, value in pairs}


@contextmanager
def looking() -> Iterator[None]:
    """Raise `RuntimeUnavailable` if folders cannot be looked at or written."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise RuntimeUnavailable(f"{where}{os.strerror(error.errno or 0)}") from error
