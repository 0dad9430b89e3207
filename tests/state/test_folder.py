import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentd import failpoints
from agentd.errors import StartRefused
from agentd.services.interfaces import Intent
from agentd.state.folder import ReadOnlyState, StateDir
from core.machines import gpus


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    made = StateDir(tmp_path / "state")
    made.open()
    yield made
    failpoints.arm("")


def test_what_is_saved_is_remembered(state: StateDir) -> None:
    devices = gpus(1, 0.5, nodes=(0, None))
    state.save_devices(devices)
    loaded = state.load_devices()
    assert [(d.device_id, d.stable_id, d.capacity, d.aliases, d.drained) for d in loaded] == [
        (d.device_id, d.stable_id, d.capacity, d.aliases, d.drained) for d in devices
    ]
    intent = Intent("k1", "docker", '{"schema": 1}')
    state.save_intent(intent)
    assert state.load_intents() == [intent]
    state.drop_intent("k1")
    state.drop_intent("k1")
    assert state.load_intents() == []
    state.save_node("n", ["docker"])
    node = state.load_node()
    assert node is not None
    assert (node.node_id, node.runtimes) == ("n", ["docker"])


def test_a_second_daemon_on_the_same_folder_refuses(state: StateDir) -> None:
    other = StateDir(state.folder)
    with pytest.raises(StartRefused, match=r"is used by another agentd \(pid \d+\)"):
        other.open()
    state.close()
    other.open()


def test_a_second_daemon_with_the_same_node_id_refuses(state: StateDir, tmp_path: Path) -> None:
    other = StateDir(tmp_path / "other")
    other.open()
    state.lock_node("n", tmp_path / "locks")
    with pytest.raises(StartRefused, match="another agentd serves node id n"):
        other.lock_node("n", tmp_path / "locks")
    other.lock_node("m", tmp_path / "locks")


DEVICE = {
    "name": "cuda",
    "id": "cuda0",
    "stable_id": "GPU-a",
    "slot": "cuda.device",
    "kind": "count",
    "capacity": 1,
    "numa_node": None,
    "aliases": [],
    "parent": None,
    "model": "",
    "drained": False,
}


def with_device(**members: object) -> str:
    return json.dumps({"devices": [DEVICE | members]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"devices": [{}]}',
        '{"devices": 1}',
        "\udcff",
        "[" * 100_000,
        with_device(capacity=float("inf")),
        with_device(stable_id=["x"]),
        with_device(id=5),
        with_device(kind="many"),
    ],
)
def test_a_damaged_file_is_set_aside_and_nothing_is_remembered(state: StateDir, text) -> None:
    path = state.folder / "devices.json"
    path.write_text(text, errors="surrogateescape")
    assert state.load_devices() == []
    assert not path.exists()
    assert (state.folder / "devices.json.unreadable").exists()


def test_what_is_of_a_device_s_shape_is_read(state: StateDir) -> None:
    (state.folder / "devices.json").write_text(with_device(colour="red"))
    assert [str(device.device_id) for device in state.load_devices()] == ["cuda/cuda0"]


def test_an_intent_that_could_not_be_dropped_harms_no_later_one(
    state: StateDir,
) -> None:
    intent = Intent("k1", "docker", "{}")
    state.save_intent(intent)
    failpoints.arm("intent.before_drop=1*error(EROFS)")
    state.drop_intent("k1")
    assert "cannot be removed" in state.warnings()[0]
    state.save_intent(intent)
    state.settle()
    assert state.load_intents() == [intent]
    assert state.warnings() == []
    state.drop_intent("k1")
    assert state.load_intents() == []


def test_what_could_not_be_dropped_is_dropped_later(state: StateDir) -> None:
    state.save_intent(Intent("k1", "docker", "{}"))
    failpoints.arm("intent.before_drop=2*error(EROFS)")
    state.drop_intent("k1")
    state.settle()
    assert len(state.load_intents()) == 1
    state.settle()
    assert state.load_intents() == []
    assert state.warnings() == []


def test_looking_at_a_folder_changes_nothing(state: StateDir) -> None:
    (state.folder / "devices.json").write_text("{")
    looking = ReadOnlyState(state.folder)
    assert looking.load_devices() == []
    looking.save_devices(gpus(1))
    assert (state.folder / "devices.json").read_text() == "{"


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartRefused, match=r"state folder .*: Not a directory"):
        StateDir(tmp_path / "file" / "state").open()
