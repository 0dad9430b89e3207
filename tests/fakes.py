"""Stand-ins for the outside; the runtime passes the same contract suite as the real ones."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace

from agentd.core.container_edits import ContainerEdits
from agentd.core.devices import Device
from agentd.core.kernel import Ending, KernelSpec, KernelState
from agentd.core.plan import KernelPlan
from agentd.core.reconcile import FoundKernel, FoundState
from agentd.errors import CommandNotFound, InvalidRequest, Problem, RuntimeUnavailable
from agentd.plugin_api import Features, Measurement
from agentd.services.interfaces import (
    Intent,
    LogQuery,
    PluginListing,
    PluginState,
    PluginStatus,
    Progress,
)

KNOWN_COMMANDS = ("sh", "sleep", "printf")


class FakeRuntime:
    """Kernels in memory. It knows `sleep`, `sh -c "exit N"` and `sh -c "printf TEXT; …"`."""

    name = "fake"
    minimum_memory_bytes = 1

    def __init__(self) -> None:
        self.kernels: dict[str, FoundKernel] = {}
        self.output: dict[str, bytes] = {}
        self.plans: list[KernelPlan] = []
        self.fail_create: BaseException | None = None
        self.is_down = False
        self.gate: asyncio.Event | None = None
        self._followers: list[asyncio.Queue[str]] = []
        self._count = 0

    async def close(self) -> None:
        self._followers.clear()

    def unenforced(self, spec: KernelSpec) -> frozenset[str]:
        return frozenset()

    async def features(self) -> Features:
        return Features(self.name)

    def _answer(self) -> None:
        if self.is_down:
            raise RuntimeUnavailable("the fake is down")

    async def check(self, spec: KernelSpec) -> None:
        if not spec.command:
            raise InvalidRequest([Problem("command", "is empty")])

    async def create(self, plan: KernelPlan, progress: Progress) -> FoundKernel:
        self._answer()
        progress(KernelState.CREATING)
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if self.fail_create is not None:
            raise self.fail_create
        command = plan.spec.command
        if command[0] not in KNOWN_COMMANDS:
            raise CommandNotFound(f"command {command[0]!r}: not found")
        self._count += 1
        self.plans.append(plan)
        found = FoundKernel(
            kernel_id=plan.spec.kernel_id,
            agent_id=plan.spec.agent_id,
            runtime=self.name,
            handle=str(self._count),
            state=FoundState.RUNNING,
            record=plan.record,
            statement=plan.statement,
            started_at=1.0,
        )
        self.kernels[found.kernel_id] = found
        script = command[-1] if command[0] == "sh" else ""
        text = script.partition("printf '")[2].partition("'")[0]
        self.output[found.kernel_id] = text.encode().decode("unicode_escape").encode("latin-1")
        if "exit " in script:
            self.end(found.kernel_id, int(script.rpartition("exit ")[2]))
        return found

    def end(self, kernel_id: str, exit_code: int = 0) -> None:
        """The kernel ends by itself."""
        ending = Ending(exit_code, finished_at=2.0)
        self.put(replace(self.kernels[kernel_id], state=FoundState.EXITED, ending=ending))

    def put(self, found: FoundKernel) -> None:
        """Something happens to a kernel from outside."""
        self.kernels[found.kernel_id] = found
        self._tell(found.kernel_id)

    def vanish(self, kernel_id: str) -> None:
        """Somebody removes it."""
        del self.kernels[kernel_id]
        self._tell(kernel_id)

    def _tell(self, kernel_id: str) -> None:
        for follower in self._followers:
            follower.put_nowait(kernel_id)

    async def stop(self, kernel_id: str, handle: str, timeout_s: float | None) -> None:
        self._answer()
        found = self.kernels.get(kernel_id)
        if found is not None and found.state is not FoundState.EXITED:
            self.end(kernel_id, 137 if timeout_s == 0 else 143)

    async def remove(self, kernel_id: str, handle: str) -> None:
        self._answer()
        self.kernels.pop(kernel_id, None)

    async def discard(self, kernel_id: str, handle: str) -> bool:
        self._answer()
        found = self.kernels.get(kernel_id)
        if found is not None and found.state in (FoundState.RUNNING, FoundState.PAUSED):
            return False
        self.kernels.pop(kernel_id, None)
        return True

    async def list(self) -> Sequence[FoundKernel]:
        self._answer()
        return list(self.kernels.values())

    async def strays(self, known: Collection[str]) -> Sequence[str]:
        self._answer()
        return ()

    async def find(self, kernel_id: str, handle: str | None = None) -> FoundKernel | None:
        self._answer()
        return self.kernels.get(kernel_id)

    async def follow(self) -> AsyncIterator[str]:
        self._answer()
        events: asyncio.Queue[str] = asyncio.Queue()
        self._followers.append(events)
        yield ""
        while True:
            yield await events.get()

    async def logs(self, kernel_id: str, handle: str, query: LogQuery) -> AsyncIterator[bytes]:
        lines = self.output[kernel_id].splitlines(keepends=True)
        yield b"".join(lines if query.tail is None else lines[len(lines) - query.tail :])


class FakePlugins:
    """Plugins that offer fixed listings."""

    def __init__(self, *listings: PluginListing) -> None:
        self.ready = list(listings)
        self.failed: dict[str, str] = {}
        self.pending: list[str] = []
        self.edits = ContainerEdits()
        self.failure: Exception | None = None
        self.told: list[tuple[str, str]] = []

    def statuses(self) -> list[PluginStatus]:
        return [
            *(PluginStatus(item.name, item.name, PluginState.READY) for item in self.ready),
            *(PluginStatus(n, n, PluginState.FAILED, why) for n, why in self.failed.items()),
            *(PluginStatus(name, name, PluginState.PENDING) for name in self.pending),
        ]

    def listings(self) -> list[PluginListing]:
        return self.ready

    def measurements(self) -> dict[str, Sequence[Measurement]]:
        return {}

    async def changes(self) -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield ""

    def tell(self, step: str, kernel_id: str, allocation: object, stable_ids: object) -> None:
        self.told.append((step, kernel_id))

    async def container_edits(
        self, allocation: object, stable_ids: object, features: object
    ) -> ContainerEdits:
        if self.failure is not None:
            raise self.failure
        return self.edits


class FakeMemory:
    """What a node remembers, in memory."""

    def __init__(self) -> None:
        self.devices: Sequence[Device] = ()
        self.intents: dict[str, Intent] = {}

    def load_devices(self) -> Sequence[Device]:
        return self.devices

    def save_devices(self, devices: Sequence[Device]) -> None:
        self.devices = devices

    def load_intents(self) -> Sequence[Intent]:
        return list(self.intents.values())

    def save_intent(self, intent: Intent) -> None:
        self.intents[intent.kernel_id] = intent

    def drop_intent(self, kernel_id: str) -> None:
        self.intents.pop(kernel_id, None)

    def settle(self) -> None:
        pass

    def warnings(self) -> Sequence[str]:
        return ()
