"""Container options of a request, and the defaults of every container."""

import json
import os
import signal
import socket
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest

from agentd.client.asynchronous import AsyncClient
from end_to_end.containers import inspected, printed
from support.daemon import AGENTS, BASE, Answer, Daemon, gpus
from support.daemon_pool import Serving
from support.engine import Engine
from support.engine_proxy import EngineProxy
from support.waiting import until

pytestmark = pytest.mark.docker


async def test_defaults_are_safe_and_seen_from_inside(dockered: Daemon, engine: Engine) -> None:
    await dockered.start()
    script = "grep -E 'CapBnd|NoNewPrivs|Cpus_allowed_list' /proc/self/status; id -u"
    status = dict(line.split(":\t") for line in (await printed(dockered, script)).splitlines()[:-1])
    kept = {0, 1, 3, 4, 5, 6, 7, 10, 18}  # linux/capability.h: CHOWN … SETUID, NET_BIND_SERVICE, …
    assert {bit for bit in range(64) if int(status["CapBnd"], 16) >> bit & 1} == kept
    assert status["NoNewPrivs"] == "1"
    kernel = await dockered.running(kernel_id="k1")
    host = inspected(engine, kernel)["HostConfig"]
    assert not host["Privileged"]
    assert (host["PidMode"], host["IpcMode"], host["UTSMode"]) == ("", "private", "")
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["PidsLimit"] == 4096
    assert host["LogConfig"] == {
        "Type": "local", "Config": {"max-size": str(20 << 20), "max-file": "5", "compress": "true"}
    }  # fmt: skip


async def test_the_operator_widens_and_a_request_cannot(serving_docker: Serving) -> None:
    dockered = await serving_docker(
        'capabilities = ["CHOWN", "NET_RAW"]\npids-limit = 99\n' + AGENTS
    )
    assert "CapBnd:\t0000000000002001" in await printed(dockered, "cat /proc/self/status")
    for member in ("privileged", "cap_add", "capabilities", "security_opt", "pid_mode"):
        answer = await dockered.create(**{member: True})
        assert (answer.status, answer.json["code"]) == (422, "InvalidRequest")
        assert answer.json["errors"][0]["where"] == member
    answer = await dockered.create(pids_limit=100)
    assert answer.json["errors"] == [{"where": "pids_limit", "why": "100 exceeds the limit of 99"}]


async def test_memory_folders_and_limits_are_as_asked(
    serving_docker: Serving, engine: Engine
) -> None:
    dockered = await serving_docker()
    script = "df -k /scratch /dev/shm | grep -v Filesystem; ulimit -n; ulimit -Hn; ulimit -c"
    lines = (
        await printed(
            dockered,
            script,
            tmpfs=[{"target": "/scratch", "size": "3m"}],
            shm_size="5m",
            ulimits={"nofile": {"soft": 100, "hard": 200}, "core": 0},
            pids_limit=20,
        )
    ).splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["3072", "5120"]
    assert lines[2:] == ["100", "200", "0"]
    forks = "sh -c 'sleep 0 & sleep 0 & sleep 0 & sleep 0' 2>&1; true"
    assert "can't fork" in await printed(dockered, forks, pids_limit=2)


async def test_an_image_gets_no_devices_past_what_was_allocated(
    serving_docker: Serving, engine: Engine
) -> None:
    """Also where no plugin knows the variable: the engine's hooks would obey the image."""
    greedy = "ENV%20NVIDIA_VISIBLE_DEVICES=all%20HABANA_VISIBLE_DEVICES=all"
    engine.import_image("greedy:1", f"&changes={greedy}")
    dockered = await serving_docker(AGENTS)
    env = await printed(dockered, "env", image="greedy:1")
    assert "NVIDIA_VISIBLE_DEVICES=void" in env
    assert "HABANA_VISIBLE_DEVICES=void" in env


@pytest.mark.parametrize("drop", ["Devices", "CpusetCpus", "Memory"])
async def test_kernel_never_runs_without_its_devices(
    proxied: tuple[Daemon, EngineProxy], engine: Engine, folder: Path, drop: str
) -> None:
    daemon, proxy = proxied
    file = folder / "acc0"
    os.mknod(file, 0o666 | 0o020000, os.makedev(1, 3))
    table = f'[plugins.acc]\nplugin = "generic"\ndevices = ["{folder}/acc*"]\n'
    await daemon.start(AGENTS + table)
    proxy.rule("POST .*/containers/create", proxy.change(lambda body: strip(body, drop)))
    answer = await daemon.create(slots={"acc.device": 1, "cpu": 1, "mem": "64m"})
    assert (answer.status, answer.json["code"]) == (502, "RuntimeFailure")
    assert "the engine " in answer.json["detail"], answer.json
    assert engine.containers() == []
    assert await daemon.free("acc.device") == "1"


def strip(body: dict, member: str) -> None:
    body["HostConfig"].pop(member)
    if member == "Memory":
        body["HostConfig"].pop("MemorySwap")


async def test_create_is_refused_when_engine_info_is_unavailable(
    proxied: tuple[Daemon, EngineProxy], engine: Engine
) -> None:
    daemon, proxy = proxied
    proxy.rule("GET .*/info", proxy.fail, always=True)
    await daemon.start()
    answer = await daemon.create(slots={"cuda.device": 1})
    assert (answer.status, answer.json["code"]) == (503, "RuntimeUnavailable")
    assert engine.containers() == []
    proxy.clear()
    assert (await daemon.create(slots={"cuda.device": 1})).status == 201


async def test_ports_are_handed_out_given_back_and_listed(dockered: Daemon, engine: Engine) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        free = next(p for p in range(20_000, 30_000) if is_free(p) and is_free(p + 1))
        ports = f'publish-ports = "{free}-{free + 1}"\n'
        await dockered.start(ports + AGENTS)
        first = await dockered.running(kernel_id="k1", ports=[{"container": 80}])
        assert first["ports"] == [
            {"container": 80, "host": free, "protocol": "tcp", "address": "127.0.0.1"}
        ]
        assert first["not_enforced"] == ["ports"]  # the tests' network publishes none
        bound = inspected(engine, first)["HostConfig"]["PortBindings"]
        assert bound == {"80/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(free)}]}
        second = await dockered.running(
            kernel_id="k2", ports=[{"container": 80}, {"container": 53, "protocol": "udp"}]
        )
        assert [port["host"] for port in second["ports"]] == [free + 1, free]
        none = await dockered.create(ports=[{"container": 80}])
        assert (none.status, none.json["code"], none.json["slot"]) == (
            409, "InsufficientResource", "ports"
        )  # fmt: skip
        named = await dockered.create(ports=[{"container": 80, "host": free}])
        assert "held by kernel k1" in json.dumps(named.json["explain"])
        outside = await dockered.create(ports=[{"container": 80, "host": taken}])
        assert outside.json["errors"][0]["where"] == "ports.0.host"
        await dockered.restart()
        assert (await dockered.get("/v1/kernels/k2"))["ports"] == second["ports"]
        assert (await dockered.create(ports=[{"container": 80, "host": free}])).status == 409
        await dockered.call("DELETE", "/v1/kernels/k1?timeout=0")
        again = await dockered.running(kernel_id="k3", ports=[{"container": 80}])
        assert again["ports"][0]["host"] == free
        await dockered.restart(f'publish-ports = "{taken}-{taken}"\n' + AGENTS)
        busy = await dockered.create(ports=[{"container": 80, "host": taken}])
        assert "in use outside agentd" not in busy.json["detail"]
        assert busy.json["slot"] == "ports"


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def test_logs_by_stream_time_and_tail(serving_docker: Serving) -> None:
    dockered = await serving_docker()
    script = "echo one; echo two >&2; sleep 0.05; echo three"
    await dockered.running(kernel_id="k1", command=["sh", "-c", script])
    ended = await dockered.until("k1", "terminated")

    async def log(query: str) -> bytes:
        answer = await dockered.call("GET", f"/v1/kernels/k1/logs?{query}")
        assert answer.status == 200, answer.content
        return answer.content

    assert await log("stream=stdout") == b"one\nthree\n"
    assert await log("stream=stderr") == b"two\n"
    assert await log("tail=1") == b"three\n"
    stamped = (await log("timestamps=true&stream=stdout")).decode().splitlines()
    assert [line.split(" ", 1)[1] for line in stamped] == ["one", "three"]
    assert await log(f"since={stamped[1].split(' ')[0]}") == b"three\n"
    assert await log(f"since={ended['finished_at'].replace('2026', '2030')}") == b""
    for query in ("since=later", "stream=both,none", "tail=-1", "timestamps=maybe"):
        assert (await dockered.call("GET", f"/v1/kernels/k1/logs?{query}")).status == 422


async def test_log_goes_on_after_a_drop_and_a_kill(dockered: Daemon, engine: Engine) -> None:
    """The engine has dropped what a follower of a killed daemon has read, and more."""
    settings = 'stop-timeout = 1\nlog-max-size = "128k"\nlog-max-files = 3'
    dockered.configure(AGENTS, BASE.replace("stop-timeout = 1", settings))
    await dockered.start()
    wait = "while [ ! -e /go ]; do sleep 0.05; done; rm /go"
    slowly = "for i in $(seq 1 29); do seq ${i}000 ${i}999; sleep 0.2; done"
    script = f"seq 1 999; {wait}; {slowly}; {wait}; seq 30000 30999; sleep 1000"
    kernel = await dockered.running(kernel_id="k1", command=["sh", "-c", script])
    output = "".join(f"{n}\n" for n in range(1, 31000)).encode()

    async def log(query: str = "") -> Answer:
        return await dockered.call("GET", f"/v1/kernels/k1/logs?{query}")

    def go_on() -> None:
        body = {"Cmd": ["touch", "/go"]}
        made = engine.call("POST", f"/containers/{kernel['container_id']}/exec", body)
        engine.call("POST", f"/exec/{made['Id']}/start", {"Detach": True}, raw=True)

    first = await until(log, lambda answer: answer.content.endswith(b"\n999\n"))
    assert (first.headers["Log-Position"], first.content) == ("0", output[: len(first.content)])
    read = b""
    async with AsyncClient(dockered.folder / "agentd.sock") as client:
        go_on()
        async with aclosing(client.logs("k1", follow=True)) as follower:
            while not read.endswith(b"\n29999\n"):
                read += await anext(follower)
    assert read == output[: len(read)]
    await dockered.stop(signal.SIGKILL)
    go_on()
    await dockered.start()
    rest = await until(
        lambda: log(f"from={len(read)}"), lambda answer: answer.content.endswith(b"\n30999\n")
    )
    assert (rest.headers["Log-Position"], rest.content) == (str(len(read)), output[len(read) :])
    cut = await log("from=100")
    position = int(cut.headers["Log-Position"])
    assert 100 < position < len(read)
    assert cut.content == output[position:]
    last = await log("tail=1")
    assert (last.headers["Log-Position"], last.content) == (str(len(output) - 6), b"30999\n")
    await dockered.call("DELETE", "/v1/kernels/k1?timeout=0")
    assert not list((dockered.folder / "state" / "docker").glob("*positions*"))


async def test_unread_log_tells_that_its_head_was_dropped(dockered: Daemon, engine: Engine) -> None:
    settings = 'stop-timeout = 1\nlog-max-size = "16k"\nlog-max-files = 2'
    dockered.configure(AGENTS, BASE.replace("stop-timeout = 1", settings))
    await dockered.start()
    await dockered.running(kernel_id="k1", command=["sh", "-c", "seq 1 9999; sleep 1000"])
    answer = await until(
        lambda: dockered.call("GET", "/v1/kernels/k1/logs"),
        lambda answer: answer.content.endswith(b"\n9999\n"),
    )
    assert not answer.content.startswith(b"1\n")
    assert int(answer.headers["Log-Position"]) > 0


async def test_a_container_renamed_by_hand_stays_ours(dockered: Daemon, engine: Engine) -> None:
    await dockered.start()
    kernel = await dockered.running(kernel_id="k1", slots={"cuda.device": 1})
    engine.call("POST", f"/containers/{kernel['container_id']}/rename?name=renamed")
    await dockered.running(kernel_id="k2")  # and so the rename was heard of
    assert (await dockered.get("/v1/kernels/k1"))["state"] == "running"
    await dockered.call("DELETE", "/v1/kernels/k2?timeout=0")
    await dockered.restart()
    after = await dockered.get("/v1/kernels/k1")
    assert (after["state"], after["container_id"]) == ("running", kernel["container_id"])
    assert await dockered.free("cuda.device") == "1"
    await dockered.call("DELETE", "/v1/kernels/k1?timeout=0")
    assert engine.containers() == []


async def test_labels_inherited_from_an_image_make_no_kernel(
    dockered: Daemon, engine: Engine
) -> None:
    await dockered.start()
    kernel = await dockered.running(kernel_id="k1", slots={"cuda.device": 1})
    engine.call("POST", f"/commit?container={kernel['container_id']}&repo=child&tag=1")
    body = {"Image": "child:1", "Cmd": ["sleep", "1000"], "HostConfig": {"NetworkMode": "none"}}
    other = engine.call("POST", "/containers/create?name=not-ours", body)["Id"]
    engine.call("POST", f"/containers/{other}/start")
    engine.call("POST", f"/containers/{kernel['container_id']}/pause")
    await dockered.until("k1", "paused")  # and so the events before were heard
    assert [k["kernel_id"] for k in await dockered.get("/v1/kernels")] == ["k1"]
    await dockered.restart()
    assert [k["kernel_id"] for k in await dockered.get("/v1/kernels")] == ["k1"]
    assert await dockered.free("cuda.device") == "1"
    await dockered.call("DELETE", "/v1/kernels/k1?timeout=0")
    second = await dockered.running(kernel_id="k2", image="child:1", slots={"cuda.device": 1})
    await dockered.restart(AGENTS + gpus())
    assert [k["kernel_id"] for k in await dockered.get("/v1/kernels")] == ["k2"]
    assert (await dockered.get("/v1/kernels/k2"))["container_id"] == second["container_id"]
    assert other in [container["Id"] for container in engine.containers()]
    engine.call("DELETE", f"/containers/{other}?force=1", raw=True)


async def test_a_restart_by_hand_is_told_with_its_own_times(
    dockered: Daemon, engine: Engine
) -> None:
    await dockered.start()
    kernel = await dockered.running(kernel_id="k1", command=["sleep", "1000"])
    engine.call("POST", f"/containers/{kernel['container_id']}/restart?t=0")
    await until(
        lambda: dockered.get("/v1/kernels/k1"),
        lambda value: value["started_at"] != kernel["started_at"],
        within_s=10,
    )


async def test_followers_of_a_quiet_log_leave_nothing_behind(dockered: Daemon) -> None:
    await dockered.start()
    await dockered.running(kernel_id="k1")
    assert dockered.process is not None
    descriptors = Path(f"/proc/{dockered.process.pid}/fd")
    await dockered.call("GET", "/livez")
    before = len([*descriptors.iterdir()])
    with ExitStack() as stack:
        followers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(5)]
        for caller in followers:
            caller.connect(str(dockered.folder / "agentd.sock"))
            caller.sendall(b"GET /v1/kernels/k1/logs?follow=true HTTP/1.1\r\nHost: x\r\n\r\n")
        for caller in followers:
            assert caller.recv(64).startswith(b"HTTP/1.1 200")
    await until(lambda: len([*descriptors.iterdir()]) <= before)


async def test_folders_that_allow_setuid_are_warnings(dockered: Daemon, folder: Path) -> None:
    (folder / "data").mkdir()
    await dockered.start(AGENTS)
    assert not [w for w in (await dockered.get("/v1/node"))["warnings"] if "nosuid" in w]
    allowed = f'stop-timeout = 1\nallowed-mounts = ["{folder}/data"]'
    await dockered.stop()
    dockered.configure(AGENTS, BASE.replace("stop-timeout = 1", allowed))
    await dockered.start()
    (warning,) = [w for w in (await dockered.get("/v1/node"))["warnings"] if "nosuid" in w]
    assert str(folder / "data") in warning
