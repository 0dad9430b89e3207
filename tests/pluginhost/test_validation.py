"""What plugins say is bounded, cleaned and checked before anybody sees it."""

import math

import pytest

from agentd.plugin_api import ContainerEdits, Measurement, SlotTypeInfo
from agentd.pluginhost.validation import (
    MAX_SLOT_TYPES,
    InvalidAnswer,
    checked_edits,
    checked_listing,
    checked_measurements,
)


def slots(count: int) -> list[SlotTypeInfo]:
    return [SlotTypeInfo(f"x.s{number}") for number in range(count)]


def test_slot_types_are_so_many_at_most() -> None:
    assert len(checked_listing("x", slots(MAX_SLOT_TYPES), []).slot_types) == MAX_SLOT_TYPES
    with pytest.raises(InvalidAnswer, match="it lists 50000 slot types; allowed: up to 256"):
        checked_listing("x", slots(50_000), [])


def test_unit_is_one_short_line() -> None:
    listing = checked_listing("x", [SlotTypeInfo("x.s", unit="\x1b[31mGPU\n" + "s" * 999)], [])
    (slot,) = listing.slot_types
    assert slot.unit.isprintable()
    assert len(slot.unit) == 32


@pytest.mark.parametrize("group", ["", "a b", "\x1b[31m", "g" * 129])
def test_exclusive_group_is_a_name(group: str) -> None:
    with pytest.raises(InvalidAnswer, match=r"invalid exclusive group .* of x\.s"):
        checked_listing("x", [SlotTypeInfo("x.s", exclusive_group=group)], [])


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (Measurement("a", 50.0, 1, 2, -5.0, 3.0), Measurement("a", 50.0, 1, 2, -5.0, 3.0)),
        (Measurement("a", math.nan, -1, 2, math.inf, -0.5), Measurement("a", None, None, 2)),
        (Measurement("a", -1.0, 0, -2, 0.0, math.inf), Measurement("a", None, 0, None, 0.0)),
    ],
)
def test_figure_that_cannot_be_one_is_not_known(said: Measurement, kept: Measurement) -> None:
    assert checked_measurements([said]) == [kept]


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"PATH": "/evil"}, "it sets PATH, which is the kernel's own"),
        ({"A": "b" * 10_000_000}, "allowed: up to 1024 of 131072 together"),
        ({f"A{n}": "" for n in range(1025)}, "it sets 1025 variables"),
    ],
    ids=["path", "large", "many"],
)
def test_edits_that_would_break_a_kernel_are_the_plugins_fault(
    env: dict[str, str], why: str
) -> None:
    with pytest.raises(InvalidAnswer, match=why):
        checked_edits(ContainerEdits(env=env))
