"""The docker runtime on engines as people have them; each test names one."""

import asyncio
import re
from collections.abc import Callable

import pytest

from runtimes.field import engine_dialects as dialects
from support.daemon import Daemon
from support.engine_proxy import EngineProxy
from support.waiting import until


@pytest.mark.parametrize(
    ("dialect", "limit"),
    [
        (dialects.has_no_cpuset, "cpu"),
        (dialects.refuses_cpuset, "cpu"),
        (dialects.has_no_memory_limit, "mem"),
        (dialects.has_no_pids_limit, "pids_limit"),
    ],
)
async def test_engine_without_a_limit_runs_kernels(
    field_node: Daemon,
    field_engine: EngineProxy,
    dialect: Callable[[EngineProxy], None],
    limit: str,
) -> None:
    dialect(field_engine)
    await field_node.start()
    kernel = await field_node.running(kernel_id="k1", slots={"cpu": 2, "mem": "1g"})
    assert kernel["not_enforced"] == [limit]
    await field_node.restart()
    kernel = await field_node.get("/v1/kernels/k1")
    assert (kernel["state"], kernel["not_enforced"]) == ("running", [limit])
    assert kernel["degraded"] == []


async def test_engine_that_hides_a_lost_limit_is_refused(
    field_node: Daemon, field_engine: EngineProxy
) -> None:
    dialects.discards_limits(field_engine)
    await field_node.start()
    answer = await field_node.create(slots={"cpu": 1})
    assert (answer.status, answer.json["code"]) == (502, "RuntimeFailure")
    assert "CpusetCpus" in answer.json["detail"]


async def test_image_without_a_platform_runs(field_node: Daemon, field_engine: EngineProxy) -> None:
    dialects.finds_no_image_of_a_platform(field_engine)
    await field_node.start()
    await field_node.running()


async def test_foreign_image_is_named_with_its_platform(
    field_node: Daemon, field_engine: EngineProxy
) -> None:
    dialects.has_a_foreign_image(field_engine)
    await field_node.start()
    answer = await field_node.create(slots={"cuda.device": 1})
    assert (answer.status, answer.json["code"]) == (422, "ImageNotFound")
    assert "linux/s390x" in answer.json["detail"]
    assert await field_node.free("cuda.device") == "1"
    assert await field_node.get("/v1/kernels") == []
    assert (await field_node.create(platform="linux/s390x")).status == 201


async def test_slow_info_is_named_and_its_answer_is_kept(
    field_node: Daemon, field_engine: EngineProxy
) -> None:
    gate = asyncio.Event()
    dialects.answers_info_slowly(field_engine, gate)
    field_node.deadlines = {
        "agentd.runtimes.docker.runtime.INSPECT_TIMEOUT_S": 0.3,
        "agentd.services.conditions.POLL_PAUSE_S": 0.5,
    }
    await field_node.start()
    reason = r"the engine has not answered GET /info within 0\.3 s \(called at \d{4}-.*Z\)"
    for _ in range(2):
        answer = await field_node.create(slots={"cuda.device": 1})
        assert (answer.status, answer.json["code"]) == (503, "RuntimeUnavailable")
        assert re.fullmatch(reason, answer.json["detail"])
        assert int(answer.headers["Retry-After"]) > 0
    runtime = await until(
        lambda: field_node.get("/v1/node"), lambda node: node["runtime"]["reason"]
    )
    assert runtime["runtime"]["state"] == "available"
    assert re.fullmatch(reason, runtime["runtime"]["reason"])
    shown = {"about": "runtime/docker", "remedy": ""} | {
        "reason": f"runtime docker creates no kernels: {runtime['runtime']['reason']}"
    }
    await until(
        lambda: field_node.get("/v1/node"),
        lambda node: any(shown.items() <= item.items() for item in node["conditions"]),
    )
    gate.set()
    await until(lambda: field_node.get("/v1/node"), lambda node: not node["runtime"]["reason"])
    await field_node.running(slots={"cuda.device": 1})
    assert sum("/info" in line for line in field_engine.asked) == 1


async def test_failed_info_is_asked_for_again(
    field_node: Daemon, field_engine: EngineProxy
) -> None:
    """Without a create, too: a scheduler sends none to a node that says this."""
    field_engine.rule(dialects.INFO, field_engine.fail, always=True)
    await field_node.start()
    answer = await field_node.create()
    assert (answer.status, answer.json["code"]) == (503, "RuntimeUnavailable")
    node = await until(lambda: field_node.get("/v1/node"), lambda node: node["runtime"]["reason"])
    assert "GET /info" in node["runtime"]["reason"]
    field_engine.clear()
    await until(lambda: field_node.get("/v1/node"), lambda node: not node["runtime"]["reason"])
    await field_node.running()


@pytest.mark.parametrize(
    "text",
    [
        "network team-x not found",
        "unable to find network with name or ID team-x: network not found",
    ],
)
async def test_network_that_is_missing_is_no_missing_image(
    field_node: Daemon, field_engine: EngineProxy, text: str
) -> None:
    """Pulling the image would not help, and its user cannot mend it."""
    await field_node.start()
    field_engine.rule(dialects.CREATE, dialects.answers({"message": text}, 404))
    answer = await field_node.create()
    assert (answer.status, answer.json["code"]) == (502, "RuntimeFailure")
    assert text in answer.json["detail"]
    assert not any("/images/create" in line for line in field_engine.asked)
