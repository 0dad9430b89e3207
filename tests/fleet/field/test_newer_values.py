"""Values of newer versions in reports of a schema that a gateway reads."""

import json
import random
from typing import Any

import pytest
from structlog.testing import capture_logs

from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_store import EtcdStore
from agentd_fleet.store.etcd_transport import EtcdCredentials
from agentd_fleet.view import fleet_state
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetNode, NodeRuntime
from agentd_fleet.view.reports import parse_node_report, parse_reading, reason_line, with_free
from support.fleet_reports import free_report, node_report
from support.stub_node import AMOUNTS, NODE_PAGES

NEW_SLOT = {"name": "tpu.ring", "kind": "ring", "quantum": "3/4", "primary": "tpu.chip"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown state": ({"state": "maintenance"}, "unreadable: unknown state 'maintenance'"),
    "a long unknown state": ({"state": "m" * 500}, f"unreadable: unknown state '{'m' * 79}..."),
    "an unknown state with a reason": ({"state": "maintenance", "reason": "so"}, "so"),
    "an unknown state of a runtime": ({"runtime": {"name": "vm", "state": "paused"}}, ""),
    "an unknown member": ({"rack": {"row": 7}}, ""),
    "a slot of an unknown kind": ({"slot_types": [NEW_SLOT]}, ""),
}


def read(**changes: Any) -> FleetNode:
    report = json.loads(node_report(1, 3))
    for slot in changes.pop("slot_types", []):
        report["slot_types"].append(slot)
        for agent in report["agents"].values():
            agent[slot["name"]] = "3/4"
    report |= changes
    parsed = parse_node_report("n1", json.dumps(report).encode(), seen_at=0.0)
    return with_free(parsed, free_report(3, random.Random(1)))


@pytest.mark.parametrize("case", CASES)
def test_newer_value_leaves_the_others_of_its_report(case: str) -> None:
    changes, reason = CASES[case]
    node, plain = read(**changes), read()
    assert node.exclusion_reason == reason
    assert node.is_available is (not reason)
    assert (node.url, node.slot_types, node.whole) == (plain.url, plain.slot_types, plain.whole)
    assert node.offers == plain.offers
    assert sum(amount for offer in node.offers.values() for amount in offer.free.values())


def test_newer_daemon_is_read_without_slots_of_unknown_kind() -> None:
    pages = json.loads(json.dumps(NODE_PAGES))
    pages["/v1/slot-types"].append(NEW_SLOT)
    for holder in (pages["/v1/agents"][0], pages["/v1/devices"][0]):
        holder["slots"]["tpu.ring"] = {**AMOUNTS, "free": "2/4"}
    pages["/v1/node"]["runtime"] = {"name": "vm", "state": "paused", "reason": "so"}
    reading = parse_reading(*(pages[f"/v1/{name}"] for name in PAGES))
    assert reading.runtime == NodeRuntime("vm", "paused")
    plain = parse_reading(*(NODE_PAGES[f"/v1/{name}"] for name in PAGES))
    assert (reading.capacity, reading.free.node) == (plain.capacity, plain.free.node)


PAGES = ("node", "slot-types", "agents", "devices")
REASONS = {
    "two lines": ("a\r\nb", "a b"),
    "a control character": ("a\x00\x1bb", "a\\x00\\x1bb"),
    "half a character": ("a\ud800", "a\\ud800"),
    "another script": ("já", "já"),
}


@pytest.mark.parametrize("case", REASONS)
def test_reason_of_a_node_is_one_printable_line(case: str) -> None:
    """It becomes a header, a line of a log and a cell of a table."""
    text, line = REASONS[case]
    assert reason_line(text) == line


SCHEMAS: dict[str, tuple[list[int], int]] = {
    "one newer schema": ([9] * 5, 1),
    "two that alternate": ([9, 10] * 30, fleet_state.MAX_LOGGED),
    "one that is mended and returns": ([9, 1] * 3, 3),
    "one that is mended and returns often": ([9, 1] * 30, fleet_state.MAX_LOGGED),
    "another one each time": ([*range(9, 60)], 2 * fleet_state.MAX_LOGGED),
}


@pytest.mark.parametrize("case", SCHEMAS)
async def test_reasons_that_a_node_writes_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Its key is its own, and every gateway would write a line for each write of it."""
    schemas, count = SCHEMAS[case]
    store = EtcdStore(EtcdClient(EtcdCredentials(())), "main", FleetState())
    report = json.loads(node_report(1, 3))

    def written() -> list[str]:
        with capture_logs() as logged:
            for schema in schemas:
                value = json.dumps(report | {"schema": schema}).encode()
                store._on_node_change("n1", value, 1)
        return [line["event"] for line in logged]

    assert written() == ["node.schema_unsupported"] * count
    monkeypatch.setattr(fleet_state, "LOGGED_S", 0.0)
    assert bool(written()) is (set(schemas) != {9})


async def test_runtimes_that_a_node_reports_do_not_fill_the_log() -> None:
    state = FleetState()
    with capture_logs() as logged:
        for number in range(60):
            state.update_node(read(runtime={"name": f"r{number}", "state": "unavailable"}))
    assert [line["event"] for line in logged] == ["node.unusable"] * (2 * fleet_state.MAX_LOGGED)
