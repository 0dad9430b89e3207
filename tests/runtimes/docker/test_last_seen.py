"""Containers that ended with their engine or their host say so, and no others do."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentd.core.kernel.states import Ending
from agentd.runtimes.docker.last_seen import ENGINE_STOPPED, NODE_RESTARTED, OutageLog
from support.waiting import until


class Watch:
    """A time that a test sets, and the engine as agentd has seen it."""

    def __init__(self, file: Path, now: float) -> None:
        self.now = now
        self.file = file
        self.boot_id = "boot 1"
        self.last_seen = OutageLog(file, self.boot_id)

    def restart(self, *, reboot: bool = False) -> None:
        """Start agentd again, after a stop; `reboot`: on another boot."""
        self.last_seen.save()
        self.kill(reboot=reboot)

    def kill(self, *, reboot: bool = False) -> None:
        """Start agentd again, after a SIGKILL."""
        self.boot_id = "boot 2" if reboot else self.boot_id
        self.last_seen = OutageLog(self.file, self.boot_id)

    def connect(self, *, keeps_containers: bool = False) -> None:
        self.last_seen.mark_connected(keeps_containers=keeps_containers)

    def reason(self, at: float, exit_code: int = 137, **facts: bool) -> str:
        """Return the reason of a container that ended then."""
        return self.last_seen.explain_ending(Ending(exit_code, finished_at=at, **facts)).reason


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: made.now if made else now)
    made: Watch | None = None
    made = Watch(tmp_path / "last_seen.json", now)
    yield made
    made.last_seen.save()


@pytest.mark.parametrize("keeps_containers", [True, False])
async def test_an_engine_that_stopped_explains_ends(watch: Watch, keeps_containers: bool) -> None:
    watch.connect(keeps_containers=keeps_containers)
    watch.now += 1800
    watch.last_seen.update()
    watch.now += 600
    watch.last_seen.mark_lost()
    watch.now += 60
    watch.last_seen.mark_lost()
    watch.connect(keeps_containers=keeps_containers)
    expected = "" if keeps_containers else ENGINE_STOPPED
    for exit_code in (137, 143, 255):
        assert watch.reason(watch.now - 30, exit_code) == expected
    assert watch.reason(watch.now - 70) == expected, "it ends containers before it hangs up"
    assert watch.reason(watch.now - 30, 3) == ""
    assert watch.reason(watch.now - 30, oom_killed=True) == ""
    assert watch.reason(watch.now - 700) == "", "agentd saw it end"
    assert watch.reason(watch.now + 1) == ""
    restarted = watch.reason(watch.now - 30)
    watch.restart()
    watch.connect(keeps_containers=keeps_containers)
    assert watch.reason(watch.now - 30) == restarted


async def test_a_reboot_explains_ends_after_the_last_event(watch: Watch) -> None:
    watch.connect()
    watch.now += 1800
    watch.last_seen.update()
    watch.now += 60
    watch.restart(reboot=True)
    watch.now += 600
    assert watch.reason(watch.now - 620) == ""
    watch.connect(keeps_containers=True)
    assert watch.reason(watch.now - 620) == watch.reason(watch.now - 1, 255) == NODE_RESTARTED
    assert watch.reason(watch.now - 700) == "", "agentd saw it end"
    watch.restart()
    assert watch.reason(watch.now - 620) == NODE_RESTARTED


@pytest.mark.parametrize("end_agentd", [Watch.restart, Watch.kill])
async def test_a_lost_stream_outlives_agentd(
    watch: Watch, end_agentd: Callable[[Watch], None]
) -> None:
    watch.connect()
    watch.now += 600
    watch.last_seen.mark_lost()
    watch.now += 10
    end_agentd(watch)
    watch.now += 10
    watch.connect()
    assert watch.reason(watch.now - 15) == ENGINE_STOPPED
    assert watch.reason(watch.now - 700) == ""


@pytest.mark.parametrize("end_agentd", [Watch.restart, Watch.kill])
async def test_a_reboot_outlives_agentd_until_it_connects(
    watch: Watch, end_agentd: Callable[[Watch], None]
) -> None:
    watch.connect()
    watch.restart(reboot=True)
    watch.now += 60
    watch.last_seen.mark_lost()
    end_agentd(watch)
    watch.connect(keeps_containers=True)
    assert watch.reason(watch.now - 30) == NODE_RESTARTED


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
async def test_engine_with_changed_live_restore_ended_its_containers(
    watch: Watch, before: bool, after: bool
) -> None:
    watch.connect(keeps_containers=before)
    watch.now += 600
    watch.last_seen.mark_lost()
    watch.kill()
    watch.now += 60
    watch.connect(keeps_containers=after)
    assert watch.reason(watch.now - 30) == ENGINE_STOPPED


async def test_a_list_before_the_stream_does_not_end_an_outage(watch: Watch) -> None:
    watch.connect()
    watch.now += 600
    watch.last_seen.mark_lost()
    watch.now += 60
    watch.last_seen.update()
    watch.now += 1
    watch.connect()
    assert watch.reason(watch.now - 30) == ENGINE_STOPPED


async def test_a_start_of_agentd_alone_explains_nothing(watch: Watch) -> None:
    watch.now += 60
    watch.connect()
    assert watch.reason(watch.now - 30) == ""
    watch.restart()
    watch.now += 60
    watch.connect()
    assert watch.reason(watch.now - 30) == ""


async def test_an_unreadable_file_is_replaced(watch: Watch) -> None:
    watch.file.write_text("{")
    watch.last_seen = OutageLog(watch.file, "boot 2")
    watch.connect()
    assert watch.reason(watch.now) == ""
    watch.last_seen.save()
    assert b"boot 2" in watch.file.read_bytes()


async def test_the_file_is_written_a_while_after_an_event(watch: Watch, monkeypatch) -> None:
    monkeypatch.setattr("agentd.runtimes.docker.last_seen.SAVE_PAUSE_S", 0)
    watch.connect()
    watch.now += 10
    watch.last_seen.update()
    assert str(watch.now).encode() not in watch.file.read_bytes()
    await until(lambda: str(watch.now).encode() in watch.file.read_bytes())
