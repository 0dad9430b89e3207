"""Why a request is refused, and whether it could ever be granted."""

import pytest
from msgspec.structs import replace

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import Ledger
from agentd.core.allocation.policy import AllocationPolicy
from agentd.core.devices import Device, Health
from agentd.core.partition.rules import AgentRule, AllocationMode, Amount, SplitRules
from agentd.core.partition.split import split
from agentd.errors import InsufficientResource
from core.machines import cores, gpus, machine, memory
from core.placing import CENT, slots

LIMITED = (AgentRule("a1", limits={"cuda": Amount("1.5")}), AgentRule("a2"))
ALL = (AgentRule("a1"), AgentRule("a2"))
GPUS = gpus(1, 1, slot="cuda.shares")
GONE = [replace(GPUS[0], gone=True), replace(GPUS[1], health=Health.UNHEALTHY, reason="Xid 79")]
EXCLUDED = [replace(device, is_excluded=True) for device in GPUS]
UNEQUAL = [replace(GPUS[0], capacity=30 * CENT), replace(GPUS[1], capacity=90 * CENT)]


def refused(
    devices: list[Device], rules: tuple[AgentRule, ...], amount: float
) -> InsufficientResource:
    inventory = machine(*cores(2), *devices, memory(), quantum=CENT)
    node = split(inventory, SplitRules(AllocationMode.SHARED, rules, align=1))
    asked = slots(cuda_shares=amount)
    with pytest.raises(InsufficientResource) as error:
        allocate(Ledger(), inventory, node.partitions["a1"], asked, AllocationPolicy())
    return error.value


@pytest.mark.parametrize(
    ("devices", "rules", "amount", "never"),
    [
        (GPUS, ALL, 3, "this can never fit"),
        (GONE, ALL, 2, ""),
        (GONE, ALL, 3, "this can never fit"),
        (GPUS, LIMITED, 1.6, "this can never fit"),
        (EXCLUDED, ALL, 1, "cuda0, cuda1 are excluded in [plugins.cuda]; this can never fit"),
        (UNEQUAL, ALL, 1, "the devices are too unequal for equal parts; this can never fit"),
        (UNEQUAL, ALL, 1.3, "this can never fit"),
    ],
    ids=[
        "total",
        "missing-devices",
        "missing-and-total",
        "limit",
        "excluded",
        "unequal",
        "unequal-and-total",
    ],
)
def test_refusal_says_never_only_where_no_release_helps(devices, rules, amount, never) -> None:
    text = str(refused(devices, rules, amount))
    assert text.endswith(f"; {never}") if never else "never" not in text


def test_rows_blame_unequal_devices_only_where_the_refusal_does() -> None:
    reasons = {amount: refused(UNEQUAL, ALL, amount).explain[0]["reason"] for amount in (1, 1.3)}
    assert reasons == {
        1: "has 0.3 of the 1; the devices are too unequal for equal parts",
        1.3: "has 0.3 of the 1.3",
    }


def test_row_of_an_excluded_device_names_the_table() -> None:
    rows = refused([EXCLUDED[0], GPUS[1]], ALL, 2).explain
    assert rows[0]["reason"] == "withheld: excluded in [plugins.cuda]"
