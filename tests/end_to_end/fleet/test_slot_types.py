"""Slot types in etcd: each is written once, many in one transaction."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_store import EtcdStore
from agentd_fleet.store.etcd_transport import EtcdCredentials, EtcdUnavailable
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.reports import NodeReport, SlotTypeReport
from end_to_end.fleet.etcd_server import EtcdServers
from support.waiting import until

NODES, TYPES = 400, 41
MOST_TRANSACTIONS = 6
"""Of one gateway: nodes are heard of while the first of them is under way."""


class CountedEtcd(EtcdClient):
    """A client that counts its calls by path; some of its first writes can fail."""

    def __init__(self, access: EtcdCredentials, failures: int = 0) -> None:
        super().__init__(access)
        self.calls: Counter[str] = Counter()
        self.failures = failures
        send = self._transport.call

        async def call(path: str, body: Mapping[str, object]) -> tuple[dict[str, Any], bool]:
            self.calls[path] += 1
            if path == "/v3/kv/txn" and self.failures:
                self.failures -= 1
                raise EtcdUnavailable("lost")
            return await send(path, body)

        self._transport.call = call  # type: ignore[method-assign]


def types_of(number: int) -> list[SlotTypeReport]:
    """Return the slot types of a node: most are those of every node, one is of a few."""
    names = [f"dev{index}.unit" for index in range(TYPES - 1)] + [f"rare{number % 50}.unit"]
    return [SlotTypeReport(name, "count", "1") for name in names]


async def publish(etcd: EtcdClient, count: int) -> None:
    for first in range(0, count, 50):
        reports = {
            f"/agentd/main/nodes/n{number}": NodeReport(
                install_id="i", boot_id="b", version="0", url="unix:/n", slot_types=types_of(number)
            )
            for number in range(first, min(first + 50, count))
        }
        await asyncio.gather(*(etcd.put(k, msgspec.json.encode(r)) for k, r in reports.items()))


@asynccontextmanager
async def gateway(servers: EtcdServers, failures: int = 0) -> AsyncIterator[Any]:
    """Run a gateway's store; yield its state and its client."""
    state = FleetState()
    async with CountedEtcd(EtcdCredentials(servers.endpoints), failures) as etcd:
        running = asyncio.create_task(EtcdStore(etcd, "main", state).run())
        try:
            yield state, etcd
        finally:
            running.cancel()
            await asyncio.wait([running])


async def until_known(state: FleetState, nodes: int, types: int) -> None:
    await until(
        lambda: not (len(state.view.nodes) < nodes or len(state.view.slot_types) < types),
        within_s=60,
    )


@pytest.mark.long
async def test_first_start_writes_each_slot_type_once(servers: EtcdServers) -> None:
    known = TYPES - 1 + 50 + 2  # and cpu and mem, which every gateway knows
    async with EtcdClient(EtcdCredentials(servers.endpoints)) as etcd:
        await publish(etcd, NODES)
        async with gateway(servers) as (one, first), gateway(servers) as (other, second):
            await until_known(one, NODES, known)
            await until_known(other, NODES, known)
        assert first.calls["/v3/kv/txn"] <= MOST_TRANSACTIONS
        assert second.calls["/v3/kv/txn"] <= MOST_TRANSACTIONS
        written, _ = await etcd.range("/agentd/main/slot-types/")
        assert len(written) == known - 2
        assert all(pair.mod_revision == pair.create_revision for pair in written)
        async with gateway(servers) as (third, later):
            await until_known(third, NODES, known)
        assert later.calls["/v3/kv/txn"] <= MOST_TRANSACTIONS
        assert (await etcd.range("/agentd/main/slot-types/"))[0] == written


async def test_slot_type_is_written_after_etcd_failed_once(servers: EtcdServers) -> None:
    async with EtcdClient(EtcdCredentials(servers.endpoints)) as etcd:
        await publish(etcd, 1)
        async with gateway(servers, failures=2) as (state, client):
            await until_known(state, 1, TYPES + 2)
        assert client.calls["/v3/kv/txn"] >= 3


async def test_forgotten_slot_type_is_written_again_when_offered(servers: EtcdServers) -> None:
    async with (
        EtcdClient(EtcdCredentials(servers.endpoints)) as etcd,
        gateway(servers) as (state, _),
    ):
        await publish(etcd, 1)
        await until_known(state, 1, TYPES + 2)
        await etcd.put("/agentd/main/known/n0", b"{}")
        await etcd.delete("/agentd/main/nodes/n0")
        await etcd.delete("/agentd/main/known/n0")
        await until(lambda: "n0" not in state.view.nodes)
        await etcd.delete("/agentd/main/slot-types/rare0.unit")
        await until(lambda: "rare0.unit" not in state.view.slot_types)
        await publish(etcd, 1)
        await until_known(state, 1, TYPES + 2)
        assert (await etcd.get("/agentd/main/slot-types/rare0.unit")) is not None
