"""What there is of a node's kernels in an engine: containers, as inspections tell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from agentd.core.kernel import LIVE, Kernel, KernelRef
from agentd.core.observation import Listing, ObservedKernel
from agentd.core.plan import kernel_name
from agentd.host.accounts import COUNTED_V1, MOUNT, UNIFIED, Account, account_of, is_v2
from agentd.runtimes.docker.absences import Absences
from agentd.runtimes.docker.config import KERNEL_LABEL, NODE_LABEL, RECORD_LABEL
from agentd.runtimes.docker.engine import AnswerLost, EngineClient, EngineError
from agentd.runtimes.docker.inspection import inspected, labels_of, observed_kernel
from agentd.runtimes.docker.translation import NOT_FOUND, absent_is_fine, proving

INSPECTS_AT_ONCE = 16
ASK_TIMEOUT_S = 5.0
"""How long an engine may take to say what one container, or the engine itself, is."""
ACCOUNT_TIMEOUT_S = 2.0
"""How long the figures of all kernels may wait for what an engine says of some."""
LIST_TIMEOUT_S = 20.0
"""How long it may take to list everything, or to remove what never ran."""
_PLACES = ("docker/{}", "system.slice/docker-{}.scope")
"""Below a hierarchy, by the engine's driver of cgroups: cgroupfs and systemd
(dockerd(8), `--cgroup-parent`)."""


class Observer:
    """Looks at the containers of one node."""

    def __init__(self, engine: EngineClient, node_id: str, absences: Absences) -> None:
        self._engine = engine
        self._node_id = node_id
        self._absences = absences
        self._accounts: dict[str, Account] = {}
        self._asked_for: set[str] = set()

    async def listing(self) -> Listing:
        """Return every kernel; what cannot be inspected alone is as the list says."""
        filters = json.dumps({"label": [f"{NODE_LABEL}={self._node_id}"]})
        places = asyncio.Semaphore(INSPECTS_AT_ONCE)

        async def shown(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
            async with places:
                return await self._shown(summary)

        with proving():
            return await asyncio.wait_for(self._listed(shown, filters), LIST_TIMEOUT_S)

    async def _listed(
        self,
        shown: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any] | None]],
        filters: str,
    ) -> Listing:
        params = {"all": "1", "filters": filters}
        summaries = await self._engine.call("GET", "/containers/json", params)
        answers = await asyncio.gather(*(shown(summary) for summary in summaries))
        there = [answer for answer in answers if answer is not None]
        ours = {labels_of(a)[KERNEL_LABEL]: a for a in there if self._fits(a)}
        for answer in there:
            kernel_id = labels_of(answer).get(KERNEL_LABEL)
            if kernel_id and kernel_id not in ours and await self._was_renamed(answer):
                ours[kernel_id] = answer
        return Listing(tuple(self.observed(answer) for answer in ours.values()))

    async def _shown(self, summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Inspect one container of a list; what the list said of it if that fails alone."""
        try:
            return await self.inspection(summary["Id"])
        except (TimeoutError, AnswerLost):
            pass
        except EngineError as error:
            if error.status == NOT_FOUND:
                return None
        return {
            "Id": summary["Id"],
            "Name": (summary.get("Names") or [""])[0],
            "State": {"Status": summary.get("State", "running")},
            "Config": {"Labels": summary.get("Labels", {})},
        }

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        """Return one kernel, by its handle, else by its name; None if it is not there."""
        if ref.handle and (shown := await self._found(ref.handle)):
            labels = labels_of(shown)
            if (labels.get(NODE_LABEL), labels.get(KERNEL_LABEL)) == (self._node_id, ref.kernel_id):
                return self.observed(shown)
        shown = await self._found(kernel_name(self._node_id, ref.kernel_id))
        return self.observed(shown) if shown and self._fits(shown) else None

    async def _was_renamed(self, shown: Mapping[str, Any]) -> bool:
        """Tell a kernel that somebody renamed from a container that inherits its image's labels."""
        with absent_is_fine():
            image = await self._engine.call("GET", f"/images/{shown['Image']}/json")
            inherited = (image.get("Config") or {}).get("Labels") or {}
            return inherited.get(RECORD_LABEL) != labels_of(shown).get(RECORD_LABEL)
        return True

    async def _found(self, container: str) -> Mapping[str, Any] | None:
        with proving(), absent_is_fine():
            return await self.inspection(quote(container, safe=""))
        return None

    async def inspection(self, container: str) -> Mapping[str, Any]:
        """Return what the engine says of a container."""
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return inspected(await self._engine.call("GET", f"/containers/{container}/json"))

    async def accounts(self, kernels: Sequence[Kernel]) -> Mapping[str, Account]:
        """Return where living containers are counted; each is looked for once.

        The engine is only asked about those that are not where engines put them; what it does not
        say in time is missing.
        """
        handles = {k.kernel_id: k.handle for k in kernels if k.handle and k.state in LIVE}
        living = set(handles.values())
        kept = {handle: found for handle, found in self._accounts.items() if handle in living}
        kept |= await asyncio.to_thread(_looked_for, sorted(living - kept.keys()))
        elsewhere = sorted(living - kept.keys() - self._asked_for)[:INSPECTS_AT_ONCE]
        with suppress(TimeoutError):
            async with asyncio.timeout(ACCOUNT_TIMEOUT_S):
                found = await asyncio.gather(*map(self._placed, elsewhere), return_exceptions=True)
                places = zip(elsewhere, found, strict=True)
                kept |= {h: item for h, item in places if isinstance(item, Account)}
        self._asked_for = (self._asked_for | {*elsewhere}) & living
        self._accounts = kept
        return {k: kept[handle] for k, handle in handles.items() if handle in kept}

    async def _placed(self, container: str) -> Account | None:
        """Return where a container is counted, as its process tells; None if it is not told."""
        shown = await self._found(container)
        pid = shown["State"].get("Pid") if shown is not None else 0
        found = account_of(pid, container) if pid else Account()
        return replace(found, has_network=True) if found.folders else None

    def observed(self, shown: Mapping[str, Any]) -> ObservedKernel:
        """Return the kernel that a container of ours is, and why it ended if its engine did."""
        found = observed_kernel(shown)
        if found.is_alive:
            return found
        ending = self._absences.explained(found.kernel_id, found.ending, found.started_at)
        return found if ending is found.ending else replace(found, ending=ending)

    def _fits(self, shown: Mapping[str, Any]) -> bool:
        """Tell whether a container's name is the one that its labels call for."""
        labels = labels_of(shown)
        expected = kernel_name(self._node_id, labels.get(KERNEL_LABEL, ""))
        return labels.get(NODE_LABEL) == self._node_id and shown["Name"] == f"/{expected}"


def _looked_for(containers: Sequence[str]) -> dict[str, Account]:
    """Return where containers are counted that are where engines put them."""
    found: dict[str, Account] = {}
    hierarchies = [UNIFIED] if is_v2() else [c for c in COUNTED_V1 if (MOUNT / c).exists()]
    for container in containers:
        for place in _PLACES:
            folders = {name: MOUNT / name / place.format(container) for name in hierarchies}
            if all(folder.exists() for folder in folders.values()):
                paths = {name: str(folder) for name, folder in folders.items()}
                found[container] = Account(paths, has_network=True)
    return found
