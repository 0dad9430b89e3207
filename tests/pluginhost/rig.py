"""Plugin hosts of one test, and what is waited for."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from importlib_metadata import EntryPoint

from agentd.config.plugins import PluginTable
from agentd.core.allocation.ledger import Allocation, Share
from agentd.core.devices import DeviceId
from agentd.core.slots import ONE, SlotKind
from agentd.host.processes import all_processes
from agentd.plugin_api import Features
from agentd.pluginhost.assignment import AssignmentRules
from agentd.pluginhost.host import PluginHost
from agentd.pluginhost.instance import PluginTimeouts
from agentd.services.protocols import PluginListing, PluginState

PROCESS = Features("process")


def point(name: str, target: str) -> EntryPoint:
    return EntryPoint(name, f"support.faulty_plugins:{target}", "agentd.accelerators")


class Hosts:
    """Makes plugin hosts, and closes them at the end."""

    def __init__(self) -> None:
        self.made: list[PluginHost] = []

    def __call__(
        self,
        tables: Sequence[PluginTable] = (),
        allow=(),
        block=(),
        call_timeout_s: float = 5.0,
        max_memory_bytes: int = PluginTimeouts().max_memory_bytes,
        points: Sequence[EntryPoint] | None = None,
        dealing_rules: AssignmentRules | None = None,
        stopped: Mapping[str, tuple[str, PluginListing | None]] = MappingProxyType({}),
        **targets: str,
    ) -> PluginHost:
        points = points or [point(name, target) for name, target in targets.items()]
        pace = PluginTimeouts(call_timeout_s, 0.1, max_memory_bytes)
        made = PluginHost(
            tables,
            allow,
            block,
            features=PROCESS,
            timeouts=pace,
            points=points,
            dealing_rules=dealing_rules,
            stopped=stopped,
        )
        self.made.append(made)
        return made


async def opened(made: PluginHost, timeout_s: float = 10) -> dict[str, tuple[PluginState, str]]:
    await made.open(timeout_s)
    return {status.name: (status.state, status.reason) for status in made.statuses()}


def states(made: PluginHost) -> dict[str, PluginState]:
    return {status.name: status.state for status in made.statuses()}


async def until(made: PluginHost, holds: Callable[[], bool]) -> None:
    """Follow the changes of the plugins until something holds."""
    async with asyncio.timeout(10):
        changes = made.changes()
        while not holds():
            await anext(changes)


async def until_ready(made: PluginHost, name: str) -> None:
    await until(made, lambda: states(made)[name] is PluginState.READY)


def given(*names: str) -> Allocation:
    return Allocation(
        tuple(
            Share(DeviceId(name, f"{name}0"), "S", f"{name}.device", SlotKind.COUNT, ONE)
            for name in names
        )
    )


def scripted(tmp_path: Path, target: str = "Scripted") -> tuple[PluginTable, Path]:
    file = tmp_path / "script"
    file.write_text("fine")
    return PluginTable(name="one", plugin=target, settings={"file": str(file)}), file


def pid_of(made: PluginHost, name: str) -> int:
    return made._instances[name]._process.pid


def helpers(nap: str) -> list[int]:
    return [
        stat.pid
        for stat in all_processes()
        if Path(f"/proc/{stat.pid}/cmdline").read_bytes() == f"sleep\0{nap}\0".encode()
    ]


async def until_no_helpers(nap: str) -> None:
    """Wait for the end of helpers that were killed: the signal does not wait for it."""
    async with asyncio.timeout(10):
        while helpers(nap):
            await asyncio.sleep(0.01)
