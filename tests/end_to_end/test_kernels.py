"""Kernels, through the HTTP socket, on both runtimes."""

import asyncio
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from agentd.host.cgroups.hierarchies import find_cgroups
from support.daemon import AGENTS, Daemon, gpus
from support.daemon_pool import Serving
from support.waiting import until


async def environment(pid: int) -> bytes:
    """Return a kernel's environment; for a moment its process is still the engine's."""
    async with asyncio.timeout(10):
        while b"CUDA_VISIBLE_DEVICES=" not in (found := Path(f"/proc/{pid}/environ").read_bytes()):
            await asyncio.sleep(0.01)
    return found


async def test_a_kernel_gets_its_devices_its_cores_and_its_memory(serving: Serving) -> None:
    daemon = await serving()
    kernel = await daemon.running(slots={"cuda.device": 1, "cpu": 1, "mem": "64m"}, kernel_id="k1")
    assert kernel["slots"] == {"cpu": "1", "cuda.device": "1", "mem": "67108864"}
    assert kernel["allocation"] == {
        "cuda": {"cuda.device": {"cuda0": "1"}},
        "cpu": {"cpu": {"0": "1"}},
        "mem": {"mem": {"root": "67108864"}},
    }
    assert kernel["unknown_slots"] == {}
    assert kernel["degraded"] == []
    assert kernel["exit_code"] is None
    pid = daemon.main_pid(kernel, daemon.test_engine)
    status = Path(f"/proc/{pid}/status").read_text()
    assert "Cpus_allowed_list:\t0\n" in status
    env = (await environment(pid)).split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=cuda0" in env
    device = await daemon.device("cuda0")
    assert device["holders"] == [
        {"kernel_id": "k1", "amount": "1", "amounts": {"cuda.device": "1"}}
    ]
    assert (device["allocated"], device["free"], device["state"]) == ("1", "0", "ok")
    assert await daemon.free("cuda.device") == "1"
    assert await daemon.get("/v1/kernels/k1") == kernel
    assert await daemon.get("/v1/kernels") == [kernel]
    assert await daemon.get("/v1/agents/agent-1/kernels") == [kernel]
    assert await daemon.get("/v1/agents/agent-2/kernels") == []


async def test_memory_limit_is_enforced_or_reported(serving: Serving) -> None:
    daemon = await serving()
    script = "sleep 0.2; x=$(head -c 200m /dev/zero | tr '\\0' x); echo survived"
    made = await daemon.create(kernel_id="k1", command=["sh", "-c", script], slots={"mem": "32m"})
    kernel = await daemon.until("k1", "terminated")
    if "mem" in made.json["not_enforced"]:
        assert (daemon.runtime, find_cgroups()) == ("process", None)
        return
    assert kernel["oom_killed"] or kernel["exit_code"] == 137
    assert (await daemon.call("GET", "/v1/kernels/k1/logs")).content == b""


async def test_a_kernel_without_gpus_sees_none(serving: Serving) -> None:
    daemon = await serving()
    kernel = await daemon.running(slots={})
    env = await environment(daemon.main_pid(kernel, daemon.test_engine))
    assert b"CUDA_VISIBLE_DEVICES=\0" in env
    assert kernel["slots"] == {"cpu": "1", "mem": "268435456"}


async def test_cpu_zero_runs_on_the_agent_s_cores_uncharged(serving: Serving) -> None:
    daemon = await serving()
    kernel = await daemon.running(slots={"cpu": 0})
    assert "cpu" not in kernel["allocation"]
    assert await daemon.free("cpu") == "8"
    refused = await daemon.create(slots={"mem": 0})
    assert (refused.status, refused.json["code"]) == (422, "InvalidSlotAmount")


async def test_unknown_slot_is_refused_unless_zero(serving: Serving) -> None:
    daemon = await serving()
    refused = await daemon.create(image="no/such:image", slots={"tpu.chip": 1, "npu": "0.5"})
    assert refused.status == 422
    assert refused.headers["Content-Type"] == "application/problem+json"
    problem = refused.json
    assert problem["code"] == "UnsupportedResource"
    assert problem["slots"] == ["npu", "tpu.chip"]
    assert problem["known_slots"] == ["cpu", "cuda.device", "mem"]
    assert await daemon.get("/v1/kernels") == []
    await daemon.running(slots={"tpu.chip": 0, "npu": "0"})


async def test_the_same_request_again_is_the_same_kernel(serving: Serving) -> None:
    daemon = await serving()
    first = await daemon.running(kernel_id="k1", slots={"mem": "1g", "cuda.device": "1.0"})
    again = await daemon.create(kernel_id="k1", slots={"mem": 2**30, "cuda.device": 1, "x": 0})
    assert (again.status, again.json) == (200, first)
    other = await daemon.create(kernel_id="k1", slots={"mem": "2g"})
    assert (other.status, other.json["code"]) == (409, "KernelConflict")
    elsewhere = await daemon.create("agent-2", kernel_id="k1", slots={"mem": "1g"})
    assert elsewhere.status == 409


async def test_another_attempt_of_an_id_is_a_conflict(serving: Serving) -> None:
    daemon = await serving()
    body = {"kernel_id": "k1", "attempt": "00000000000000aA"}
    first = await daemon.running(**body)
    again = await daemon.create(**body)
    assert (again.status, again.json) == (200, first)
    other = {**body, "attempt": "00000000000000bb"}
    for query in ("", "?dry_run=true"):
        refused = await daemon.create(query=query, **other)
        assert (refused.status, refused.json["code"]) == (409, "KernelConflict")
        assert "another attempt created it" in refused.json["detail"]
    for odd in ("", "00", "g" * 16, "0" * 17, 7, None):
        refused = await daemon.create(kernel_id="k2", attempt=odd)
        assert (refused.status, odd) == (201 if odd is None else 422, odd)


async def test_attempts_at_once_make_one_kernel(serving: Serving) -> None:
    """Nomad ran both of two dispatches with one token: hashicorp/nomad#26690."""
    daemon = await serving()
    attempts = ["0" * 16, "1" * 16] * 8
    answers = await asyncio.gather(*(daemon.create(kernel_id="k1", attempt=a) for a in attempts))
    by_attempt = {a: Counter[int]() for a in attempts}
    for attempt, answer in zip(attempts, answers, strict=True):
        by_attempt[attempt][answer.status] += 1
    assert sorted(map(dict, by_attempt.values()), key=len) == [{409: 8}, {201: 1, 200: 7}]


async def test_signal_arrives_at_an_adopted_kernel(daemon: Daemon) -> None:
    await daemon.start()
    await daemon.trapping("trap 'exit 9' USR1", kernel_id="k1")
    await daemon.restart(number=signal.SIGKILL)
    answer = await daemon.call("POST", "/v1/kernels/k1/signal", {"signal": "USR1"})
    assert (answer.status, answer.content) == (204, b"")
    ended = await until(
        lambda: daemon.get("/v1/kernels/k1"), lambda kernel: kernel["state"] == "terminated"
    )
    assert ended["exit_code"] == 9
    late = await daemon.call("POST", "/v1/kernels/k1/signal", {"signal": "USR1"})
    assert (late.status, late.json["code"]) == (409, "KernelConflict")


async def test_read_end_removes_a_kernel_that_asked_for_it(daemon: Daemon) -> None:
    daemon.deadlines = {"agentd.services.kernels.retention.REMOVE_DELAY_S": 0.2}
    await daemon.start()
    body = {"kernel_id": "k1", "command": ["true"], "remove": True}
    assert (await daemon.create(**body)).status == 201
    listed = partial(daemon.get, "/v1/kernels?state=terminated")
    await until(listed, lambda rows: len(rows) == 1, text="an ended kernel")
    await daemon.restart()
    for _ in range(20):  # longer than the delay: neither a list nor its usage is its end
        assert len(await listed()) == 1
        await daemon.get("/v1/kernels/k1/stats")
        await asyncio.sleep(0.02)
    assert (await daemon.get("/v1/kernels/k1"))["state"] == "terminated"
    await until(lambda: daemon.call("GET", "/v1/kernels/k1"), lambda answer: answer.status == 404)
    assert await daemon.get("/v1/kernels") == []


async def test_stop_keeps_it_listed_and_delete_removes_it(serving: Serving) -> None:
    daemon = await serving()
    await daemon.running(kernel_id="k1", slots={"cuda.device": 2})
    stopped = await daemon.call("POST", "/v1/kernels/k1/stop", {"timeout": 0})
    assert (stopped.status, stopped.json["state"]) == (200, "terminated")
    assert stopped.json["exit_code"] == 137
    assert stopped.json["allocation"] == {}
    assert stopped.json["finished_at"] is not None
    assert await daemon.free("cuda.device") == "2"
    again = await daemon.call("POST", "/v1/kernels/k1/stop")
    assert again.json == stopped.json
    assert (await daemon.call("DELETE", "/v1/kernels/k1")).status == 204
    gone = await daemon.call("DELETE", "/v1/kernels/k1")
    assert (gone.status, gone.json["code"]) == (404, "UnknownKernel")


async def test_delete_stops_a_running_kernel(serving: Serving) -> None:
    daemon = await serving()
    kernel = await daemon.running(kernel_id="k1", slots={"cuda.device": 2})
    pid = daemon.main_pid(kernel, daemon.test_engine)
    assert (await daemon.call("DELETE", "/v1/kernels/k1?timeout=0")).status == 204
    assert not Path(f"/proc/{pid}").exists()
    assert await daemon.free("cuda.device") == "2"
    assert await daemon.get("/v1/kernels") == []


async def test_respond_async_answers_at_once_and_keeps_a_failure(daemon: Daemon) -> None:
    await daemon.start()
    headers = {"Prefer": "respond-async"}
    accepted = await daemon.create(kernel_id="k1", headers=headers)
    assert accepted.status == 202
    assert accepted.headers["Preference-Applied"] == "respond-async"
    assert accepted.json["state"] in ("preparing", "creating", "running")
    await daemon.until("k1", "running")
    failing = await daemon.create(kernel_id="k2", command=["no-such-command"], headers=headers,
                                  slots={"cuda.device": 2})  # fmt: skip
    assert failing.status == 202
    failed = await daemon.until("k2", "failed")
    assert "no-such-command" in failed["reason"]
    assert await daemon.free("cuda.device") == "2"
    assert (await daemon.call("DELETE", "/v1/kernels/k2")).status == 204


async def test_a_failed_create_leaves_nothing(daemon: Daemon) -> None:
    await daemon.start()
    bad = await daemon.create(command=["no-such-command"], slots={"cuda.device": 2})
    assert (bad.status, bad.json["code"]) == (422, "CommandNotFound")
    assert await daemon.get("/v1/kernels") == []
    assert await daemon.free("cuda.device") == "2"
    if daemon.runtime == "docker":
        image = "127.0.0.1:1/agentd-test:none"
        bad = await daemon.create(image=image, slots={"cuda.device": 2})
        assert (bad.status, bad.json["code"]) == (503, "ImageUnavailable")
        assert daemon.test_engine.containers() == []
    else:
        assert list((daemon.folder / "state" / "kernels").iterdir()) == []


async def test_64_creates_on_8_devices_give_8_kernels(serving: Serving) -> None:
    daemon = await serving(AGENTS + gpus(8))

    async def create(n: int):
        slots = {"cuda.device": 1, "cpu": 0, "mem": "16m"}
        return await daemon.create(f"agent-{n % 2 + 1}", slots=slots)

    answers = await asyncio.gather(*(create(n) for n in range(64)))
    statuses = Counter(answer.status for answer in answers)
    assert statuses == {201: 8, 409: 56}
    given = [
        device
        for answer in answers
        if answer.status == 201
        for device in answer.json["allocation"]["cuda"]["cuda.device"]
    ]
    assert sorted(given) == [f"cuda{n}" for n in range(8)]
    for answer in answers:
        if answer.status == 409:
            assert answer.json["code"] == "InsufficientResource"
            assert len(answer.json["explain"]) == 8


async def test_deleting_again_and_again_during_a_create_leaves_nothing(daemon: Daemon) -> None:
    await daemon.start()
    for number in range(3):
        name = f"k{number}"
        creating = asyncio.create_task(daemon.create(kernel_id=name, slots={"cuda.device": 1}))
        while not await daemon.get("/v1/kernels"):
            pass
        deletes = [daemon.call("DELETE", f"/v1/kernels/{name}?timeout=0") for _ in range(3)]
        answers = [answer.status for answer in await asyncio.gather(*deletes)]
        assert set(answers) <= {204, 404}
        created = await creating
        assert created.status in (201, 409)
        assert await daemon.get("/v1/kernels") == []
        assert await daemon.free("cuda.device") == "2"
    if daemon.runtime == "docker":
        assert daemon.test_engine.containers() == []
    else:
        assert list((daemon.folder / "state" / "kernels").iterdir()) == []


@pytest.mark.docker
async def test_kernel_state_follows_pause_and_start_by_hand(dockered) -> None:
    await dockered.start()
    kernel = await dockered.running(kernel_id="k1", slots={"cuda.device": 1})
    container = f"/containers/{kernel['container_id']}"
    dockered.test_engine.call("POST", f"{container}/pause")
    await dockered.until("k1", "paused")
    assert await dockered.free("cuda.device") == "1"
    dockered.test_engine.call("POST", f"{container}/unpause")
    await dockered.until("k1", "running")
    dockered.test_engine.call("POST", f"{container}/kill")
    await dockered.until("k1", "terminated")
    dockered.test_engine.call("POST", f"{container}/start")
    again = await dockered.until("k1", "running")
    assert again["exit_code"] is None
    assert await dockered.free("cuda.device") == "1"


async def test_limits_of_setrlimit_are_held_on_either_runtime(serving: Serving) -> None:
    daemon = await serving()
    script = "ulimit -n; ulimit -Hn; ulimit -c"
    ulimits = {"nofile": {"soft": 100, "hard": 200}, "core": 0}
    answer = await daemon.create(kernel_id="k1", command=["sh", "-c", script], ulimits=ulimits)
    assert answer.status == 201, answer.content
    await daemon.until("k1", "terminated")
    log = await daemon.call("GET", "/v1/kernels/k1/logs")
    assert log.content == b"100\n200\n0\n"


async def test_logs_are_read_from_positions(serving: Serving) -> None:
    daemon = await serving()
    output = b"one\ntwo\nthree\n"
    command = ["sh", "-c", "printf 'one\ntwo\n'; printf 'three\n'"]
    assert (await daemon.create(kernel_id="k1", command=command)).status == 201
    await daemon.until("k1", "terminated")
    positions = {"": 0, "from=0": 0, "from=5": 5, "from=14&follow=true": 14, "from=99": 14}
    positions |= {f"from={10**30}": 14, "tail=1": 8, "tail=0": 14}
    for query, position in positions.items():
        answer = await daemon.call("GET", f"/v1/kernels/k1/logs?{query}")
        assert (answer.status, answer.headers["Log-Position"]) == (200, str(position)), query
        assert answer.content == output[position:], query
        kernel = answer.headers["Log-Kernel"]
    await daemon.stop()
    await daemon.start()
    same = await daemon.call("GET", "/v1/kernels/k1/logs")
    assert same.headers["Log-Kernel"] == kernel
    assert (await daemon.call("DELETE", "/v1/kernels/k1")).status == 204
    assert (await daemon.create(kernel_id="k1", command=command)).status == 201
    other = await daemon.call("GET", "/v1/kernels/k1/logs")
    assert other.headers["Log-Kernel"] != kernel
    for query in ("from=-1", "from=x", "from=1&tail=1", "from=1&since=1"):
        refused = await daemon.call("GET", f"/v1/kernels/k1/logs?{query}")
        assert (refused.status, refused.json["code"]) == (422, "InvalidRequest"), query


async def test_process_runtime_refuses_container_options(plain: Daemon) -> None:
    await plain.start()
    answer = await plain.create(
        tmpfs=[{"target": "/a"}], shm_size="1m", pids_limit=9999, network="n"
    )
    assert [error["where"] for error in answer.json["errors"]] == [
        "pids_limit", "network", "tmpfs", "shm_size"
    ]  # fmt: skip
    for query in ("since=1", "timestamps=true", "stream=stderr"):
        await plain.running(kernel_id="k1")
        answer = await plain.call("GET", f"/v1/kernels/k1/logs?{query}")
        assert (answer.status, answer.json["code"]) == (422, "InvalidRequest")
        await plain.call("DELETE", "/v1/kernels/k1?timeout=0")


async def test_limit_is_kept_shown_and_named_in_refusals(plain: Daemon) -> None:
    half = "resource = { limits = { cuda = 0.5 } }\n"
    agents = f'[[agents]]\nid = "agent-1"\n{half}[[agents]]\nid = "agent-2"\n{half}'
    await plain.start(agents + gpus(1, mode="shares"))
    await plain.running(slots={"cuda.shares": "0.3"})
    refused = await plain.create(slots={"cuda.shares": "0.3"})
    assert (refused.status, refused.json["code"]) == (409, "InsufficientResource")
    assert (refused.json["reason"], refused.json["free"]) == ("limit", "0.2")
    assert refused.json["detail"].endswith("agent-1 may hold 0.5 of cuda, and holds 0.3")
    agent = await plain.get("/v1/agents/agent-1")
    assert agent["limits"] == {"cuda": {"limit": "0.5", "held": "0.3", "guaranteed": True}}
    assert agent["slots"]["cuda.shares"]["free"] == "0.2"
    await plain.running("agent-2", slots={"cuda.shares": "0.5"})
    metrics = (await plain.call("GET", "/metrics")).content.decode()
    assert 'agentd_agent_limit_held{agent="agent-2",device_name="cuda"} 0.5' in metrics
    smaller = agents.replace("0.5", "0.2")
    await plain.restart(smaller + gpus(1, mode="shares"))
    kernels = await plain.get("/v1/kernels")
    assert [kernel["state"] for kernel in kernels] == ["running", "running"]
    assert (await plain.get("/v1/agents/agent-2"))["slots"]["cuda.shares"]["free"] == "0"
