"""Values of nodes in the store: whatever one is, it is listed with the reason."""

import json
import random
from typing import Any

import msgspec
import pytest

from agentd_fleet.view import reports
from agentd_fleet.view.fleet_view import FleetView, NodeStatus
from agentd_fleet.view.reports import (
    MAX_REASON,
    known_record,
    parse_known_node,
    parse_node_report,
    parse_reading,
    with_free,
)
from support.fleet_reports import free_report, node_report
from support.stub_node import NODE_PAGES

ODD: list[Any] = [None, 7, -1, 1.5, True, "", "x" * 300, [], {}, [[]], {"a": {}}, {"a": 7}, 10**30]
RAW = [b"", b"null", b"7", b"[]", b"{", b"\xff", b'{"schema":', b"[" * 100_000,
       b'{"schema": 1, "x": ' + b"[" * 100_000, b'{"schema": 1, "url": "\\ud800"}',
       b'{"schema": 99}', b'{"schema": "1"}']  # fmt: skip


def damaged(value: Any, choice: random.Random) -> Any:
    """Return a JSON value with one member missing or replaced, at any depth."""
    if not isinstance(value, (dict, list)) or not value or choice.random() < 0.1:
        return choice.choice(ODD)
    key = choice.choice([*value]) if isinstance(value, dict) else choice.randrange(len(value))
    if choice.random() < 0.15:
        del value[key]
    else:
        value[key] = damaged(value[key], choice)
    return value


def read(report: bytes, free: bytes, view: FleetView | None = None, number: int = 1) -> FleetView:
    """Read values as a gateway does, and return the view with the node."""
    node = with_free(parse_node_report(f"n{number}", report, seen_at=0.0), free)
    assert node.node_id == f"n{number}"
    assert len(node.exclusion_reason) <= MAX_REASON
    msgspec.json.encode([node.exclusion_reason, node.url, node.labels, list(node.offers)])
    view = (view or FleetView()).with_changes([node], revision=1)
    view.statistics()
    return view.with_slot_types({**node.slot_types, **view.slot_types}, 2)


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_value_that_is_not_a_report_is_listed(raw: bytes) -> None:
    good, free = node_report(1, 3), free_report(3, random.Random(1))
    assert parse_node_report("n1", raw, seen_at=0.0).node.exclusion_reason
    assert with_free(parse_node_report("n1", good, seen_at=0.0), raw).node_id == "n1"
    read(raw, free)
    read(good, raw)
    assert parse_known_node("n1", raw).status is NodeStatus.LOST
    assert b"first_seen" in known_record(raw, "", [])


def test_damaged_report_is_listed_and_raises_nothing() -> None:
    choice = random.Random(5)
    good, free = node_report(1, 3), free_report(3, choice)
    view = FleetView()
    for number in range(2000):
        report = json.dumps(damaged(json.loads(good), choice)).encode()
        amounts = json.dumps(damaged(json.loads(free), choice)).encode()
        view = read(report, free, view, number % 20)
        view = read(good, amounts, view, number % 20)
        parse_known_node("n1", report)
        known_record(report, "", [])


def test_reason_of_a_publisher_is_the_node_s() -> None:
    report = json.loads(node_report(1, 3)) | {"reason": "unreadable: x" * 100}
    node = parse_node_report("n1", json.dumps(report).encode(), seen_at=0.0).node
    assert node.exclusion_reason.startswith("unreadable: x")
    assert len(node.exclusion_reason) == MAX_REASON
    assert not node.is_available


def test_slot_type_with_a_huge_unit_is_refused() -> None:
    """Gateways write slot types of several nodes in one transaction of limited size."""
    report = json.loads(node_report(1, 3))
    report["slot_types"][0]["unit"] = "x" * 1000
    node = parse_node_report("n1", json.dumps(report).encode(), seen_at=0.0).node
    assert node.exclusion_reason == "unreadable: too long a unit, group or primary slot of cpu"
    assert not node.slot_types


@pytest.mark.parametrize("generation", [-1, 1 << 63, 10**25])
def test_generation_that_no_list_can_contain_is_refused(generation: int) -> None:
    report = json.loads(node_report(1, 3)) | {"generation": generation}
    node = parse_node_report("n1", json.dumps(report).encode(), seen_at=0.0).node
    assert node.exclusion_reason.endswith("at `$.generation`")
    assert node.generation == 0


def test_large_answer_of_a_node_is_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may answer anything, and the event loop serves all others, too."""
    count, reads = 300, 0
    of_struct = reports._DeviceAnswer.__dict__["agents"]

    class CountedAnswer(reports._DeviceAnswer, frozen=True):
        @property
        def agents(self) -> list[str]:  # type: ignore[override] # counts
            nonlocal reads
            reads += 1
            agents: list[str] = of_struct.__get__(self)
            return agents

    monkeypatch.setattr(reports, "_DeviceAnswer", CountedAnswer)
    node, types = NODE_PAGES["/v1/node"], NODE_PAGES["/v1/slot-types"]
    agents = [{"agent_id": f"a{number}", "slots": {}} for number in range(count)]
    devices = [
        {"agents": [f"a{number}", "other"], "state": "ready", "slots": {}, "model": f"m{number}"}
        for number in range(count)
    ]
    reading = parse_reading(node, types, agents, devices)
    assert reading.models == {f"a{number}": [f"m{number}"] for number in range(count)}
    assert count <= reads <= 10 * count
