"""Kernels as plain processes, for nodes without an engine and for development.

Each kernel has a folder below the state folder (see `process_folder`). A keeper process
(`shim`) outlives the daemon and keeps the exit status.
"""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agentd.core.container_edits import ContainerEdits
from agentd.core.kernel import KernelSpec, KernelState
from agentd.core.plan import KernelPlan, kernel_name
from agentd.core.reconcile import FoundKernel, FoundState
from agentd.errors import (
    InvalidRequest,
    KernelConflict,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)
from agentd.failpoints import reach
from agentd.host.cgroups import KernelGroup, MemoryGroups
from agentd.host.processes import Proc
from agentd.plugin_api import Features
from agentd.runtimes.process.bundle import OUTPUT, RECORD, KernelFolder, clear, names_in
from agentd.runtimes.process.output import printed, unkept
from agentd.runtimes.process.proof import NodeMarks, keepers, orphans
from agentd.runtimes.process.spawn import account, failure, order_of, spawn
from agentd.services.interfaces import LogQuery, Progress

STOP_TIMEOUT_S = 10.0
TRASH = ".removed-"
"""How the folder of a kernel begins that is on its way out."""


class ProcessRuntime:
    """Runs commands under keepers; see `agentd.services.interfaces.Runtime`."""

    name = "process"
    minimum_memory_bytes = 1

    def __init__(
        self, folder: Path, node_id: str, user: str, boot_id: str, groups: MemoryGroups | None
    ) -> None:
        self._folder = folder
        self._node = NodeMarks(node_id, boot_id)
        self._groups = groups
        self._account = account(user) if os.geteuid() == 0 else None
        self._user = user if self._account else pwd.getpwuid(os.geteuid()).pw_name
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._events: asyncio.Queue[str] = asyncio.Queue()

    async def close(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    def unenforced(self, spec: KernelSpec) -> frozenset[str]:
        missing = {"image": spec.image is not None, "mem": self._groups is None}
        return frozenset(name for name, is_missing in missing.items() if is_missing)

    async def features(self) -> Features:
        return Features(self.name)

    async def check(self, spec: KernelSpec) -> None:
        if problems := list(_problems(spec, self._user)):
            raise InvalidRequest(problems)

    async def create(self, plan: KernelPlan, progress: Progress) -> FoundKernel:
        kernel_id = plan.spec.kernel_id
        folder = self._folder / kernel_id
        _refuse_what_needs_a_container(plan.edits)
        progress(KernelState.CREATING)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise KernelConflict(f"{folder} is of a kernel that is not of this node") from None
        except OSError as error:
            raise RuntimeFailure(f"{folder}: {error.strerror}") from None
        try:
            return await self._started(plan, folder)
        except BaseException as error:
            await self._undo(kernel_id, error)
            if isinstance(error, OSError):
                what = f"{error.filename or folder}: {error.strerror}"
                raise RuntimeFailure(what) from error
            raise

    async def _started(self, plan: KernelPlan, folder: Path) -> FoundKernel:
        kernel_id = plan.spec.kernel_id
        await reach("create.after_folder")
        (folder / RECORD).write_text(plan.record, encoding="utf-8")
        await reach("create.after_record")
        group = self._made_group(plan)
        await reach("create.after_group")
        told = self._node.keeper_of(plan)
        order = order_of(plan, folder, self._node, self._account, group)
        spawning = asyncio.create_task(asyncio.to_thread(spawn, order, told))
        try:
            answer = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            await asyncio.wait([spawning])
            raise
        await reach("create.after_spawn")
        if "pid" not in answer:
            raise failure(plan, answer)
        self._watch(kernel_id)
        if (found := await self.find(kernel_id)) is None:
            raise RuntimeFailure(f"{folder} was removed while its kernel was started")
        return found

    async def _undo(self, kernel_id: str, error: BaseException) -> None:
        """Remove what a create left that failed.

        Raises:
            OutcomeUnknown: it cannot be removed.
        """
        try:
            await self.remove(kernel_id, "")
        except (RuntimeUnavailable, RuntimeFailure) as left:
            raise OutcomeUnknown(f"{error}; and it cannot be undone: {left}") from error

    def _made_group(self, plan: KernelPlan) -> KernelGroup | None:
        if self._groups is None:
            return None
        group = self._groups.group(plan.name)
        self._groups.create(group, plan.memory_bytes)
        return group

    async def stop(self, kernel_id: str, handle: str, timeout_s: float | None) -> None:
        with looking():
            kernel = self._kernel(kernel_id)
            if kernel.living is None:
                return
            grace_s = STOP_TIMEOUT_S if timeout_s is None else timeout_s
            if grace_s > 0:
                kernel.terminate()
                await reach("stop.after_term")
                try:
                    async with asyncio.timeout(grace_s):
                        await kernel.all_ended()
                except TimeoutError:
                    pass
            async for alive in kernel.looks():
                await kernel.kill(alive)
                await reach("stop.after_kill")

    async def remove(self, kernel_id: str, handle: str) -> None:
        await self.stop(kernel_id, handle, 0)
        while not await self._taken_away(kernel_id):
            await self.stop(kernel_id, handle, 0)  # its keeper was faster than we were

    async def discard(self, kernel_id: str, handle: str) -> bool:
        found = await self.find(kernel_id)
        if found is not None and found.state is FoundState.RUNNING:
            return False
        return await self._taken_away(kernel_id)

    async def _taken_away(self, kernel_id: str) -> bool:
        """Remove the folder of a kernel that is not running; False if it began to run."""
        with looking():
            folder, trash = self._folder / kernel_id, self._folder / f"{TRASH}{kernel_id}"
            await self._emptied(trash)
            before = self._kernel(kernel_id).living
            try:
                folder.rename(trash)
            except FileNotFoundError:
                return True
            except OSError as error:
                raise RuntimeFailure(f"{folder}: {error.strerror}") from None
            if before is None and self._kernel(kernel_id, trash).living is not None:
                trash.rename(folder)
                return False
            await reach("delete.after_rename")
            await self._emptied(trash)
            return True

    async def _emptied(self, trash: Path) -> None:
        """Remove what is left of a kernel whose folder was set aside."""
        if (group := self._group_of(trash.name.removeprefix(TRASH))) is not None:
            await group.remove()
            await reach("delete.after_group")
        clear(trash)

    async def list(self) -> Sequence[FoundKernel]:
        with looking():
            kept = keepers(self._node.node_id)
            names = {name for name in names_in(self._folder) if name[0] != "."}
            kernels = [self._kernel(name, kept=kept) for name in sorted(names | kept.keys())]
            return [item for kernel in kernels if (item := kernel.found()) is not None]

    async def strays(self, known: Collection[str]) -> Sequence[str]:
        with looking():
            groups = self._groups.names() if self._groups else ()
            prefix = kernel_name(self._node.node_id, "")
            kept = {f"{prefix}{kernel_id}" for kernel_id in known}
            return [
                *(
                    f"process {stat.pid} of kernel {kernel_id}"
                    for stat, kernel_id in orphans(self._node.node_id)
                    if kernel_id not in known
                ),
                *(
                    f"folder {trash.name}"
                    for trash in self._folder.glob(".*")
                    if trash.name.removeprefix(TRASH) not in known
                ),
                *(f"cgroup {g}" for g in groups if g.startswith(prefix) and g not in kept),
            ]

    async def find(self, kernel_id: str, handle: str | None = None) -> FoundKernel | None:
        with looking():
            return self._kernel(kernel_id).found()

    async def follow(self) -> AsyncIterator[str]:
        for trash in self._folder.glob(f"{TRASH}*"):
            with looking():
                await self._emptied(trash)
        for item in await self.list():
            if item.state is FoundState.RUNNING:
                self._watch(item.kernel_id)
        yield ""
        while True:
            yield await self._events.get()

    async def logs(self, kernel_id: str, handle: str, query: LogQuery) -> AsyncIterator[bytes]:
        if problems := list(unkept(query)):
            raise InvalidRequest(problems)

        async def is_running() -> bool:
            found = await self.find(kernel_id) if query.follow else None
            return found is not None and found.state is FoundState.RUNNING

        with looking():
            output = self._folder / kernel_id / OUTPUT
            async for chunk in printed(output, query.tail, is_running):
                yield chunk

    def _watch(self, kernel_id: str) -> None:
        if kernel_id not in self._watches:
            task = asyncio.create_task(self._wait_for_end(kernel_id))
            self._watches[kernel_id] = task
            task.add_done_callback(lambda _: self._watches.pop(kernel_id, None))

    async def _wait_for_end(self, kernel_id: str) -> None:
        with suppress(OSError):  # whoever looks at it is told the same
            kernel = self._kernel(kernel_id)
            if kernel.living is not None:
                await kernel.living.keeper.ended()
                await kernel.all_ended()
        self._events.put_nowait(kernel_id)

    def _kernel(
        self, kernel_id: str, path: Path | None = None, kept: Mapping[str, Proc] | None = None
    ) -> KernelFolder:
        return KernelFolder(
            path or self._folder / kernel_id,
            kernel_id,
            self._node,
            self._group_of(kernel_id),
            lambda: keepers(self._node.node_id) if kept is None else kept,
        )

    def _group_of(self, kernel_id: str) -> KernelGroup | None:
        if self._groups is None:
            return None
        return self._groups.group(kernel_name(self._node.node_id, kernel_id))


@contextmanager
def looking() -> Iterator[None]:
    """What cannot be looked at, for want of a file descriptor or memory, proves nothing."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        why = f"processes and folders cannot be looked at: {what}{error.strerror}"
        raise RuntimeUnavailable(why) from error


def _refuse_what_needs_a_container(edits: ContainerEdits) -> None:
    moved = [mount for mount in edits.mounts if mount.source != mount.target]
    if moved or edits.cdi or edits.device_requests:
        raise RuntimeFailure(
            "its devices need files at other places or CDI, which plain processes do not have"
        )


def _problems(spec: KernelSpec, user: str) -> Iterator[Problem]:
    if not spec.command:
        yield Problem("command", "is empty; the process runtime runs a command")
    if spec.mounts:
        yield Problem("mounts", "the process runtime mounts nothing")
    if spec.ports:
        yield Problem("ports", "the process runtime forwards no ports")
    needs_container = {
        "network": spec.container.network,
        "tmpfs": spec.container.tmpfs,
        "shm_size": spec.container.shm_size,
        "pids_limit": spec.container.pids_limit,
        "platform": spec.container.platform,
    }
    for member, value in needs_container.items():
        if value:
            yield Problem(member, "the process runtime has no containers")
    if spec.user not in (None, user):
        yield Problem("user", f"kernels run as {user} here (runtime.process.user)")
