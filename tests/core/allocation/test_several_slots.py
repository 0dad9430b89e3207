"""Requests for devices that offer several slots."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.allocation.candidates import find_candidates
from agentd.core.allocation.derivation import available_quanta
from agentd.core.allocation.ledger import Ledger
from agentd.core.allocation.ledger import without_unoffered_slots as charged_share
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.devices import Inventory
from agentd.core.slots import ONE, ResourceSlots, SlotMeasure, derived_amount
from agentd.errors import InsufficientResource
from core.machines import GIB
from core.several_slots import TYPES, asked, charged, gpu, holding, node, npu, place

TABLE = {
    "half the shares take half the memory": (
        [gpu(0)], asked(cuda_shares="0.5"), {"cuda0": ("0.5", "40g")},
    ),
    "a quarter of the memory takes a quarter of the shares": (
        [gpu(0)], asked(cuda_mem="20g"), {"cuda0": ("0.25", "20g")},
    ),
    "the smallest amount takes a quantum of each": (
        [gpu(0)], asked(cuda_mem="1m"), {"cuda0": ("0.01", "1m")},
    ),
    "amounts that are named are given as they are": (
        [gpu(0)], asked(cuda_shares="0.5", cuda_mem="60g"), {"cuda0": ("0.5", "60g")},
    ),
    "memory is derived on each device": (
        [gpu(0), gpu(1, 40)], asked(cuda_shares=2), {"cuda0": ("1", "80g"), "cuda1": ("1", "40g")},
    ),
    "amounts are totals and not per device": (
        [gpu(0), gpu(1)],
        asked(cuda_shares=2, cuda_mem="100g"),
        {"cuda0": ("1", "50g"), "cuda1": ("1", "50g")},
    ),
    "more memory than a device has is on two": (
        [gpu(0), gpu(1)],
        asked(cuda_mem="100g"),
        {"cuda0": ("0.62", "50g"), "cuda1": ("0.62", "50g")},
    ),
    "a whole device with part of its memory": (
        [npu(0)], asked(npu_device=1, npu_mem="20g"), {"npu0": ("1", "20g")},
    ),
    "a whole device is taken by part of its memory": (
        [npu(0)], asked(npu_mem="20g"), {"npu0": ("1", "20g")},
    ),
    "zero is as if it were not named": (
        [gpu(0)], asked(cuda_shares="0.5", cuda_mem=0), {"cuda0": ("0.5", "40g")},
    ),
    "a device without memory gives shares": (
        [gpu(0, None)], asked(cuda_shares="0.5"), {"cuda0": ("0.5",)},
    ),
    "a device without memory is not asked for memory": (
        [gpu(0, None), gpu(1)], asked(cuda_mem="20g"), {"cuda1": ("0.25", "20g")},
    ),
    "a device without memory is passed over where both are named": (
        [gpu(0, None), gpu(1)],
        asked(cuda_shares="0.5", cuda_mem="10g"),
        {"cuda1": ("0.5", "10g")},
    ),
    "larger parts come first": (
        [gpu(0, 1), gpu(1, 1)],
        asked(cuda_shares="1.01", cuda_mem="1025m"),
        {"cuda0": ("0.51", "513m"), "cuda1": ("0.5", "512m")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_a_request_is_charged_every_slot(case: str) -> None:
    devices, request, expected = TABLE[case]
    assert charged(place(node(*devices), request)) == expected


@pytest.mark.parametrize("policy", [
    AllocationPolicy(strategy, affinity, fragments)
    for strategy in Strategy for affinity in Affinity for fragments in (False, True)
])  # fmt: skip
def test_several_named_slots_ignore_strategy_and_fragmentation(policy: AllocationPolicy) -> None:
    request = asked(cuda_shares=2, cuda_mem="100g")
    expected = {"cuda0": ("1", "50g"), "cuda1": ("1", "50g")}
    assert charged(place(node(gpu(0), gpu(1), gpu(2)), request, policy=policy)) == expected


def test_the_tightest_devices_of_the_deciding_slot_are_chosen() -> None:
    split = node(gpu(0), gpu(1), gpu(2))
    ledger = Ledger().with_holding(
        "k1", "a", place(split, asked(cuda_shares="0.3"), only=["cuda1"])
    )
    request = asked(cuda_shares="0.5", cuda_mem="1g")
    assert charged(place(split, request, ledger)).keys() == {"cuda1"}


def test_named_devices_narrow_the_choice_first() -> None:
    split = node(gpu(0), gpu(1), gpu(2, 40))
    assert charged(place(split, asked(cuda_mem="20g"), only=["cuda2"])) == {"cuda2": ("0.5", "20g")}
    both = asked(cuda_shares=1, cuda_mem="50g")
    assert charged(place(split, both, only=["cuda1", "cuda2"])) == {"cuda1": ("1", "50g")}
    with pytest.raises(InsufficientResource, match="never fit"):
        place(split, both, only=["cuda2"])


def refused(split, request, ledger=None) -> InsufficientResource:
    with pytest.raises(InsufficientResource) as caught:
        place(split, request, ledger)
    return caught.value


def test_refusal_shows_bytes_for_people_in_texts_alone() -> None:
    split = node(gpu(0), gpu(1))
    ledger = holding(split, asked(cuda_mem="60g"), asked(cuda_mem="80g"))
    error = refused(split, asked(cuda_mem="40g"), ledger)
    assert str(error) == ("insufficient cuda.mem: requested 40 GiB, 20 GiB free (160 GiB in total)")
    assert (error.requested, error.free) == (str(40 * GIB), str(20 * GIB))
    assert [row["free"] for row in error.explain] == [str(20 * GIB), "0"]
    assert str(error.explain[0]["reason"]).startswith("has 20 GiB of the 40 GiB")


def test_refusal_for_a_few_bytes_shows_the_bytes() -> None:
    split = node(gpu(0))
    error = refused(split, ResourceSlots({"mem": 32 * GIB + 1}))
    free = split.inventory.by_slot["mem"][0].capacity
    assert free == 32 * GIB
    assert f"requested {free + 1} bytes, {free} bytes free ({free} bytes in total)" in str(error)
    assert error.explain[0]["reason"] == f"has {free} bytes of the {free + 1} bytes"


REFUSED = {
    "the deciding slot is short": (
        asked(cuda_shares="0.8", cuda_mem="1g"), asked(cuda_shares="0.5", cuda_mem="1g"),
        "cuda.shares", "0.2", "",
    ),
    "the other slot is short": (
        asked(cuda_shares="0.1", cuda_mem="70g"), asked(cuda_shares="0.5", cuda_mem="20g"),
        "cuda.mem", str(10 * GIB),
        "insufficient cuda.mem: requested 20 GiB, 10 GiB free (80 GiB in total); held by k1",
    ),
    "both are short": (
        asked(cuda_shares="0.9", cuda_mem="70g"), asked(cuda_shares="0.5", cuda_mem="20g"),
        "cuda.shares", "0.1", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_of_several_slots_blames_one(case: str) -> None:
    first, request, slot, free, reason = REFUSED[case]
    split = node(gpu(0))
    error = refused(split, request, holding(split, first))
    assert (error.slot, error.free) == (slot, free)
    (row,) = error.explain
    assert row["reason"].endswith(reason)
    assert "held by k1" in row["reason"]


def test_refusal_of_what_can_never_fit_says_so() -> None:
    assert "this can never fit" in str(refused(node(gpu(0), gpu(1)), asked(cuda_mem="200g")))
    unequal = refused(node(gpu(0, 80), gpu(1, 1)), asked(cuda_shares=2, cuda_mem="40g"))
    assert "too unequal for equal parts; this can never fit" in str(unequal)


NEVER = {
    "one device": (node(gpu(0)), asked(cuda_shares="0.5", cuda_mem="100g")),
    "the larger of two": (node(gpu(0), gpu(1, 40)), asked(cuda_shares="0.5", cuda_mem="100g")),
    "all devices": (node(gpu(0), gpu(1)), asked(cuda_shares=2, cuda_mem="170g")),
    "whole devices": (node(npu(0), npu(1)), asked(npu_device=1, npu_mem="90g")),
}


@pytest.mark.parametrize("case", NEVER)
def test_refusal_of_too_much_of_the_other_slot_blames_it(case: str) -> None:
    error = refused(*NEVER[case])
    assert error.slot.endswith(".mem")
    assert "this can never fit" in str(error)


def test_slot_of_the_past_is_not_charged_on_a_missing_device() -> None:
    split = node(gpu(0))
    (share,) = place(split, asked(cuda_shares="0.5")).shares
    gone = gpu(0, gone=True)
    types = [slot for slot in TYPES.values() if slot.name != "cuda.mem"]
    inventory = Inventory.of(types, [gone])
    assert charged_share(share, gone, inventory).slot_names == ("cuda.shares",)
    assert charged_share(share, gone, split.inventory) == share


def test_free_is_of_a_slot_and_room_of_a_device() -> None:
    split = node(gpu(0))
    ledger = holding(split, asked(cuda_shares="0.1", cuda_mem="60g"))
    (device,), part = split.inventory.by_name["cuda"], split.partitions["a"]
    assert ledger.free(device, part, "cuda.shares") == 9 * ONE // 10
    assert ledger.free(device, part, "cuda.mem") == 20 * GIB
    (found,) = find_candidates(ledger, split.inventory, part, "cuda.shares", ["cuda.shares"])
    assert (found.room, found.capacity) == (25, 100)


def test_a_slot_without_one_free_quantum_leaves_no_room() -> None:
    split = node(gpu(0))
    ledger = holding(split, asked(cuda_shares="0.1", cuda_mem="80g"))
    assert refused(split, asked(cuda_shares="0.01"), ledger).free == "0"


MEASURES = st.builds(
    lambda quantum, whole, rest: (quantum, quantum * whole + rest % quantum),
    st.integers(1, 5), st.integers(1, 40), st.integers(0, 4),
)  # fmt: skip


@given(MEASURES, st.lists(MEASURES, max_size=3), st.data())
def test_room_is_the_largest_part_that_fits(own, others, data) -> None:
    measures = {
        f"s{place}": SlotMeasure(place, quantum, capacity - capacity % quantum)
        for place, (quantum, capacity) in enumerate([own, *others])
    }
    first, *rest = measures.values()
    left = [data.draw(st.integers(0, measure.usable)) for measure in measures.values()]

    def fits(quanta: int) -> bool:
        amount = quanta * first.quantum
        return amount <= left[0] and all(
            derived_amount(amount, first.usable, to.usable, to.quantum) <= left[to.position]
            for to in rest
        )

    fitting = [n for n in range(1, first.usable // first.quantum + 1) if fits(n)]
    assert available_quanta(left, measures, "s0", ["s0"]) == max(fitting, default=0)
    assert fitting == list(range(1, len(fitting) + 1))


@given(MEASURES, MEASURES, st.integers(1, 40))
def test_derived_amounts_fit_as_often_as_the_named_one(own, other, quanta) -> None:
    """Rounding is down: what fits in the named slot fits in the other, from a quantum on."""
    of, to = own[1] - own[1] % own[0], other[1] - other[1] % other[0]
    amount = min(quanta * own[0], of)
    derived = derived_amount(amount, of, to, other[0])
    assert derived % other[0] == 0
    assert derived >= other[0]
    if derived > other[0]:
        assert Fraction(derived, to) <= Fraction(amount, of)
        assert of // amount * derived <= to


LIMITS = {
    "shares alone": (asked(cuda_shares="0.5"), 500_000),
    "more memory than shares": (asked(cuda_shares="0.1", cuda_mem="60g"), 750_000),
    "memory alone is rounded up": (asked(cuda_mem="27300m"), 333_252),
    "a quantum of memory counts a quantum of shares": (asked(cuda_mem="1m"), 10_000),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_kernel_counts_with_its_largest_fraction(case: str) -> None:
    request, expected = LIMITS[case]
    ledger = holding(node(gpu(0)), request)
    assert ledger.agent_limit_usage("a", "cuda") == expected
    assert ledger.without("k1").agent_limit_usage("a", "cuda") == 0
