import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.engine import Engine
from support.needs import require
from support.slurm_nodes import NodesOf, SlurmNodes

collect_ignore_glob = [] if os.environ.get("AGENTD_TEST_ENGINES") else ["test_*.py"]
"""`make test-engines` sets it: real engines take minutes."""


@pytest.fixture
async def slurm() -> AsyncIterator[NodesOf]:
    """Give a running cluster by its number of nodes and GPUs."""
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
        for running in made:
            await running.close()
        shutil.rmtree(folder, ignore_errors=True)
