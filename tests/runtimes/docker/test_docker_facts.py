"""Facts of an engine: its failure to tell them is a reason against creates."""

import pytest

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.docker.runtime import DockerRuntime
from contracts.test_runtime import NODE, docker_settings, plan
from runtimes.docker.fake_engine import FakeEngine, says
from support.waiting import until


async def test_failed_info_is_a_reason_until_an_answer(fake_engine: FakeEngine) -> None:
    """Nothing else tells why every create is refused, and none may come to ask again."""
    runtime = DockerRuntime(NODE, docker_settings(fake_engine.path))
    assert runtime.unready_reason == ""
    fake_engine.answer = says(500, b'{"message": "it went wrong"}')
    with pytest.raises(RuntimeUnavailable):
        await runtime.support(plan("true").spec)
    assert "GET /info" in runtime.unready_reason
    assert "it went wrong" in runtime.unready_reason
    fake_engine.answer = says(200, b"{}")
    await until(lambda: runtime.unready_reason, "", within_s=10)
    asked = len(fake_engine.asked)
    await runtime.support(plan("true").spec)
    assert (len(fake_engine.asked), runtime.unready_reason) == (asked, "")
    await runtime.close()
