import asyncio
import os
import signal
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


async def test_a_plugin_s_process_dies_with_the_daemon() -> None:
    """Whatever it is doing: here nothing, as it is stopped."""
    code = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from agentd.pluginhost.process import PluginProcess
async def main():
    made = await PluginProcess.start("x", "support.faulty_plugins:Good", {}, lambda: None)
    await made.call("load", timeout_s=10)
    print(made.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(TESTS), stdout=asyncio.subprocess.PIPE
    )
    assert daemon.stdout is not None
    pid = int(await daemon.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    daemon.kill()
    await daemon.wait()
    async with asyncio.timeout(10):
        while alive(pid):
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
