"""A node goes on as before when its log cannot be written, says so, and loses no vital task."""

import json
from collections.abc import Iterator

import pytest

from agentd.stderr import NO_READER, REMEDY
from end_to_end.conftest import ONE_GPU
from end_to_end.test_reload import KILLED, WORK
from support.daemon import Daemon
from support.host_faults import LogPipe

LOST = "lines lost since the start: "


@pytest.fixture
def log(plain: Daemon) -> Iterator[LogPipe]:
    made = LogPipe(plain.folder / "log")
    yield made
    made.close()


async def lost_lines(daemon: Daemon) -> int:
    text = (await daemon.call("GET", "/metrics")).content.decode()
    prefix = "agentd_log_lines_lost_total "
    (value,) = [line for line in text.splitlines() if line.startswith(prefix)]
    return int(float(value.removeprefix(prefix)))


async def use(daemon: Daemon) -> None:
    """Create, stop and delete kernels; the device of each is free again."""
    created = await daemon.create(kernel_id="short", command=["true"], slots={"cuda.device": 1})
    assert created.status == 201
    await daemon.until("short", "terminated")
    assert await daemon.free("cuda.device") == "1"
    await daemon.running(kernel_id="long", slots={"cuda.device": 1})
    assert (await daemon.call("POST", "/v1/kernels/long/stop")).status == 200
    assert await daemon.free("cuda.device") == "1"
    refused = await daemon.call("POST", "/v1/kernels/none/stop")
    assert refused.status == 404
    for kernel in ("short", "long"):
        assert (await daemon.call("DELETE", f"/v1/kernels/{kernel}")).status == 204
    for path in ("/livez", "/readyz"):
        assert (await daemon.call("GET", path)).status == 200


@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
@pytest.mark.parametrize("is_stopped", [False, True], ids=["ended", "stopped"])
async def test_node_works_without_a_reader_of_its_log(
    plain: Daemon, log: LogPipe, *, is_stopped: bool, is_idle: bool
) -> None:
    plain.deadlines = {"agentd.daemon.lifecycle.LOG_RETRY_S": 0.3}
    await plain.start(ONE_GPU)
    assert await lost_lines(plain) == 0
    if is_stopped:
        log.fill()
    else:
        log.end_reader()
    await use(plain)
    reason = NO_READER if is_stopped else "Broken pipe"
    lost = await lost_lines(plain)
    assert lost >= 9, "three creates, ends, stops and deletes, each with its audit"
    (condition,) = (await plain.get("/v1/node"))["conditions"]
    since = condition.pop("since")
    remedy = f"{REMEDY}; {LOST}{lost}"
    assert condition == {
        "about": "log", "reason": f"the log cannot be written: {reason}", "remedy": remedy,
    }  # fmt: skip
    refused = await plain.call("POST", "/v1/kernels/none/stop")
    (condition,) = (await plain.get("/v1/node"))["conditions"]
    assert (refused.status, condition["since"]) == (404, since), "one more line, one condition"
    lost = await lost_lines(plain)
    log.read()  # the log comes back
    if not is_idle:
        assert (await plain.call("POST", "/v1/kernels/none/stop")).status == 404
    lines = (await log.until("log.lines_lost")).splitlines()
    report = next(json.loads(line) for line in lines if "log.lines_lost" in line)
    assert (report["lines"], report["reason"]) == (lost, reason)
    warning = f"the log could not be written: {reason} ({LOST}{lost})"
    assert (await plain.get("/v1/node"))["warnings"] == [warning]
    log.end_reader()
    assert await plain.stop() == 0


async def test_node_works_while_the_disk_of_its_log_is_full(plain: Daemon) -> None:
    (plain.folder / "log").symlink_to("/dev/full")
    await plain.start(ONE_GPU)
    await use(plain)
    (warning,) = (await plain.get("/v1/node"))["warnings"]
    assert warning.startswith("the log cannot be written: No space left on device (")
    assert await plain.stop() == 0


async def test_vital_task_ends_the_daemon_without_a_log(plain: Daemon, log: LogPipe) -> None:
    trigger = plain.folder / "trigger"
    plain.program = ("-c", KILLED.format(name=WORK["claims"], trigger=str(trigger)))
    await plain.start()
    log.end_reader()
    trigger.touch()
    assert await plain.ended() == 1
    plain._program = None
