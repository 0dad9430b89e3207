"""Cases of the docker runtime only: a misbehaving engine, and foreign containers."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from agentd.core.kernel.plan import KernelPlan, kernel_name
from agentd.core.kernel.states import KernelRef
from agentd.errors import InvalidRequest, OutcomeUnknown, RuntimeUnavailable
from agentd.runtimes.docker.engine_errors import EngineAnswerLost
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


def losing(runtime: DockerRuntime, monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """Lose every call whose method and path contain one of these."""
    call = runtime._docker.call

    async def lossy(method: str, path: str, *rest: object, **options: float) -> Any:
        if any(part in f"{method} {path}" for part in paths):
            raise EngineAnswerLost("connection lost")
        return await call(method, path, *rest, **options)

    monkeypatch.setattr(runtime._docker, "call", lossy)


async def test_outcome_is_unknown_when_engine_dies_after_start(
    runtime: DockerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(runtime, monkeypatch, "/json", "DELETE")
    with pytest.raises(OutcomeUnknown):
        await runtime.create(plan("sleep", "1000"), lambda _: None)
    monkeypatch.undo()
    assert (await runtime.find(KernelRef("k1"))) is not None


async def test_a_create_without_an_answer_leaves_the_outcome_unknown(
    runtime: DockerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(runtime, monkeypatch, "/containers/create")
    with pytest.raises(OutcomeUnknown):
        await runtime.create(plan("sleep", "1000"), lambda _: None)


async def test_an_engine_that_was_never_reached_was_asked_nothing(folder) -> None:
    runtime = DockerRuntime(NODE, docker_settings(folder / "none.sock"))
    with pytest.raises(RuntimeUnavailable) as caught:
        await runtime.create(plan("sleep", "1000"), lambda _: None)
    assert not isinstance(caught.value, OutcomeUnknown)
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


async def test_bad_request_of_the_engine_is_an_invalid_request(runtime) -> None:
    bad = of_image("BAD::NAME")
    with pytest.raises(InvalidRequest, match="invalid reference format"):
        await runtime.create(bad, lambda _: None)


async def test_a_renamed_container_is_found_by_its_handle(
    runtime: DockerRuntime, engine: Engine
) -> None:
    created = await runtime.create(plan("sleep", "1000"), lambda _: None)
    engine.call("POST", f"/containers/{created.handle}/rename?name=other")
    assert await runtime.find(KernelRef("k1")) is None
    assert await runtime.find(KernelRef("k1", created.handle)) == created


async def test_a_container_that_runs_is_not_discarded(runtime: DockerRuntime) -> None:
    created = await runtime.create(plan("sleep", "1000"), lambda _: None)
    assert not await runtime.remove(created.ref, unless_alive=True)
    assert await runtime.find(KernelRef("k1")) == created
    await runtime.stop(created.ref, 0)
    assert await runtime.remove(created.ref, unless_alive=True)
    assert await runtime.remove(created.ref, unless_alive=True)


async def test_outcome_is_unknown_after_a_failed_undo(
    runtime: DockerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed session raises RuntimeError, which says nothing of the container."""
    call = runtime._docker.call

    async def closed(method: str, path: str, *rest: object, **options: float) -> Any:
        if path.endswith("/start") or method == "DELETE":
            raise RuntimeError("Session is closed")
        return await call(method, path, *rest, **options)

    monkeypatch.setattr(runtime._docker, "call", closed)
    with pytest.raises(OutcomeUnknown):
        await runtime.create(plan("sleep", "1000"), lambda _: None)
    monkeypatch.undo()
    assert (await runtime.find(KernelRef("k1"))) is not None
