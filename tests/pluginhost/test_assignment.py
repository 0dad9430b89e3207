"""Plugins that deal their devices: the answer kept, late, lying and unsteady ones."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from agentd.config.plugins import PluginTable
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.pluginhost.assignment import AssignmentRules
from agentd.pluginhost.validation import validate_listing
from agentd.services.protocols import PluginListing, PluginState
from core.machines import gpus
from pluginhost.rig import opened
from support.fakes import FakeMemory
from support.faulty_plugins import Deals

FAIR = {"a": ("S-one0", "S-one2"), "b": ("S-one1", "S-one3")}
IN_ORDER = {"a": ("S-one0", "S-one1", "S-one2"), "b": ("S-one3", "S-one4")}
UNEQUAL = {"a": ("S-one0", "S-one1", "S-one2", "S-one3"), "b": ()}
ALONE = AssignmentRules(("a", "b"), FakeMemory())


def rules(memory: FakeMemory, *agents: str) -> AssignmentRules:
    return AssignmentRules(agents or ("a", "b"), memory)


def listing_of(made) -> PluginListing:
    (listing,) = made.listings()
    return listing


def table(file: Path, word: str, target: str = "Deals") -> PluginTable:
    file.write_text(word)
    return PluginTable(name="one", plugin=target, settings={"file": str(file)})


def listed() -> PluginListing:
    """Return the listing of `Deals`."""
    plugin = Deals("one", {})
    return validate_listing("one", plugin.slot_types(), plugin.list_devices())


@pytest.mark.parametrize(
    ("word", "dealt", "reason"),
    [("fair", FAIR, ""), ("none", IN_ORDER, ""), ("reasoned", UNEQUAL, "one board has four")],
)
async def test_dealing_gives_agents_what_the_plugin_says(
    host, tmp_path, word, dealt, reason
) -> None:
    made = host([table(tmp_path / "word", word)], Deals="Deals", dealing_rules=ALONE)
    assert (await opened(made))["one"] == (PluginState.READY, "")
    dealing = listing_of(made).assignment
    assert dealing is not None
    assert (dealing.devices, dealing.reason) == (dealt, reason)
    assert [*dealing.slots] == [f"S-one{n}" for n in range(5)]


@pytest.mark.parametrize(
    ("target", "dealing_rules"), [("Deals", None), ("Good", ALONE)], ids=["not asked", "has none"]
)
async def test_dealing_is_absent_where_nobody_deals(host, tmp_path, target, dealing_rules) -> None:
    given = table(tmp_path / "word", "fair", target)
    made = host([given], dealing_rules=dealing_rules, **{target: target})
    assert (await opened(made))["one"][0] is PluginState.READY
    assert listing_of(made).assignment is None


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("agent", "partition: it deals devices to an unknown agent 'c' (there are: a, b)"),
        ("device", "partition: it deals an unknown device 'one9'"),
        ("twice", "partition: it deals one0 more than once"),
        (
            "unequal",
            "partition: it deals unequal numbers of devices with one.device without a reason: a 4",
        ),
        ("shape", "partition: invalid answer to partition: Expected `array`, got `int`"),
    ],
)
async def test_dealing_that_is_a_lie_fails_the_plugin(host, tmp_path, word, why) -> None:
    made = host([table(tmp_path / "word", word)], Deals="Deals", dealing_rules=ALONE)
    state, reason = (await opened(made))["one"]
    assert (state, made.listings()) == (PluginState.FAILED, [])
    assert reason.startswith(why)


async def test_dealing_that_is_kept_is_not_asked_for(host, tmp_path) -> None:
    memory = FakeMemory()
    kept = PluginAssignment.of({"a": (), "b": listed().devices[:1]}, listed().devices)
    memory.devices, memory.dealings = listed().devices, {"one": kept}
    made = host([table(tmp_path / "word", "raise")], Deals="Deals", dealing_rules=rules(memory))
    assert (await opened(made))["one"][0] is PluginState.READY
    assert listing_of(made).assignment == kept


@pytest.mark.parametrize(
    ("agents", "known"),
    [(("b", "a"), 5), (("a", "b", "c"), 5), (("a", "b"), 4)],
    ids=["other order", "one agent more", "one device more"],
)
async def test_dealing_is_asked_for_again_after_a_change(host, agents, known) -> None:
    memory = FakeMemory()
    before = listed().devices[:known]
    memory.devices, memory.dealings = (
        before,
        {"one": PluginAssignment.of({"a": before, "b": ()}, before)},
    )
    in_turn = PluginTable(name="one", plugin="Deals", settings={})
    made = host([in_turn], Deals="Deals", dealing_rules=rules(memory, *agents))
    await opened(made)
    dealing = listing_of(made).assignment
    assert dealing is not None
    ids = [f"S-one{n}" for n in range(5)]
    assert dealing.devices == {
        agent: tuple(ids[n :: len(agents)]) for n, agent in enumerate(agents)
    }


def test_known_devices_have_their_ids_and_the_missing_ones() -> None:
    memory = FakeMemory()
    found = gpus(1, 1, 1)
    memory.devices = [found[2], *gpus(1, slot="npu.device")]
    listing = PluginListing("cuda", (), tuple(found[:2]))
    excluding = replace(rules(memory), exclude={"cuda": ("cuda0", "GPU-cuda-2")})
    assert [d.device_id.id for d in excluding.known_devices(listing)] == ["cuda1"]
    known = rules(memory).known_devices(listing)
    assert [(d.device_id.id, d.gone) for d in known] == [
        ("cuda0", False),
        ("cuda1", False),
        ("cuda2", True),
    ]


def test_kept_dealing_holds_for_a_card_in_the_place_of_another() -> None:
    cards = gpus(1, 1)
    memory = FakeMemory()
    memory.devices = cards
    memory.dealings["cuda"] = PluginAssignment.of({"a": cards[:1], "b": cards[1:]}, cards)
    now = PluginListing("cuda", (), (replace(cards[0], stable_id="N"), cards[1]))
    known = rules(memory).known_devices(now)
    assert [device.device_id.id for device in known] == ["cuda2", "cuda1"]
    assert rules(memory).load_assignment("cuda", known) is not None
