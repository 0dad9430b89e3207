"""Routes whose create nobody saw the end of, settled by asking their nodes."""

from __future__ import annotations

import asyncio
import json
import random
import time

import structlog
from msgspec.structs import replace

from agentd.errors import AgentdError, NodeUnavailable, Unavailable
from agentd_fleet.asking import Pace
from agentd_fleet.nodes import GATEWAY, Nodes
from agentd_fleet.placing import Placer
from agentd_fleet.route import Kept, Progress, Store
from agentd_fleet.state import FleetState

log = structlog.get_logger()

REST = 20.0
"""How much longer than a sweep the pause after it is: many routes are looked at less often."""


COMING = ("preparing", "pulling", "creating")
"""States of kernels that may yet come to nothing."""


class Sweep:
    """Looks at all routes now and then; any number of gateways may do so at once.

    A route that has just changed is somebody's at work. One is dropped only if its node said twice
    that it has no such kernel, and answered for longer in between than a request can be under way
    to it. How long is told by this process's own clock, which nobody sets.
    """

    def __init__(
        self, store: Store, state: FleetState, nodes: Nodes, placer: Placer, pace: Pace
    ) -> None:
        self._store = store
        self._state = state
        self._nodes = nodes
        self._placer = placer
        self._pace = pace
        self._seen: dict[tuple[str, int], float] = {}
        self._absent: dict[tuple[str, int], float] = {}

    async def run(self) -> None:
        """Sweep until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self.once()
            except AgentdError as error:
                log.info("fleet.sweep_later", reason=str(error))
            pause_s = max(self._pace.sweep_s, REST * (loop.time() - began))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    async def once(self) -> None:
        """Look at every route once: nodes that routes lead to are known, and creates settled."""
        seen: set[tuple[str, int]] = set()
        now = asyncio.get_running_loop().time()
        async for page in self._store.routes():
            for kept in page:
                if self._state.node(kept.route.node_id) is None:
                    self._state.lose(kept.route.node_id, time.time())
                if kept.route.progress is Progress.PLACING:
                    key = (kept.route.kernel_id, kept.revision)
                    seen.add(key)
                    if now - self._seen.setdefault(key, now) >= 2 * self._pace.insist_s:
                        await self._settled(kept)
        self._seen = {key: at for key, at in self._seen.items() if key in seen}
        self._absent = {key: at for key, at in self._absent.items() if key in seen}

    async def _settled(self, kept: Kept) -> None:
        """Settle a route; whatever is wrong with one, or with its node, stops no other."""
        try:
            await self._settle(kept)
        except Unavailable:
            raise
        except Exception as error:  # noqa: BLE001 - what a node answers is anything
            log.warning("fleet.not_settled", kernel_id=kept.route.kernel_id, reason=repr(error))

    async def _settle(self, kept: Kept) -> None:
        route, key = kept.route, (kept.route.kernel_id, kept.revision)
        if self._placer.is_busy(route.kernel_id):
            return
        async with self._placer.alone(route.kernel_id):
            node = self._state.node(route.node_id)
            if node is None or not node.url:
                return
            try:
                path = f"/v1/kernels/{route.kernel_id}"
                answer = await self._nodes.ask(node, GATEWAY, "GET", path)
            except NodeUnavailable:
                self._absent.pop(key, None)
                return
            if not answer.is_error and json.loads(answer.body)["state"] in COMING:
                self._absent.pop(key, None)
            elif not answer.is_error:
                placed = replace(route, progress=Progress.PLACED)
                await self._store.keep(placed, kept.revision)
                log.info("fleet.settled", kernel_id=route.kernel_id, node_id=route.node_id)
            elif answer.error().code == "UnknownKernel":
                now = asyncio.get_running_loop().time()
                since = self._absent.setdefault(key, now)
                if now - since >= self._pace.settled_s:
                    await self._store.drop(route.kernel_id, kept.revision)
                    log.info("fleet.never_was", kernel_id=route.kernel_id, node_id=route.node_id)
