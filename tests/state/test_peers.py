"""Coordination of daemons on one host, with real files, locks and users."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentd.services.protocols import Served, ServedDevice
from agentd.state.peers import HostPeers, PeerPaths

GPU = ServedDevice("cuda/cuda0", ("0000:3b:00.0", "GPU-a"), held=False)
HELD = ServedDevice("cuda/cuda1", ("GPU-b",), held=True)
ALICE, BOB = 61001, 61002

as_root = pytest.mark.needs("root")


class Machine:
    """A machine's folders, and its daemons by user and node id."""

    def __init__(self, folder: Path) -> None:
        self.run, self.tmp = folder / "run", folder / "tmp"
        self.run.mkdir()
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        self.made: list[HostPeers] = []

    def daemon(self, uid: int, node_id: str, boot_id: str = "boot-1") -> HostPeers:
        made = HostPeers(node_id, boot_id, PeerPaths.of(uid, self.run, self.tmp))
        with user(uid):
            made.open()
        self.made.append(made)
        return made

    def publish(self, daemon: HostPeers, *devices: ServedDevice) -> None:
        with user(daemon.places.uid):
            daemon.publish(Served(devices))

    def seen(self, daemon: HostPeers) -> dict[str, tuple[str, bool]]:
        with user(daemon.places.uid), daemon.deciding(1) as may_decide:
            assert may_decide
            return {
                other.node_id: (
                    " ".join(device.name for device in other.served.devices),
                    other.is_alive,
                )
                for other in daemon.others()
            }


@contextlib.contextmanager
def user(uid: int) -> Iterator[None]:
    before = os.geteuid()
    if uid == before:
        yield
        return
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def machine(folder: Path) -> Iterator[Machine]:
    made = Machine(folder)
    yield made
    for daemon in made.made:
        daemon.close()


def ended() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@as_root
def test_roots_daemons_see_each_other_and_who_runs(machine: Machine) -> None:
    one, two = machine.daemon(0, "one"), machine.daemon(0, "two")
    machine.publish(one, GPU)
    assert machine.seen(two) == {"one": ("cuda/cuda0", True)}
    assert machine.seen(one) == {}
    one.close()
    assert machine.seen(two) == {"one": ("cuda/cuda0", False)}
    machine.publish(one)
    assert machine.seen(two) == {}


@as_root
def test_users_see_devices_of_root_and_root_sees_only_its_own(machine: Machine) -> None:
    root, alice, bob = (
        machine.daemon(0, "root"),
        machine.daemon(ALICE, "alice"),
        machine.daemon(BOB, "bob"),
    )
    machine.publish(root, GPU)
    machine.publish(alice, HELD)
    assert machine.seen(root) == {}
    assert machine.seen(alice) == {"root": ("cuda/cuda0", True)}
    assert machine.seen(bob) == {"root": ("cuda/cuda0", True), "alice": ("cuda/cuda1", True)}


@as_root
def test_only_root_can_open_where_root_decides(machine: Machine) -> None:
    machine.daemon(0, "root")
    with user(ALICE), pytest.raises(PermissionError):
        os.open(machine.run / "serving", os.O_RDONLY)
    with user(ALICE), pytest.raises(PermissionError):
        (machine.run / "served/forged.json").write_text("{}")


@as_root
def test_published_file_of_another_owner_is_ignored(machine: Machine) -> None:
    alice, bob = machine.daemon(ALICE, "alice"), machine.daemon(BOB, "bob")
    machine.publish(alice, GPU)
    file = machine.tmp / f"agentd-served-{ALICE}/alice.json"
    (machine.tmp / f"agentd-served-{ALICE}").chmod(0o777)
    assert machine.seen(bob) == {}, "anybody could have written it"
    (machine.tmp / f"agentd-served-{ALICE}").chmod(0o755)
    os.chown(file, BOB, BOB)
    assert machine.seen(bob) == {}
    os.chown(file, ALICE, ALICE)
    assert "alice" in machine.seen(bob)
    stolen = machine.tmp / "agentd-served-0"
    with user(BOB):
        stolen.mkdir()
        (stolen / "root.json").write_bytes(file.read_bytes())
    assert set(machine.seen(alice)) == set()


@as_root
def test_file_of_root_that_cannot_be_read_is_a_warning(machine: Machine) -> None:
    root, alice = machine.daemon(0, "root"), machine.daemon(ALICE, "alice")
    machine.publish(root, GPU)
    (machine.run / "served/root.json").chmod(0o600)
    assert machine.seen(alice) == {}
    (said,) = alice.warnings()
    assert said.endswith("served/root.json: Permission denied")


@as_root
@pytest.mark.parametrize("obstacle", ["folder", "link"])
def test_folder_of_another_owner_is_a_warning(machine: Machine, obstacle: str) -> None:
    place = machine.tmp / f"agentd-served-{ALICE}"
    with user(BOB):
        if obstacle == "folder":
            place.mkdir(mode=0o777)
            place.chmod(0o777)
        else:
            place.symlink_to("/etc")
    alice = machine.daemon(ALICE, "alice")
    machine.publish(alice, GPU)
    assert "is writable by another user" in alice.warnings()[0]
    assert not list(place.glob("alice*"))


@as_root
@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"{}", b'{"node_id": "\\u001b[2J"', b"[" * 100_000, b"x" * (2 << 20)]
)
def test_unreadable_published_file_is_ignored(machine: Machine, content: bytes) -> None:
    alice = machine.daemon(ALICE, "alice")
    machine.daemon(BOB, "bob")
    with user(BOB):
        (machine.tmp / f"agentd-served-{BOB}/bob.json").write_bytes(content)
        os.mkfifo(machine.tmp / f"agentd-served-{BOB}/pipe.json")
    assert machine.seen(alice) == {}


@as_root
def test_a_file_of_an_earlier_boot_says_nothing(machine: Machine) -> None:
    before = machine.daemon(ALICE, "alice", "boot-0")
    machine.publish(before, HELD)
    assert machine.seen(machine.daemon(BOB, "bob")) == {}
    assert machine.daemon(ALICE, "alice").own() is None


@as_root
def test_a_users_daemon_runs_as_long_as_its_process(machine: Machine) -> None:
    alice, bob = machine.daemon(ALICE, "alice"), machine.daemon(BOB, "bob")
    machine.publish(alice, GPU)
    file = machine.tmp / f"agentd-served-{ALICE}/alice.json"
    assert machine.seen(bob)["alice"] == ("cuda/cuda0", True)
    text = file.read_text()
    for number in (str(ended()), "1", "-1", "99999999999999999999999"):
        file.write_text(text.replace(f'"pid":{os.getpid()}', f'"pid":{number}'))
        assert not machine.seen(bob).get("alice", ("", False))[1], number


@as_root
def test_what_was_published_last_is_read_back(machine: Machine) -> None:
    one = machine.daemon(0, "one")
    assert one.own() is None
    machine.publish(one, GPU, HELD)
    one.close()
    again = machine.daemon(0, "one")
    assert again.own() == Served((GPU, HELD))


@as_root
def test_one_decides_at_a_time_and_none_waits_for_ever(machine: Machine) -> None:
    one, two = machine.daemon(0, "one"), machine.daemon(0, "two")
    with one.deciding(1) as may_decide:
        assert may_decide
        with two.deciding(0.05) as also:
            assert not also
    with two.deciding(1) as may_decide:
        assert may_decide


@as_root
def test_a_machine_without_a_place_to_tell_others_is_said(folder: Path) -> None:
    (folder / "run").write_text("a file")
    alone = HostPeers("one", "boot", PeerPaths.of(0, folder / "run", folder))
    alone.open()
    with alone.deciding(1) as may_decide:
        assert may_decide
        assert alone.others() == []
        alone.publish(Served((GPU,)))
    assert "Not a directory" in alone.warnings()[0]


@as_root
def test_a_umask_that_hides_files_hides_nothing_from_the_others(machine: Machine) -> None:
    before = os.umask(0o077)
    try:
        root, alice = machine.daemon(0, "root"), machine.daemon(ALICE, "alice")
        machine.publish(root, GPU)
        machine.publish(alice, HELD)
    finally:
        os.umask(before)
    seen = machine.seen(machine.daemon(BOB, "bob"))
    assert seen == {"root": ("cuda/cuda0", True), "alice": ("cuda/cuda1", True)}


@as_root
def test_what_root_serves_and_cannot_be_read_is_said(machine: Machine) -> None:
    root, bob = machine.daemon(0, "root"), machine.daemon(BOB, "bob")
    machine.publish(root, GPU)
    (machine.run / "served").chmod(0o700)
    assert machine.seen(bob) == {}
    assert "cannot read the devices" in bob.warnings()[0]


@as_root
@pytest.mark.parametrize(
    "member",
    [
        '"pid":' + "9" * 4200,
        '"start_time":' + "9" * 30,
        '"served":{"devices":[],"memory":' + "9" * 4300 + "}",
        '"served":{"devices":[],"memory":-1}',
    ],
)
def test_published_file_with_invalid_numbers_is_ignored(machine: Machine, member: str) -> None:
    alice, bob = machine.daemon(ALICE, "alice"), machine.daemon(BOB, "bob")
    machine.publish(alice, GPU)
    file = machine.tmp / f"agentd-served-{ALICE}/alice.json"
    text = file.read_text()
    name = member.partition(":")[0]
    start = text.index(name)
    end = len(text) - 1 if "served" in name else text.index(",", start)
    file.write_text(text[:start] + member + text[end:])
    assert machine.seen(bob) == {}


@as_root
def test_one_user_has_one_folder_and_few_files(machine: Machine) -> None:
    alice, bob = machine.daemon(ALICE, "alice"), machine.daemon(BOB, "bob")
    machine.publish(bob, GPU)
    mine = machine.tmp / f"agentd-served-{BOB}"
    text = (mine / "bob.json").read_text()
    with user(BOB):
        for name in (f"0{BOB}", f"00{BOB}", f"+{BOB}"):
            folder = machine.tmp / f"agentd-served-{name}"
            folder.mkdir()
            (folder / "more.json").write_text(text.replace('"bob"', '"more"'))
        for number in range(50):
            (mine / f"n{number:02}.json").write_text(text.replace('"bob"', f'"n{number:02}"'))
    assert len(machine.seen(alice)) == 4


@as_root
def test_emptied_run_folder_is_recreated(machine: Machine) -> None:
    one, two = machine.daemon(0, "one"), machine.daemon(0, "two")
    machine.publish(one, GPU)
    shutil.rmtree(machine.run / "serving")
    shutil.rmtree(machine.run / "served")
    assert machine.seen(two) == {}
    machine.publish(one, GPU)
    assert machine.seen(two) == {"one": ("cuda/cuda0", True)}
