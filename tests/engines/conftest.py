import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest

from support.engine import Engine
from support.needs import require
from support.slurm_nodes import NodesOf, SlurmNodes

collect_ignore_glob = [] if os.environ.get("AGENTD_TEST_ENGINES") else ["test_*.py"]
"""`make test-engines` sets it: real engines take minutes."""
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
async def slurm(request: pytest.FixtureRequest) -> AsyncIterator[NodesOf]:
    """Give a running cluster by its number of nodes and GPUs; logs and state of a failure stay."""
    require("root", "slurm")
    folder = Path(tempfile.mkdtemp(prefix="agentd-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    made: list[SlurmNodes] = []

    async def give(
        nodes: int = 1, gpu_count: int = 8, engine: Engine | None = None, **options: Any
    ) -> SlurmNodes:
        running = SlurmNodes(folder, nodes, gpu_count, engine)
        made.append(running)
        await running.start(**options)
        return running

    try:
        yield give
    finally:
        if request.node.stash.get(FAILED, False):
            copy = Path(tempfile.mkdtemp(prefix="agentd-slurm-failed-", dir="/tmp"))
            with contextlib.suppress(shutil.Error):  # sockets cannot be copied
                shutil.copytree(folder, copy, symlinks=True, dirs_exist_ok=True)
            print(f"logs and state of {request.node.name}: {copy}")
        for running in made:
            await running.close()
        shutil.rmtree(folder, ignore_errors=True)
