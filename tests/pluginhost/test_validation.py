"""Answers of plugins are limited, cleaned and validated."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from agentd.core.slots import MAX_SLOT_NAME
from agentd.plugin_api import (
    ConditionInfo,
    ContainerEdits,
    DeviceInfo,
    DeviceNode,
    DeviceRequest,
    Measurement,
    Mount,
    ProcessUse,
    SlotTypeInfo,
)
from agentd.pluginhost.output import MAX_TEXT
from agentd.pluginhost.validation import (
    MAX_SLOT_TYPES,
    InvalidAnswer,
    validate_edits,
    validate_listing,
    validate_measurements,
)


def slots(count: int) -> list[SlotTypeInfo]:
    return [SlotTypeInfo(f"x.s{number}") for number in range(count)]


def test_slot_types_are_so_many_at_most() -> None:
    assert len(validate_listing("x", slots(MAX_SLOT_TYPES), []).slot_types) == MAX_SLOT_TYPES
    with pytest.raises(InvalidAnswer, match="too many slot types: got 50000, expected 256"):
        validate_listing("x", slots(50_000), [])


def test_slot_names_have_a_bound() -> None:
    longest = f"x.{'s' * (MAX_SLOT_NAME - 2)}"
    (slot,) = validate_listing("x", [SlotTypeInfo(longest)], []).slot_types
    assert slot.name == longest
    with pytest.raises(InvalidAnswer, match="got 129 characters, expected at most 128"):
        validate_listing("x", [SlotTypeInfo(f"{longest}s")], [])


@pytest.mark.parametrize("name", ["y.s", "x.\n", "y." + "s" * 99])
def test_reason_is_one_line_of_bounded_length(name: str) -> None:
    with pytest.raises(InvalidAnswer) as caught:
        validate_listing("x", [SlotTypeInfo(name)], [])
    assert str(caught.value).isprintable()
    twice = [DeviceInfo(f"d{n}", "S" * 128 + str(n % 4), "x.s") for n in range(4096)]
    with pytest.raises(InvalidAnswer) as caught:
        validate_listing("x", slots(1), twice)
    assert len(str(caught.value)) <= MAX_TEXT


def test_conditions_are_bounded_and_printable() -> None:
    said = [ConditionInfo("GPU 3\nis \x1blost" + "!" * 999, "  ", "GPU-3"), ConditionInfo(" ")]
    (condition,) = validate_listing("x", slots(1), [], said).conditions
    assert condition.reason.startswith("GPU 3 is \N{REPLACEMENT CHARACTER}lost")
    assert (len(condition.reason), condition.remedy) == (MAX_TEXT, "")
    with pytest.raises(InvalidAnswer, match="too many conditions: got 257, expected at most 256"):
        validate_listing("x", slots(1), [], [ConditionInfo("r")] * 257)


def test_unit_is_one_short_line() -> None:
    listing = validate_listing("x", [SlotTypeInfo("x.s", unit="\x1b[31mGPU\n" + "s" * 999)], [])
    (slot,) = listing.slot_types
    assert slot.unit.isprintable()
    assert len(slot.unit) == 32


@pytest.mark.parametrize("file", ["", "dri/renderD128", "/dev/a\nb", "/dev/" + "a" * 9999])
def test_device_file_is_an_absolute_path(file: str) -> None:
    device = DeviceInfo("d0", "S", "x.s0", files=["/dev/x0", "/dev/x 1"])
    (valid,) = validate_listing("x", slots(1), [device]).devices
    assert valid.files == ("/dev/x0", "/dev/x 1")
    with pytest.raises(InvalidAnswer, match="invalid file of d0"):
        validate_listing("x", slots(1), [replace(device, files=[file])])


@pytest.mark.parametrize("group", ["", "a b", "\x1b[31m", "g" * 129])
def test_exclusive_group_is_a_name(group: str) -> None:
    with pytest.raises(InvalidAnswer, match=r"invalid exclusive group .* of x\.s"):
        validate_listing("x", [SlotTypeInfo("x.s", exclusive_group=group)], [])


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (Measurement("a", 50.0, 1, 2, -5.0, 3.0), Measurement("a", 50.0, 1, 2, -5.0, 3.0)),
        (Measurement("a", math.nan, -1, 2, math.inf, -0.5), Measurement("a", None, None, 2)),
        (Measurement("a", -1.0, 0, -2, 0.0, math.inf), Measurement("a", None, 0, None, 0.0)),
        (Measurement("a", 1e300, 2**63, 2**64, -1e300, 1e308), Measurement("a")),
        (Measurement("a", 100.1, 1, 1, 1000.1, 1.1e6), Measurement("a", None, 1, 1)),
        (Measurement("a", 100, 2**63 - 1, 2**63 - 1, -273, 1e6),) * 2,
        (
            Measurement("a", processes=[ProcessUse(1, -1), ProcessUse(2, 2**63)]),
            Measurement("a", processes=[ProcessUse(1), ProcessUse(2)]),
        ),
    ],
)
def test_implausible_measurement_is_unknown(said: Measurement, kept: Measurement) -> None:
    assert validate_measurements([said]) == [kept]


def test_measurements_are_one_for_each_device_the_last() -> None:
    said = [Measurement("a", 1.0), Measurement("b", 2.0), Measurement("a", 3.0)]
    assert validate_measurements(said) == [Measurement("a", 3.0), Measurement("b", 2.0)]


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"PATH": "/evil"}, "reserved variable PATH"),
        ({"A": "b" * 10_000_000}, "invalid variable 'A': got 10000002 bytes"),
        ({"A": "é" * 100_000}, "invalid variable 'A': got 200002 bytes"),
        ({"A": "b" * 131_070}, "invalid variable 'A': got 131072 bytes with its value, expected"),
        ({"A": "b" * 66_000, "B": "é" * 33_000}, "too many bytes of env: got 132002, expected at"),
    ],
    ids=["path", "large", "bytes", "one", "together"],
)
def test_edits_that_would_break_a_kernel_are_the_plugins_fault(
    env: dict[str, str], why: str
) -> None:
    with pytest.raises(InvalidAnswer, match=why):
        validate_edits(ContainerEdits(env=env))


BOUNDED = {
    "long-path": ({"mounts": (Mount("/" + "é" * 2048, "/b"),)}, "got 4097 bytes"),
    "long-node": ({"device_nodes": (DeviceNode("/a", "/" * 4096),)}, "got 4096 bytes, expected"),
    "permissions": (
        {"device_nodes": (DeviceNode("/a", "/a", "r" * 9),)},
        "invalid permissions of '/a': got 'rrrrrrrrr', expected some of 'rwm'",
    ),
    "long-cdi": ({"cdi": ("d" * 256,)}, "invalid CDI name"),
    "no-cdi": ({"cdi": ("",)}, "invalid CDI name '': expected 1 to 255 bytes"),
    "long-id": ({"device_requests": (DeviceRequest("d", ("i" * 256,)),)}, "invalid device id"),
    "long-driver": ({"device_requests": (DeviceRequest("d" * 256, ()),)}, "invalid driver"),
    "long-group": ({"groups": ("g" * 256,)}, "invalid group"),
    "no-group": ({"groups": ("a\0",)}, "invalid group"),
    "group-id": ({"groups": ("4294967295",)}, "expected a name, or an id up to 4294967294"),
    "group-digits": ({"groups": ("\u0663",)}, "invalid group"),
}


@pytest.mark.parametrize(("members", "why"), BOUNDED.values(), ids=BOUNDED)
def test_every_member_of_edits_has_a_bound(members: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidAnswer, match=re.escape(why)):
        validate_edits(ContainerEdits(**members))


def test_edits_within_their_bounds_are_kept() -> None:
    edits = ContainerEdits(
        env={"A": "b" * 131_069},
        device_nodes=(DeviceNode("/a", "/" + "b" * 4094, "mrw"),) * 1024,
        mounts=(Mount("/a", "/b"),) * 1024,
        cdi=("vendor.com/class=MIG-GPU-0/1/0",) * 4096,
        device_requests=(DeviceRequest("", ("i",) * 64),) * 64,
        groups=("render", "domain users", "44", *(f"g{n}" for n in range(253))),
    )
    assert validate_edits(edits) is edits


SHARES = SlotTypeInfo("x.shares", quantum="0.01", exclusive_group="mode")
MEMORY = SlotTypeInfo("x.mem", "bytes", "1048576", primary="x.shares")
GPU = DeviceInfo("x0", "S0", "x.shares", secondary={"x.mem": "85899345920"})


def test_secondary_slots_are_taken_with_their_primary() -> None:
    bare = DeviceInfo("x1", "S1", "x.shares")
    listing = validate_listing("x", [SHARES, MEMORY], [GPU, bare])
    assert {slot.name: (slot.primary, slot.exclusive_group) for slot in listing.slot_types} == {
        "x.shares": (None, "mode"),
        "x.mem": ("x.shares", "mode"),
    }
    assert [device.slot_names for device in listing.devices] == [
        ("x.shares", "x.mem"),
        ("x.shares",),
    ]
    assert listing.devices[0].capacity_of("x.mem") == 80 * 2**30


def test_secondary_slots_are_in_natural_order() -> None:
    names = ["x.s10", "x.s2", "x.s1"]
    types = [SlotTypeInfo(name, primary="x.shares") for name in names]
    device = DeviceInfo("x0", "S0", "x.shares", secondary=dict.fromkeys(names, "1"))
    (found,) = validate_listing("x", [SHARES, *types], [device]).devices
    assert found.slot_names == ("x.shares", "x.s1", "x.s2", "x.s10")


@pytest.mark.parametrize("quantum", ["1", "1048576", str(2**30)])
def test_bytes_have_a_quantum_up_to_a_gibibyte(quantum: str) -> None:
    types = [SlotTypeInfo("x.m", "bytes", quantum)]
    (slot,) = validate_listing("x", types, []).slot_types
    assert slot.quantum == int(quantum)


def offering(primary: str, **secondary: str) -> list[DeviceInfo]:
    """A device with a primary slot, and others with their amounts."""
    amounts = {f"x.{name}": amount for name, amount in secondary.items()}
    return [DeviceInfo("x0", "S0", f"x.{primary}", secondary=amounts)]


OTHER = SlotTypeInfo("x.other")
EIGHT = [SlotTypeInfo(f"x.s{number}", primary="x.shares") for number in range(8)]
BOTH = [SHARES, MEMORY]
LIES: dict[str, tuple[list[SlotTypeInfo], list[DeviceInfo], str]] = {
    "more than a gibibyte": (
        [SlotTypeInfo("x.m", "bytes", str(2**30 + 1))], [], "invalid quantum of x.m",
    ),
    "a primary that is not listed": ([MEMORY], [], "unlisted primary slot of x.mem: 'x.shares'"),
    "a secondary of a secondary": (
        [*BOTH, SlotTypeInfo("x.more", primary="x.mem")], [],
        "'x.mem' is a secondary slot of x.shares",
    ),
    "its own primary": ([SlotTypeInfo("x.s", primary="x.s")], [], "is a secondary slot of x.s"),
    "a unique secondary": (
        [SHARES, SlotTypeInfo("x.one", "unique", primary="x.shares")], [],
        "invalid kind unique of x.one, a secondary slot: expected count or bytes",
    ),
    "a primary in bytes": (
        [SlotTypeInfo("x.b", "bytes"), SlotTypeInfo("x.c", primary="x.b")], [],
        "invalid kind bytes of 'x.b', a primary slot with secondary ones: expected count",
    ),
    "a secondary as a device's primary": (
        BOTH, [DeviceInfo("x0", "S0", "x.mem", "1048576")], "offers x.mem as its primary slot",
    ),
    "a secondary beside another primary": (
        [*BOTH, OTHER], offering("other", mem="1"),
        "x0 offers x.mem beside x.other: it is a secondary slot of x.shares",
    ),
    "a primary beside another": (
        [SHARES, OTHER], offering("shares", other="1"),
        "x0 offers x.other beside x.shares: it is a primary slot",
    ),
    "an unknown secondary": (
        [SHARES], offering("shares", mem="1"), "device x0 has the unlisted slot type 'x.mem'",
    ),
    "a number of five thousand digits": (
        [SHARES], [DeviceInfo("x0", "S0", "x.shares", secondary={"9" * 5000: "1"})],
        "device x0 has the unlisted slot type",
    ),
    "eight secondaries": (
        [SHARES, *EIGHT], offering("shares", **{f"s{number}": "1" for number in range(8)}),
        "too many secondary slots of x0: got 8, expected at most 7",
    ),
    "a capacity below the quantum": (
        BOTH, offering("shares", mem="1048575"),
        "invalid capacity of x0: got 1048575 of x.mem, expected at least its quantum, 1048576",
    ),
    "no capacity": (
        BOTH, offering("shares", mem="0"), "invalid capacity of x0: got 0 of x.mem",
    ),
    "a capacity that is not an amount": (
        BOTH, offering("shares", mem="80 GPUs"), "invalid capacity of x0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_listing_that_breaks_the_rules_of_slots_is_refused(case: str) -> None:
    types, devices, reason = LIES[case]
    with pytest.raises(InvalidAnswer, match=re.escape(reason)):
        validate_listing("x", types, devices)
