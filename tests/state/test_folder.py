import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from agentd import failpoints
from agentd.core.devices import DeviceId
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.errors import StartRefused, StateUnavailable
from agentd.state.folder import StateFolder
from agentd.state.schemas import Phase, SavedDevices, SavedRecord, StoppedPlugin
from core.machines import CPU, gpus
from support.damage import flipped


def link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def write_much(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 32)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateFolder]:
    made = StateFolder(tmp_path / "state", "n")
    made.open(tmp_path / "locks")
    yield made
    failpoints.arm("")


def test_what_is_saved_is_remembered(state: StateFolder) -> None:
    first, second = gpus(1, 0.5, nodes=(0, None))
    devices = [replace(first, files=("/dev/null",)), second]
    dealing = PluginAssignment.of({"a": devices[:1], "b": ()}, devices, "one is faster")
    stopped = {"cuda": StoppedPlugin("stopped by ann", (CPU,))}
    forgotten = [DeviceId("cuda", "cuda7")]
    state.save_devices(
        SavedDevices(devices, dealings={"cuda": dealing}, stopped=stopped, forgotten=forgotten)
    )
    saved = state.load_devices()
    assert saved.forgotten == forgotten
    assert (saved.dealings, saved.stopped) == ({"cuda": dealing}, stopped)
    loaded = saved.devices
    assert [(d.device_id, d.stable_id, d.capacity, d.aliases, d.drained) for d in loaded] == [
        (d.device_id, d.stable_id, d.capacity, d.aliases, d.drained) for d in devices
    ]
    assert [device.files for device in loaded] == [("/dev/null",), ()]
    state.save_devices(SavedDevices(devices))
    assert [device.files for device in state.load_devices().devices] == [(), ()]
    state.save_runtimes(["docker"])
    node = state.load_node()
    assert node is not None
    assert (node.node_id, node.runtimes) == ("n", ["docker"])


def test_a_claim_whose_name_does_not_last_leaves_no_record(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: str) -> None:
        raise OSError(errno.EIO, folder)

    monkeypatch.setattr("agentd.state.folder._sync_folder", fails)
    with pytest.raises(StateUnavailable):
        state.save_claim("c1", "{}", is_lasting=True)
    assert state.load_claims() == {}


def test_a_loss_of_power_ends_claims_whose_records_it_emptied(
    state: StateFolder, tmp_path: Path
) -> None:
    emptied = {"lost": b"", "zeros": b"\0" * 4096, "lasting": b"", "now": b"", "whole": b"{}"}
    for name, left in emptied.items():
        state.save_claim(name, "{}", is_lasting=name == "lasting")
        path = state.folder / "claims" / f"{name}.json"
        mode = path.stat().st_mode
        path.chmod(0o600)
        path.write_bytes(left)
        path.chmod(mode)
        if name != "now":
            os.utime(path, (1, 1))
    state.close()
    again = StateFolder(state.folder, "n")
    again.open(tmp_path / "locks")
    assert again.load_claims() == {"lasting": "", "now": "", "whole": "{}"}
    again.close()


def test_old_fifo_in_place_of_a_claim_delays_no_start(state: StateFolder, tmp_path: Path) -> None:
    odd = {"fifo": os.mkfifo, "folder": Path.mkdir, "link": link, "large": write_much}
    for name, make in odd.items():
        path = state.folder / "claims" / f"{name}.json"
        make(path)
        os.utime(path, (1, 1), follow_symlinks=False)
        if name != "link":
            path.chmod(0o400)
    state.close()
    again = StateFolder(state.folder, "n")
    again.open(tmp_path / "locks")
    assert again.load_claims() == dict.fromkeys(sorted(odd), "")
    for name in odd:
        again.drop_claim(name)
    assert again.load_claims() == {}
    again.close()


def test_claims_that_cannot_be_listed_are_not_none(state, monkeypatch) -> None:
    state.save_claim("held", "{}", is_lasting=False)

    def failing(_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "iterdir", failing)
    with pytest.raises(StateUnavailable, match="Input/output"):
        state.load_claims()


@pytest.mark.parametrize("name", ["intents", "records", "ended", "claims"])
def test_records_that_cannot_be_listed_refuse_a_start(
    state: StateFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    state.save_phase("k1", Phase.LIVE, lambda: "{}")
    state.close()
    listed = Path.iterdir

    def failing(path: Path) -> Iterator[Path]:
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", failing)
    with pytest.raises(StartRefused, match="cannot be read: Stale file handle"):
        StateFolder(state.folder, "n").open(tmp_path / "locks")


def test_bundles_that_cannot_be_listed_refuse_no_start(
    state: StateFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.close()
    listed = os.scandir

    def failing(path: Any = ".") -> Any:
        if str(path).endswith("kernels"):
            raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", failing)
    opened = StateFolder(state.folder, "n")
    opened.open(tmp_path / "locks")
    opened.close()


def test_bundles_that_cannot_be_listed_may_be_there(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state.runtimes_with_folders() == set()

    def failing(_: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", failing)
    assert state.runtimes_with_folders() == {"process", "systemd", "docker"}


def test_a_record_stays_until_its_kernel_is_dropped(state: StateFolder) -> None:
    state.save_intent("k1", "{}")
    assert state.load_records() == [SavedRecord("k1", Phase.INTENT, "{}")]
    for phase in (Phase.LIVE, Phase.ENDED, Phase.LIVE):
        state.save_phase("k1", phase, lambda: "not asked")
        assert state.load_records() == [SavedRecord("k1", phase, "{}")]
    state.save_phase("k2", Phase.LIVE, lambda: "[]")
    assert SavedRecord("k2", Phase.LIVE, "[]") in state.load_records()
    for kernel_id in ("k1", "k2", "k2"):
        state.drop_record(kernel_id)
    assert state.load_records() == []


def test_only_their_owner_can_read_what_is_remembered(state: StateFolder) -> None:
    state.save_intent("k1", "{}")
    state.save_devices(SavedDevices(gpus(1)))
    state.save_runtimes(["docker"])
    files = [path for path in state.folder.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_record_with_an_invalid_name_is_ignored(state: StateFolder) -> None:
    for name in ("..json", "-x.json", "a b.json", ".hidden.json", "notes.txt"):
        (state.folder / "records" / name).write_text("{}")
    assert state.load_records() == []


@pytest.mark.parametrize("kernel_id", ["../../PWNED", "..", "a/b", ""])
def test_no_file_is_written_or_removed_by_an_invalid_id(
    state: StateFolder, tmp_path: Path, kernel_id: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    for step in (
        lambda: state.save_intent(kernel_id, "{}"),
        lambda: state.save_phase(kernel_id, Phase.ENDED, lambda: "{}"),
        lambda: state.drop_record(kernel_id),
    ):
        with pytest.raises(ValueError, match="invalid name"):
            step()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_second_daemon_with_the_same_node_id_refuses(state: StateFolder, tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="another agentd serves node id n"):
        StateFolder(tmp_path / "other", "n").open(tmp_path / "locks")
    StateFolder(tmp_path / "another", "m").open(tmp_path / "locks")


DEVICE = {
    "device_id": ["cuda", "cuda0"],
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
        with_device(device_id=["cuda", 5]),
        with_device(kind="many"),
    ],
)
def test_a_damaged_file_is_set_aside_and_nothing_is_remembered(state: StateFolder, text) -> None:
    path = state.folder / "devices.json"
    path.write_text(text, errors="surrogateescape")
    assert state.load_devices().devices == []
    assert not path.exists()
    assert (state.folder / "devices.json.unreadable").exists()


def test_no_flipped_bit_gives_a_device_another_id(state: StateFolder) -> None:
    state.save_devices(SavedDevices(gpus(2)))
    path = state.folder / "devices.json"
    text, saved = path.read_bytes(), state.load_devices().devices
    for bit in range(8 * len(text)):
        path.write_bytes(flipped(text, bit))
        assert state.load_devices().devices in ([], saved)


def test_what_is_of_a_device_s_shape_is_read(state: StateFolder) -> None:
    (state.folder / "devices.json").write_text(with_device(colour="red"))
    assert [str(device.device_id) for device in state.load_devices().devices] == ["cuda/cuda0"]


def warnings(state: StateFolder) -> list[str]:
    return [*map(str, state.conditions())]


def test_only_operators_are_told_of_a_kernel_s_file(state: StateFolder) -> None:
    state.save_intent("k1", "{}")
    failpoints.arm("record.before_drop=1*error(EROFS)")
    state.drop_record("k1")
    assert [condition.agents for condition in state.conditions()] == [()]


def test_a_record_that_could_not_be_dropped_harms_no_later_one(state: StateFolder) -> None:
    state.save_intent("k1", "{}")
    failpoints.arm("record.before_drop=1*error(EROFS)")
    state.drop_record("k1")
    assert "cannot be written" in warnings(state)[0]
    state.save_intent("k1", "[]")
    state.retry()
    assert state.load_records() == [SavedRecord("k1", Phase.INTENT, "[]")]
    state.drop_record("k1")
    assert state.load_records() == []


def test_folder_in_place_of_a_record_is_set_aside(state: StateFolder) -> None:
    record = state.folder / "records" / "k1.json"
    record.mkdir(parents=True)
    state.save_intent("k1", "first")
    state.save_phase("k1", Phase.LIVE, lambda: "unused")
    assert state.load_records() == [SavedRecord("k1", Phase.LIVE, "first")]
    record.unlink()
    record.mkdir()
    (record.parent / "k1.json.unreadable").rmdir()
    (record.parent / "k1.json.unreadable").touch()
    state.save_record("k1", "second")
    assert state.load_records() == [SavedRecord("k1", Phase.LIVE, "second")]
    assert (state.folder / "records" / "k1.json.unreadable").is_dir()
    assert list(state.conditions()) == []


def test_what_could_not_be_written_is_written_later(state: StateFolder) -> None:
    state.save_intent("k1", "{}")
    failpoints.arm("record.before_move=2*error(EROFS)")
    state.save_phase("k1", Phase.LIVE, lambda: "{}")
    state.save_phase("k1", Phase.ENDED, lambda: "{}")
    assert state.load_records() == [SavedRecord("k1", Phase.INTENT, "{}")]
    failpoints.arm("")
    state.retry()
    assert state.load_records() == [SavedRecord("k1", Phase.ENDED, "{}")]
    assert warnings(state) == []


def test_records_of_another_node_id_stay_and_are_not_loaded(state: StateFolder) -> None:
    texts = {"k1": '{"node_id": "n"}', "k2": '{"node_id": "before"}', "k3": "{"}
    for kernel_id, text in texts.items():
        state.save_intent(kernel_id, text)
        state.save_phase(kernel_id, Phase.ENDED, lambda: "not asked")
    assert [record.kernel_id for record in state.load_records()] == ["k1", "k3"]
    before = StateFolder(state.folder, "before")
    assert [record.kernel_id for record in before.load_records()] == ["k2", "k3"]
    state.save_intent("k2", '{"node_id": "n"}')
    assert [record.kernel_id for record in state.load_records()] == ["k2", "k1", "k3"]


def test_runtimes_that_could_not_be_saved_are_saved_later(state: StateFolder) -> None:
    state.save_runtimes(["process"])
    failpoints.arm("node.before_replace=2*error(EROFS)")
    for names in (["process", "docker"], ["process", "docker", "systemd"]):
        state.save_runtimes(names)
    assert any("record of the node" in text for text in warnings(state))
    state.retry()
    node = state.load_node()
    assert node is not None
    assert (node.runtimes, warnings(state)) == (["process", "docker", "systemd"], [])


def test_reading_records_changes_nothing(state: StateFolder) -> None:
    state.save_intent("k1", "{}")
    failpoints.arm("record.before_move=1*error(EROFS)")
    state.save_phase("k1", Phase.LIVE, lambda: "{}")
    assert [record.phase for record in state.load_records()] == [Phase.INTENT]
    failpoints.arm("")
    state.drop_record("k1")
    state.retry()
    assert state.load_records() == []


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, link])
def test_what_is_no_file_is_no_record(state: StateFolder, make) -> None:
    make(state.folder / "records" / "k1.json")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        assert state.load_records() == [SavedRecord("k1", Phase.LIVE, "")]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_warning_of_a_full_folder_ends_without_another_save(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    failpoints.arm("devices.before_replace=1*error(ENOSPC)")
    with pytest.raises(StateUnavailable):
        state.save_devices(SavedDevices(gpus(1)))
    before = warnings(state)
    with monkeypatch.context() as full:
        full.setattr(
            "agentd.state.folder._write_new_file", Mock(side_effect=OSError(errno.ENOSPC, "full"))
        )
        state.retry()
    assert warnings(state) == before != []
    state.retry()
    assert (warnings(state), [*state.folder.glob(".*.new")]) == ([], [])


def test_looking_at_a_folder_changes_nothing(state: StateFolder) -> None:
    (state.folder / "devices.json").write_text("{")
    looking = StateFolder(state.folder, "n")
    assert looking.load_devices().devices == []
    looking.save_devices(SavedDevices(gpus(1)))
    assert (state.folder / "devices.json").read_text() == "{"


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartRefused, match=r"state folder .*: Not a directory"):
        StateFolder(tmp_path / "file" / "state", "n").open(tmp_path / "locks")
