"""Users and groups of the configuration: each is looked up by itself, a few at once."""

import threading

import pytest

from agentd.concurrency import MAX_SILENT
from agentd.config.settings import Settings
from agentd.daemon.host_names import HostNames


async def test_many_names_take_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without process ids for them is one without kernels."""
    groups = [f"group-{number}" for number in range(3 * MAX_SILENT)]
    counts: list[int] = []
    busy: set[str] = set()

    def find(name: str) -> int:
        busy.add(name)
        counts.append(len(busy))
        threading.Event().wait(0.01)  # others start meanwhile
        busy.remove(name)
        return groups.index(name)

    monkeypatch.setattr("agentd.daemon.host_names.find_group_id", find)
    names = HostNames(Settings())
    await names.refresh(
        Settings.model_validate({"runtime": {"docker": {"allowed-groups": groups}}})
    )
    assert (len(counts), names.group_id("group-7"), names.problems) == (len(groups), 7, {})
    assert max(counts) <= MAX_SILENT
