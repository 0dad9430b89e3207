"""Locks on the state folder and the node id, with real files."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentd.errors import StartRefused
from agentd.state.folder import StateFolder
from agentd.state.locks import Locks, is_current, lock_folder

New = Callable[[], Locks]


@pytest.fixture
def new() -> Iterator[New]:
    made: list[Locks] = []

    def make() -> Locks:
        made.append(Locks())
        return made[-1]

    yield make
    for locks in made:
        locks.close()


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.with_suffix(".new").touch()
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", [remove, replace])
def test_a_lock_whose_file_is_changed_is_taken_again(
    new: New, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path, locks = tmp_path / "lock", new()
    assert locks.acquire(path, "taken") == ""
    change(path)
    for _ in range(2):
        assert locks.acquire(path, "taken") == ""
    with pytest.raises(StartRefused, match=rf"taken \(pid {os.getpid()}\)"):
        new().acquire(path, "taken")


def test_a_lock_that_another_took_meanwhile_is_refused(new: New, tmp_path: Path) -> None:
    path, first, second = tmp_path / "lock", new(), new()
    first.acquire(path, "taken")
    path.unlink()
    second.acquire(path, "taken")
    with pytest.raises(StartRefused, match="taken"):
        first.acquire(path, "taken")
    first.close()
    assert path.exists(), "it is the second's"


def test_a_holder_removes_its_file_at_its_end(new: New, tmp_path: Path) -> None:
    path, first = tmp_path / "lock", new()
    first.acquire(path, "taken")
    first.close()
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_is_removed_while_it_is_opened_is_no_lock(
    new: New, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, first, second = tmp_path / "lock", new(), new()
    first.acquire(path, "taken")
    opened = os.open

    def opened_before_its_end(name: Path, *args: int) -> int:
        descriptor = opened(name, *args)
        first.close()
        return descriptor

    monkeypatch.setattr(os, "open", opened_before_its_end)
    second.acquire(path, "taken")
    monkeypatch.undo()
    with pytest.raises(StartRefused, match="taken"):
        new().acquire(path, "taken")


def test_only_not_found_proves_that_a_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "lock"
    path.parent.mkdir()
    with path.open("w") as file:
        assert is_current(file.fileno(), path)
        path.unlink()
        path.symlink_to(path)
        assert not is_current(file.fileno(), path)
        path.unlink()
        assert not is_current(file.fileno(), path)
        assert is_current(file.fileno(), Path("/proc/self/mem/lock"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS], ids=["nfs", "lustre"])
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A state folder on it is refused; a home on it only hides a second daemon."""

    def without_locks(descriptor: int, operation: int) -> None:
        if "remote" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    remote = tmp_path / "remote"
    remote.mkdir()
    with pytest.raises(StartRefused, match=f"{remote}/lock: {os.strerror(number)}"):
        StateFolder(remote, "n").open(tmp_path)
    state = StateFolder(tmp_path / "state", "n")
    state.open(remote)
    (condition,) = state.conditions()
    assert condition.reason == f"{remote}/node-n.lock cannot be locked: {os.strerror(number)}"
    monkeypatch.undo()
    state.hold_locks(remote)
    assert [*state.conditions()] == []
    state.close()


@pytest.mark.parametrize("successor", ["folder", "link"])
@pytest.mark.parametrize("name", ["state/lock", "run/node-n.lock"])
def test_a_lock_that_is_replaced_by_no_file_is_a_condition(
    tmp_path: Path, name: str, successor: str
) -> None:
    state, path = StateFolder(tmp_path / "state", "n"), tmp_path / name
    state.open(tmp_path / "run")
    path.unlink()
    if successor == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        state.hold_locks(tmp_path / "run")
        (condition,) = state.conditions()
        assert condition.reason.startswith(f"{path} cannot be locked: ")
    path.rename(tmp_path / "aside")
    state.hold_locks(tmp_path / "run")
    assert [*state.conditions()] == []
    assert path.is_file()
    state.close()


def test_a_lock_that_is_not_used_any_more_is_no_condition(tmp_path: Path) -> None:
    """A logout removes the folder of the node's lock; the next one is in the home."""
    state, former = StateFolder(tmp_path / "state", "n"), tmp_path / "run" / "node-n.lock"
    former.mkdir(parents=True)
    state.open(former.parent)
    (condition,) = state.conditions()
    assert condition.reason.startswith(f"{former} ")
    state.hold_locks(tmp_path / "home")
    assert [*state.conditions()] == []
    state.close()


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (("runtime", "home"), "runtime/agentd"),
        (("home",), "home/.local/state/agentd"),
        ((), "state"),
    ],
    ids=["login", "cron", "container"],
)
def test_a_users_locks_are_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...], expected: str
) -> None:
    """A runtime folder or a home of another user is not used, as after `su`."""
    for name, variable in (("runtime", "XDG_RUNTIME_DIR"), ("home", "HOME")):
        folder = tmp_path / name
        folder.mkdir()
        os.chown(folder, 4711 if name in own else 4712, -1)
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert lock_folder(tmp_path / "state") == tmp_path / expected
