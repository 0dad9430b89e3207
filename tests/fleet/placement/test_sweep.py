"""The sweep reads a node's whole list, and no list without an end."""

import asyncio
import json
from typing import Any

import pytest

from agentd_fleet.nodes.calls import NodeAnswer
from agentd_fleet.placement import sweep
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.sweep import Sweep
from agentd_fleet.view.fleet_view import FleetNode, NodeStatus

NODE = FleetNode("n1", {}, {}, NodeStatus.READY, "unix:/there")


class PagedNode:
    """A node with pages of 1,000 kernels, whose links name another path."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.paths: list[str] = []

    async def call(self, *words: Any, **options: Any) -> NodeAnswer:
        del options
        path = words[3]
        self.paths.append(path)
        await asyncio.sleep(0)
        start = int(path.partition("=")[2] or 0)
        numbers = range(start, min(start + 1000, self.count))
        rows = [{"kernel_id": f"k{number}", "state": "running"} for number in numbers]
        more = start + 1000 < self.count
        link = f'<http://elsewhere/v1/reload?after={start + 1000}>; rel="next"'
        return NodeAnswer(200, {"Link": link} if more else {}, json.dumps(rows).encode())


def swept(node: PagedNode) -> Sweep:
    none: Any = None
    nodes: Any = node
    return Sweep(FleetBackend(none, none, nodes), none, none)


async def test_sweep_reads_all_pages_of_a_node() -> None:
    node = PagedNode(1001)
    states = await swept(node)._read_states(NODE)
    assert states == dict.fromkeys((f"k{number}" for number in range(1001)), "running")
    assert node.paths == ["/v1/kernels", "/v1/kernels?after=1000"]


async def test_list_without_an_end_counts_as_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "NODE_TIMEOUT_S", 0.05)
    assert await swept(PagedNode(10**9))._read_states(NODE) is None
