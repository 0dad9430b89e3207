"""An engine that misbehaves, by a proxy before a real one: no orphan, nothing given twice."""

import asyncio
import random
import signal

import pytest
from aiohttp import web

from end_to_end.conftest import ONE_GPU
from support.daemon import Daemon
from support.engine import Engine
from support.engine_proxy import EngineProxy
from support.waiting import until

pytestmark = pytest.mark.docker
ASK = {"kernel_id": "k1", "slots": {"cuda.device": 1}}
SILENCE = {"agentd.runtimes.docker.docker_streams.SILENCE_S": 1.0}


async def settled(daemon: Daemon, engine: Engine, *, containers: int, free: str) -> None:
    """Wait until the engine has so many containers, and the node so many free GPUs."""
    await until(
        lambda: daemon.free("cuda.device"),
        lambda value: (len(engine.containers()), value) == (containers, free),
    )


@pytest.mark.parametrize(
    ("pattern", "how"),
    [
        ("POST .*/containers/create", "lose"),
        ("POST .*/containers/create", "refuse"),
        ("POST .*/containers/create", "fail"),
        ("POST .*/containers/create", "nonsense"),
        ("POST .*/start", "lose"),
        ("POST .*/start", "refuse"),
        ("POST .*/start", "fail"),
        ("GET .*/containers/[0-9a-f]{64}/json", "fail"),
        ("GET .*/containers/[0-9a-f]{64}/json", "nonsense"),
    ],
)
async def test_a_create_that_goes_wrong_leaves_nothing(
    one_gpu, engine: Engine, pattern, how
) -> None:
    daemon, proxy = one_gpu
    proxy.rule(pattern, getattr(proxy, how))
    answer = await daemon.create(**ASK)
    assert answer.status in (502, 503), answer.content
    await settled(daemon, engine, containers=0, free="1")
    await daemon.runtime_is("available")
    assert await daemon.get("/v1/kernels") == []
    again = await daemon.running(**ASK)
    assert again["state"] == "running"


async def test_prune_between_create_and_start_frees_the_share(one_gpu, engine: Engine) -> None:
    """As a nightly `docker system prune` does; the engine may still be removing it."""
    daemon, proxy = one_gpu

    async def prune(request: web.Request, body: bytes) -> web.StreamResponse:
        await asyncio.to_thread(engine.call, "POST", "/containers/prune")
        return await proxy.forward(request, body)

    async def still_removing(request: web.Request, body: bytes) -> web.StreamResponse:
        reason = "removal of container 7f1d3f is already in progress"
        return web.json_response({"message": reason}, status=409)

    for _ in range(2):
        proxy.rule("POST .*/start", prune)
        answer = await daemon.create(**ASK)
        assert (answer.status, answer.json["code"]) == (503, "RuntimeUnavailable")
        assert answer.json["detail"] == "its container was removed outside of agentd"
        assert await daemon.free("cuda.device") == "1"
        proxy.rule("DELETE .*/containers/", still_removing)
    proxy.clear()
    assert (await daemon.running(**ASK))["state"] == "running"


async def test_remove_keeps_the_share_until_confirmed(one_gpu, engine: Engine) -> None:
    """The start fails, and so does what would undo the create."""
    daemon, proxy = one_gpu
    proxy.rule("POST .*/start", proxy.fail)
    proxy.rule("DELETE .*/containers/", proxy.refuse, always=True)
    proxy.rule("GET .*/containers/json", proxy.fail, always=True)
    answer = await daemon.create(**ASK)
    assert (answer.status, answer.json["code"]) == (503, "OutcomeUnknown")
    assert (len(engine.containers()), await daemon.free("cuda.device")) == (1, "0")
    proxy.clear()
    await settled(daemon, engine, containers=0, free="1")


async def killed_in_its_create(
    daemon: Daemon, proxy: EngineProxy, *, before: bool
) -> asyncio.Event:
    """Kill agentd while the engine has its create; return the gate that lets the engine go on."""
    gate = asyncio.Event()
    proxy.rule("POST .*/containers/create", proxy.stall(gate, before=before))
    creating = asyncio.create_task(daemon.create(**ASK))
    await proxy.until_asked("containers/create")
    if not before:
        await settled(daemon, daemon.test_engine, containers=1, free="0")
    await daemon.stop(signal.SIGKILL)
    creating.cancel()
    return gate


@pytest.mark.parametrize("before", [True, False])
async def test_an_engine_that_finishes_a_create_after_agentd_died(
    one_gpu, engine: Engine, before: bool
) -> None:
    daemon, proxy = one_gpu
    gate = await killed_in_its_create(daemon, proxy, before=before)
    daemon.deadlines = {}  # the grace is to last for what follows
    await daemon.start(ONE_GPU)
    if before:
        assert await daemon.free("cuda.device") == "0"
        assert (await daemon.get("/v1/kernels/k1"))["state"] == "creating"
        assert (await daemon.create(kernel_id="k2", slots={"cuda.device": 1})).status == 409
    gate.set()
    await settled(daemon, engine, containers=0, free="1")
    assert await daemon.get("/v1/kernels") == []


async def test_a_create_that_arrives_after_its_grace_is_removed_too(
    one_gpu, engine: Engine
) -> None:
    daemon, proxy = one_gpu
    gate = await killed_in_its_create(daemon, proxy, before=True)
    await daemon.start(ONE_GPU)
    await settled(daemon, engine, containers=0, free="1")  # the grace has passed
    second = await daemon.running(kernel_id="k2", slots={"cuda.device": 1})
    gate.set()
    await daemon.until_logged("kernel.orphan_removed")
    assert [c["Id"] for c in engine.containers()] == [second["container_id"]]


async def test_unreachable_engine_is_a_runtime_state(one_gpu, engine: Engine) -> None:
    daemon, proxy = one_gpu
    kernel = await daemon.trapping("trap 'exit 7' USR1", **ASK)
    await proxy.stop()
    await daemon.runtime_is("unavailable")
    refused = await daemon.create(kernel_id="k2")
    assert (refused.status, refused.json["code"]) == (503, "RuntimeUnavailable")
    assert "Retry-After" in refused.headers
    for call in (("POST", "/v1/kernels/k1/stop"), ("DELETE", "/v1/kernels/k1")):
        answer = await daemon.call(*call)
        assert (answer.status, answer.json["code"]) == (503, "RuntimeUnavailable")
    engine.call("POST", f"/containers/{kernel['container_id']}/kill?signal=USR1")
    assert (await daemon.get("/v1/kernels/k1"))["state"] == "running"
    assert await daemon.free("cuda.device") == "0"
    await proxy.start()
    ended = await daemon.until("k1", "terminated")
    assert (ended["exit_code"], ended["oom_killed"]) == (7, False)
    await settled(daemon, engine, containers=1, free="1")


@pytest.mark.parametrize("how", ["fail", "nonsense", "refuse"])
async def test_a_list_that_goes_wrong_loses_no_kernel(one_gpu, engine: Engine, how: str) -> None:
    daemon, proxy = one_gpu
    kernel = await daemon.running(**ASK)
    proxy.rule("GET .*/containers/json", getattr(proxy, how), always=True)
    await proxy.cut()
    await daemon.runtime_is("unavailable")
    assert (await daemon.get("/v1/kernels/k1"))["state"] == "running"
    assert await daemon.free("cuda.device") == "0"
    proxy.clear()
    await daemon.runtime_is("available")
    assert (await daemon.get("/v1/kernels/k1"))["container_id"] == kernel["container_id"]


async def test_events_during_a_cut_stream_are_observed(one_gpu, engine: Engine) -> None:
    daemon, proxy = one_gpu
    kernel = await daemon.running(**ASK)
    gate = asyncio.Event()
    proxy.rule("GET .*/events", proxy.stall(gate, before=True))
    await proxy.cut()
    engine.call("POST", f"/containers/{kernel['container_id']}/kill")
    gate.set()
    ended = await daemon.until("k1", "terminated")
    assert ended["exit_code"] == 137
    assert ended["oom_killed"] is False


async def test_events_twice_and_out_of_order_change_nothing(one_gpu, engine: Engine) -> None:
    """Held back, each sent twice, in a random order."""
    daemon, proxy = one_gpu
    held: list[bytes] = []
    shuffle = random.Random(7).shuffle

    def mixed(line: bytes) -> list[bytes]:
        held.extend((line, line))
        if len(held) < 8:
            return []
        shuffle(held)
        sent, held[:] = held[:], []
        return sent

    proxy.event_filter = mixed
    await proxy.cut()
    await daemon.runtime_is("unavailable")
    await daemon.runtime_is("available")
    kernel = await daemon.running(**ASK)
    for action in ("pause", "unpause", "restart?t=0", "pause", "unpause"):
        engine.call("POST", f"/containers/{kernel['container_id']}/{action}")
    assert (await daemon.until("k1", "running"))["container_id"] == kernel["container_id"]
    engine.call("POST", f"/containers/{kernel['container_id']}/kill")
    proxy.event_filter = lambda line: [line]
    engine.call("POST", f"/containers/{kernel['container_id']}/start")
    engine.call("POST", f"/containers/{kernel['container_id']}/kill")
    await daemon.until("k1", "terminated")
    await settled(daemon, engine, containers=1, free="1")


async def test_a_delete_without_an_answer_can_be_asked_again(one_gpu, engine: Engine) -> None:
    daemon, proxy = one_gpu
    await daemon.running(**ASK)
    proxy.rule("DELETE .*/containers/", proxy.lose)
    answer = await daemon.call("DELETE", "/v1/kernels/k1?timeout=0")
    assert answer.status in (204, 503)  # it may have been asked again already
    await settled(daemon, engine, containers=0, free="1")
    again = await daemon.call("DELETE", "/v1/kernels/k1?timeout=0")
    assert again.status in (204, 404)
    assert await daemon.get("/v1/kernels") == []


async def test_slow_engine_delays_no_other_runtime(one_gpu, engine: Engine) -> None:
    daemon, proxy = one_gpu
    gate = asyncio.Event()
    proxy.rule("POST .*/start", proxy.stall(gate, before=True))
    creating = asyncio.create_task(daemon.create(**ASK))
    await proxy.until_asked("/start")
    assert (await daemon.get("/v1/kernels/k1"))["state"] == "creating"
    await daemon.running(kernel_id="k2")
    await daemon.call("DELETE", "/v1/kernels/k2?timeout=0")
    gate.set()
    assert (await creating).status == 201


async def test_an_engine_is_asked_for_no_more_than_is_needed(one_gpu, engine: Engine) -> None:
    daemon, proxy = one_gpu
    other = await daemon.running(kernel_id="other")
    proxy.asked.clear()
    kernel = await daemon.running(**ASK)
    engine.call("POST", f"/containers/{other['container_id']}/kill")
    await daemon.until("other", "terminated")  # and so the events of the create were heard
    asked = [line for line in proxy.asked if other["container_id"] not in line]
    assert len(asked) == 3, asked
    assert "/containers/create?" in asked[0]
    assert asked[1].endswith(f"/containers/{kernel['container_id']}/start")
    assert asked[2].endswith(f"/containers/{kernel['container_id']}/json")


async def test_a_start_by_hand_is_never_taken_for_our_own(one_gpu, engine: Engine) -> None:
    """Creates whose events nobody hears must hide no later one."""
    daemon, proxy = one_gpu
    gate = asyncio.Event()
    proxy.rule("GET .*/events", proxy.stall(gate, before=True))
    await proxy.cut()
    await daemon.runtime_is("unavailable")
    assert (await daemon.create(**ASK)).status == 503  # nobody would hear of it
    gate.set()
    await daemon.runtime_is("available")
    kernel = await daemon.running(**ASK)
    for _ in range(2):
        engine.call("POST", f"/containers/{kernel['container_id']}/kill")
        await daemon.until("k1", "terminated")
        engine.call("POST", f"/containers/{kernel['container_id']}/start")
        await daemon.until("k1", "running")
    assert await daemon.free("cuda.device") == "0"


async def test_one_inspect_that_hangs_holds_up_no_other_kernel(one_gpu, engine: Engine) -> None:
    daemon, proxy = one_gpu
    stuck = await daemon.running(kernel_id="stuck")
    other = await daemon.running(**ASK)
    gate = asyncio.Event()
    pattern = f"GET .*/containers/{stuck['container_id']}/json"
    proxy.rule(pattern, proxy.stall(gate, before=True), always=True)
    for kernel in (stuck, other):
        engine.call("POST", f"/containers/{kernel['container_id']}/kill")
    await daemon.until("k1", "terminated")
    await daemon.runtime_is("available")
    assert await daemon.free("cuda.device") == "1"
    gate.set()
    await until(
        lambda: daemon.get("/v1/kernels/stuck"),
        lambda value: value["exit_code"] == 137,
        within_s=40,
    )


async def test_an_engine_that_is_frozen_is_not_available(one_gpu) -> None:
    """It accepts connections and answers nothing, as one that is stopped (SIGSTOP) does."""
    daemon, proxy = one_gpu
    daemon.deadlines |= SILENCE
    await daemon.restart(ONE_GPU)
    gate = asyncio.Event()
    proxy.rule("GET .*/version", proxy.stall(gate, before=True), always=True)
    await daemon.runtime_is("unavailable", within_s=40)
    assert "frozen" in (await daemon.get("/v1/node"))["runtime"]["reason"]
    gate.set()
    proxy.clear()
    await daemon.runtime_is("available")
