import json
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.slots import (
    MAX_AMOUNT,
    MAX_SLOT_NAME,
    ONE,
    SLOT_NAME,
    AmountError,
    ResourceSlots,
    SlotKind,
    SlotType,
    format_amount,
    is_slot_name,
    parse_amount,
    parse_base_units,
    parse_quantity,
    read_slots,
)
from agentd.errors import (
    InvalidSlotAmount,
    InvalidSlotCombination,
    PluginUnavailable,
    UnsupportedResource,
)

CPU = SlotType("cpu", SlotKind.COUNT, ONE)
MEM = SlotType("mem", SlotKind.BYTES, 1)
SHARES = SlotType("cuda.shares", SlotKind.COUNT, ONE // 100, exclusive_group="mode")
WHOLE = SlotType("cuda.device", SlotKind.COUNT, ONE, exclusive_group="mode")
MIG = SlotType("cuda.device:1g.10gb-mig", SlotKind.UNIQUE, ONE)
TYPES = {slot.name: slot for slot in (CPU, MEM, SHARES, WHOLE, MIG)}


def read(wire: dict[str, object]) -> ResourceSlots:
    return read_slots(wire, TYPES).accepted()


@pytest.mark.parametrize(
    ("slot", "raw", "amount"),
    [
        (CPU, 4, 4 * ONE),
        (CPU, "4", 4 * ONE),
        (CPU, "4.0", 4 * ONE),
        (CPU, 2.0, 2 * ONE),
        (CPU, 0, 0),
        (SHARES, "0.67", 670_000),
        (SHARES, 0.1, 100_000),
        (SHARES, Decimal("0.30"), 300_000),
        (MEM, "512m", 512 * 2**20),
        (MEM, "4g", 4 * 2**30),
        (MEM, "4G", 4 * 2**30),
        (MEM, "1.5GiB", 3 * 2**29),
        (MEM, "1.5gib", 3 * 2**29),
        (MEM, "1 KB", 1024),
        (MEM, 1, 1),
        (MEM, "8589934592", 2**33),
        (MIG, 1, ONE),
        (MIG, "0", 0),
    ],
)
def test_amounts_that_are_accepted(slot, raw, amount) -> None:
    assert parse_amount(raw, slot) == amount


@pytest.mark.parametrize(
    ("slot", "raw", "why"),
    [
        (CPU, -1, "negative"),
        (CPU, "-0.5", "negative"),
        (MEM, "-1g", "negative"),
        (CPU, float("nan"), "not finite"),
        (CPU, "NaN", "not finite"),
        (CPU, float("inf"), "not finite"),
        (CPU, "-Infinity", "not finite"),
        (CPU, "1e3", "exponent"),
        (CPU, 1e-7, "exponent"),
        (CPU, Decimal("1E+3"), "exponent"),
        (CPU, True, "boolean"),
        (CPU, None, "got null"),
        (CPU, [1], "got a list"),
        (CPU, {"a": 1}, "got an object"),
        (CPU, "", "invalid amount"),
        (CPU, "four", "invalid amount"),
        (CPU, "1,5", "invalid amount"),
        (CPU, "٤", "invalid amount"),
        (CPU, "1g", "for a counted slot"),
        (CPU, "0.5", "nearest amounts are 0 and 1"),
        (CPU, "2.5", "nearest amounts are 2 and 3"),
        (SHARES, "0.675", "multiple of 0.01; the nearest amounts are 0.67 and 0.68"),
        (SHARES, "0.0000001", "nearest amounts are 0 and 0.01"),
        (MEM, "0.5", "nearest amounts are 0 and 1"),
        (MEM, "1.0001k", "nearest amounts are 1024 and 1025"),
        (MEM, "9" * 30, "exceeds the maximum"),
        (MEM, 10**40, "exceeds the maximum"),
        (CPU, "9" * 100, "longer than"),
        (MIG, 2, "expected 1 or 0"),
        (MIG, "0.5", "expected 1 or 0"),
        (CPU, "1.0000001", "not a multiple of 1; the nearest amounts are 1 and 2"),
        *((MEM, raw, "invalid amount") for raw in ("1ib", "512 ", "1\u212a", "1G\u0130B", " 1g")),
    ],
)
def test_amounts_that_are_refused_say_why(slot, raw, why) -> None:
    with pytest.raises(AmountError, match=why):
        parse_amount(raw, slot)


@given(st.integers(0, MAX_AMOUNT), st.sampled_from(SlotKind))
def test_formatting_and_parsing_are_inverse(amount, kind) -> None:
    text = format_amount(amount, kind)
    assert parse_base_units(text, kind) == amount
    assert not ("." in text and text.endswith(("0", ".")))


@given(st.text())
def test_text_is_an_amount_or_refused(text) -> None:
    try:
        assert parse_quantity(text).value >= 0
    except AmountError as error:
        assert str(error)


@pytest.mark.parametrize(("one", "other"), [("1g", 2**30), ("1.50", "1.5"), (4, "4.0")])
def test_equal_quantities_have_one_canonical_spelling(one, other) -> None:
    assert parse_quantity(one).canonical() == parse_quantity(other).canonical()
    assert Fraction(parse_quantity(one).canonical()) == parse_quantity(other).value


AMOUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(-5, 5))


@given(AMOUNTS, AMOUNTS)
def test_a_missing_slot_is_zero_in_every_operation(one, other) -> None:
    left, right = ResourceSlots(one), ResourceSlots(other)
    before = dict(left), dict(right)
    for name in "abcde":
        assert (left + right)[name] == one.get(name, 0) + other.get(name, 0)
    assert (left == right) == all(one.get(n, 0) == other.get(n, 0) for n in "abcd")
    assert (dict(left), dict(right)) == before
    if left == right:
        assert hash(left) == hash(right)


def test_amounts_are_whole_base_units() -> None:
    with pytest.raises(TypeError, match="whole numbers"):
        ResourceSlots({"cpu": 0.5})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        ResourceSlots() + {"cpu": True}


def test_unknown_slots_are_refused_only_when_not_zero() -> None:
    assert read({"tpu.chip": "0", "x": 0.0, "cpu": 1}) == {"cpu": ONE}
    with pytest.raises(UnsupportedResource) as caught:
        read_slots(
            {"tpu.chip": 1, "npu": "4g", "cpu": 1}, TYPES, failed={"tpu": "no driver", "x": "y"}
        )
    assert json.loads(json.dumps(caught.value.facts())) == {
        "slots": ["npu", "tpu.chip"],
        "known_slots": sorted(TYPES),
        "plugins": {"tpu": "no driver"},
    }


def test_absent_hardware_is_not_called_failed() -> None:
    with pytest.raises(UnsupportedResource) as caught:
        read_slots(
            {"rocm.device": 1, "tpu": 1},
            TYPES,
            failed={"tpu": "x"},
            absent={"rocm": "no library", "npu": "no NPU"},
        )
    assert str(caught.value).endswith(
        "; plugin tpu failed: x; plugin rocm: no such hardware on this node"
    )
    assert caught.value.facts()["plugins"] == {"tpu": "x", "rocm": "no library"}


def test_slot_names_have_a_bound() -> None:
    assert is_slot_name("cuda.device:1g.10gb-mig")
    for longest in ("a" * MAX_SLOT_NAME, f"cuda.{'a' * (MAX_SLOT_NAME - 5)}"):
        assert is_slot_name(longest)
        assert not is_slot_name(f"{longest}a")
        assert not re.compile(SLOT_NAME).fullmatch(f"{longest}a")


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ({"npu": 1, "tpu.chip": 1, "cpu": "x"}, UnsupportedResource),
        ({"npu": "x", "tpu.chip": 1}, UnsupportedResource),
        ({"npu": "-0.0", "tpu.chip": 1, "cpu": "x"}, InvalidSlotAmount),
        ({"tpu.chip": 1, "cuda.device": 1, "cuda.shares": 1}, InvalidSlotCombination),
        ({"npu": 0, "tpu.chip": 1}, PluginUnavailable),
    ],
)
def test_refusals_of_slots_come_in_order(raw, error) -> None:
    with pytest.raises(error):
        read_slots(raw, TYPES, unavailable={"tpu": "pending: late"}).accepted()


@pytest.mark.parametrize(
    "zero",
    [
        0,
        -0.0,
        "-0",
        "-0.0",
        "0E-6",
        "+0e9",
        "0.",
        ".0",
        "0" * 99,
        Decimal("0E-6"),
        "-0g",
        "-0GiB",
        "0 k",
        "0b",
        "0." + "0" * 99 + "m",
    ],
)
def test_every_spelling_of_zero_is_zero(zero) -> None:
    assert read({"cpu": zero, "mem": zero, "npu": zero}) == {}


def test_every_wrong_amount_is_listed_with_its_place() -> None:
    with pytest.raises(InvalidSlotAmount) as caught:
        read_slots(
            {"cpu": "x", "mem": -1, "npu": True}, TYPES, unavailable={"npu": "pending: late"}
        ).accepted()
    assert [problem.where for problem in caught.value.problems] == [
        "slots.cpu",
        "slots.mem",
        "slots.npu",
    ]


def test_slots_of_one_exclusive_group_refuse_each_other() -> None:
    assert read({"cuda.device": 1, "cuda.shares": 0})
    with pytest.raises(InvalidSlotCombination, match=r"cuda\.device and cuda\.shares"):
        read({"cuda.device": 1, "cuda.shares": "0.5"})


def test_the_reference_tells_the_truth() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "slots.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102 - our own page
    asked = names["asked"]
    assert isinstance(asked, ResourceSlots)
    assert asked == {"cpu": 2 * ONE, "cuda.shares": ONE // 4, "mem": 3 << 29}
