from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.runtimes.process.runtime import ProcessRuntime
from contracts.test_runtime import process_runtime


@pytest.fixture
async def runtime(folder: Path) -> AsyncIterator[ProcessRuntime]:
    """The process runtime on a folder of its own; everything is removed afterwards."""
    (folder / "kernels").mkdir()
    made = process_runtime(folder / "kernels")
    yield made
    for kernel in (await made.list_kernels()).kernels:
        await made.remove(kernel.ref)
    await made.close()
