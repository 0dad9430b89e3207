"""Pages over the pages of nodes: each kernel once, in order, however a page is cut."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentd.core.access import Caller, Role
from agentd_fleet.gateway.lists import KernelPage
from agentd_fleet.gateway.queries import FleetKernelsQuery
from agentd_fleet.placement.kernels import NodeList
from agentd_fleet.store.route import KernelRoute
from agentd_fleet.view.fleet_view import FleetNode

ADMIN = Caller("root", Role.ADMIN)


class PagedNodes:
    """Nodes with kernels 1, 2, … whose pages end after `cap`; a negative count: no answer."""

    def __init__(self, counts: Mapping[str, int], cap: int) -> None:
        self.counts, self.cap = counts, cap

    async def list_kernels(
        self, caller: Caller, node: FleetNode, query: Sequence[tuple[str, str]]
    ) -> NodeList | None:
        del caller
        count, given = self.counts[node.node_id], dict(query)
        if count < 0:
            return None
        first = int(given.get("after", "0~0").partition("~")[0]) + 1
        numbers = range(first, count + 1)[: min(int(given["limit"]), self.cap)]
        rows = [{"node_id": node.node_id, "kernel_id": f"{number}"} for number in numbers]
        is_last = not numbers or numbers[-1] == count
        return NodeList(rows, len(rows), "" if is_last else f"{numbers[-1]}~{numbers[-1]}")

    async def routes_to(
        self, caller: Caller, nodes: Sequence[str], past: tuple[str, str]
    ) -> Sequence[Any]:
        del caller
        routes = (
            KernelRoute(
                node_id=node, kernel_id=f"{number}", agent_id="a", request_hash="", owner="o"
            )
            for node in sorted(nodes)
            for number in range(1, 1 - self.counts[node])
        )
        return [route for route in routes if (route.node_id, route.kernel_id) > past]


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(-4, 9), max_size=5),
    st.integers(1, 9),
    st.integers(1, 7),
)
def test_pages_have_every_kernel_once_and_in_order(
    counts: dict[str, int], cap: int, limit: int
) -> None:
    kernels: Any = PagedNodes(counts, cap)
    nodes = [FleetNode(name, {}, {}) for name in sorted(counts)]
    query, found = FleetKernelsQuery(limit=limit), list[tuple[str, str]]()
    for _ in range(100):
        page = KernelPage(kernels, ADMIN, query)
        first = query.after_node or ""
        asyncio.run(page.read([node for node in nodes if node.node_id >= first]))
        assert len(page.rows) <= limit
        found += [(row["node_id"], row["kernel_id"]) for row in page.rows]
        if page.following is None:
            break
        node_id, after = page.following
        query = FleetKernelsQuery(limit=limit, after_node=node_id, after=after or None)
    else:
        raise AssertionError("the list has no end")
    assert found == [
        (name, f"{number}") for name in sorted(counts) for number in range(1, abs(counts[name]) + 1)
    ]


async def test_page_ends_after_a_node_with_many_bytes() -> None:
    async def list_kernels(caller: Caller, node: FleetNode, query: object) -> NodeList:
        del caller, query
        return NodeList([{"node_id": node.node_id, "kernel_id": "k"}], 3 << 20, "")

    kernels: Any = SimpleNamespace(list_kernels=list_kernels)
    page = KernelPage(kernels, ADMIN, FleetKernelsQuery())
    await page.read([FleetNode(name, {}, {}) for name in "abcd"])
    assert [row["node_id"] for row in page.rows] == ["a", "b"]
    assert page.following == ("c", "")
