"""The slices of agents: a second fence around all kernels of each, and their journal's limits.

A slice may be as large as its agent's partition and what its living kernels hold, some of which
may be of an older partition. It is set at each create, and so becomes smaller only after what made
it larger has ended: lowering `MemoryMax=` under living kernels kills them. What an operator says in
a drop-in of their own (systemd.unit(5)) is left alone.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from agentd.core.plan import KernelPlan
from agentd.host.units import Manager, Property, UnitRefused
from agentd.runtimes.systemd.unit import mask, namespace_name, slice_name

_RUNTIME = Path("/run/systemd")
JOURNAL_LIMITS = """\
# Written by agentd: the log of one agent's kernels. A file of another name after this one, in
# /etc/systemd/journald@{namespace}.conf.d, is stronger (journald.conf(5)).
[Journal]
SystemMaxUse=1G
RuntimeMaxUse=128M
RateLimitIntervalSec=0
RateLimitBurst=0
"""


class Slices:
    """Keeps the slices of agents as large as their kernels need."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._fences: dict[str, list[Property]] = {}

    async def fence(self, plan: KernelPlan) -> None:
        """Have a kernel's slice and journal be there, large enough for it and for all others."""
        agent_id = plan.spec.agent_id
        fence: list[Property] = []
        if plan.fence.cores:
            fence.append(("AllowedCPUs", "ay", mask(map(int, plan.fence.cores))))
        if plan.fence.memory_bytes:
            fence.append(("MemoryMax", "t", plan.fence.memory_bytes))
        if self._fences.get(agent_id) == fence:
            return
        _limit_journal(agent_id)
        name = slice_name(agent_id)
        said = await self._operators(name)
        wanted = [prop for prop in fence if prop[0] not in said]
        if wanted:
            await self._manager.set(name, wanted)
        self._fences[agent_id] = fence

    async def _operators(self, name: str) -> set[str]:
        """Return the properties that an operator's drop-ins of a slice set."""
        with suppress(UnitRefused):
            seen = await self._manager.properties(name, ("Unit.DropInPaths",)) or {}
            found = (Path(path) for path in seen.get("Unit.DropInPaths", ()))
            texts = [_text(path) for path in found if not path.is_relative_to(_RUNTIME)]
            return {line.partition("=")[0].strip() for text in texts for line in text.splitlines()}
        return set()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _limit_journal(agent_id: str) -> None:
    """Bound the journal of an agent, before its first kernel has one started."""
    namespace = namespace_name(agent_id)
    file = _RUNTIME / f"journald@{namespace}.conf.d" / "10-agentd.conf"
    with suppress(OSError):
        if not file.exists():
            file.parent.mkdir(mode=0o755, exist_ok=True)
            file.write_text(JOURNAL_LIMITS.format(namespace=namespace), encoding="utf-8")
            file.chmod(0o644)
