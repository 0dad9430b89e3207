from pathlib import Path

import pytest

from agentd.adapters.state_dir import ReadOnlyState, StateDir
from agentd.errors import StartRefused
from agentd.services.interfaces import Intent
from core.machines import gpus


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir(tmp_path / "state")
    made.open()
    return made


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
    assert state.load_node()["node_id"] == "n"


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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"devices": [{}]}', '{"devices": 1}', "\udcff"])
def test_a_damaged_file_is_set_aside_and_nothing_is_remembered(state: StateDir, text) -> None:
    path = state.folder / "devices.json"
    path.write_text(text, errors="surrogateescape")
    assert state.load_devices() == ()
    assert not path.exists()
    assert (state.folder / "devices.json.unreadable").exists()


def test_looking_at_a_folder_changes_nothing(state: StateDir) -> None:
    (state.folder / "devices.json").write_text("{")
    looking = ReadOnlyState(state.folder)
    assert looking.load_devices() == ()
    looking.save_devices(gpus(1))
    assert (state.folder / "devices.json").read_text() == "{"


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartRefused, match=r"state folder .*: Not a directory"):
        StateDir(tmp_path / "file" / "state").open()
