"""Ceilings of what an update costs, in Python calls: noise cannot touch them.

Times, at 10,000 nodes too, are measured in `benchmarks/fleet_scale.py`.
"""

import random

import pytest

from agentd.core.slots import ONE, ResourceSlots
from agentd_fleet.view.fleet_view import FleetView
from agentd_fleet.view.reports import published_in, slot_type_in, with_free
from fleet_reports import free_report, node_report, slot_types
from python_calls import calls_of

NODES, UPDATES = 400, 40
MOST_CALLS = {7: 640, 47: 1050}
"""Of one update, by number of slot types: the report is read, and the view follows."""
MOST_CALLS_OF_A_DEBIT = {7: 640, 47: 1350}


class Fleet:
    """A view of many nodes, and their reports."""

    def __init__(self, types: int) -> None:
        self.types, self.choice = types, random.Random(1)
        known = [slot_type_in(item) for item in slot_types(types)]
        self.published = {
            f"n{number}": published_in(f"n{number}", node_report(number, types), seen_at=0.0)
            for number in range(NODES)
        }
        nodes = [with_free(published, self.free()) for published in self.published.values()]
        self.view = FleetView(slot_types={slot.name: slot for slot in known}).changed(nodes)
        assert self.view.statistics()["cpu"].capacity == NODES * 64 * ONE

    def free(self) -> bytes:
        return free_report(self.types, self.choice)

    def update(self, node_id: str, free: bytes) -> None:
        self.view = self.view.with_node(with_free(self.published[node_id], free), 1)

    def debit(self, node_id: str) -> None:
        slots = ResourceSlots({"cpu": ONE, "dev0.unit": ONE})
        self.view = self.view.debited(node_id, "agent-1", slots)


@pytest.mark.parametrize("types", MOST_CALLS)
def test_update_and_debit_stay_below_their_ceilings(types: int) -> None:
    fleet = Fleet(types)
    given = [(f"n{number * 7 % NODES}", fleet.free()) for number in range(UPDATES)]

    def update_all() -> None:
        for node_id, free in given:
            fleet.update(node_id, free)

    def debit_all() -> None:
        for node_id, _ in given:
            fleet.debit(node_id)

    assert calls_of(update_all) / UPDATES <= MOST_CALLS[types]
    assert calls_of(debit_all) / UPDATES <= MOST_CALLS_OF_A_DEBIT[types]


def test_update_leaves_the_rankings_of_other_slots_alone() -> None:
    fleet = Fleet(47)
    before = fleet.view.tables
    fleet.update("n3", fleet.free())
    after = fleet.view.tables
    changed = {
        name for name, at in before.columns.items() if after.rankings[at] is not before.rankings[at]
    }
    assert changed == {"cpu", "mem", "dev0.unit"}
