"""Cases of the docker runtime only: a misbehaving engine, and foreign containers."""

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from agentd.core.kernel.plan import KernelPlan, kernel_name
from agentd.core.kernel.states import KernelRef
from agentd.errors import CommandNotFound, RuntimeUnavailable
from agentd.runtimes.docker.runtime import DockerRuntime
from contracts.test_runtime import NODE, docker_settings, plan
from support.engine import IMAGE, Engine

pytestmark = pytest.mark.docker


@pytest.fixture
async def runtime(engine: Engine) -> AsyncIterator[DockerRuntime]:
    made = DockerRuntime(NODE, docker_settings(engine.socket))
    yield made
    await made.close()
    engine.clean()


async def test_an_engine_that_was_never_reached_was_asked_nothing(folder) -> None:
    runtime = DockerRuntime(NODE, docker_settings(folder / "none.sock"))
    with pytest.raises(RuntimeUnavailable):
        await runtime.create(plan("sleep", "1000"), lambda _: None)
    await runtime.close()


def of_image(image: str) -> KernelPlan:
    made = plan("sleep", "1000")
    return replace(made, spec=replace(made.spec, image=image))


async def test_a_failed_create_touches_no_container_of_that_name(
    runtime: DockerRuntime, engine: Engine
) -> None:
    name = kernel_name(NODE, "k1")
    made = engine.call("POST", f"/containers/create?name={name}", {"Image": IMAGE, "Cmd": ["true"]})
    for image in ("bad:::name", IMAGE):
        bad = of_image(image)
        with pytest.raises(Exception, match=r"."):
            await runtime.create(bad, lambda _: None)
    assert [c["Id"] for c in engine.containers()] == [made["Id"]]


async def test_a_container_that_runs_is_not_discarded(runtime: DockerRuntime) -> None:
    created = await runtime.create(plan("sleep", "1000"), lambda _: None)
    assert not await runtime.remove(created.ref, unless_alive=True)
    assert await runtime.find(KernelRef("k1")) == created
    await runtime.stop(created.ref, 0)
    assert await runtime.remove(created.ref, unless_alive=True)
    assert await runtime.remove(created.ref, unless_alive=True)


@pytest.mark.parametrize("command", ["webhook", "/opt/hook #1", "no space left on device"])
async def test_a_missing_command_is_one_whatever_its_name(
    runtime: DockerRuntime, command: str
) -> None:
    with pytest.raises(CommandNotFound):
        await runtime.create(plan(command), lambda _: None)
