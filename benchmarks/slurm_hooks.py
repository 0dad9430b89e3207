"""What the hooks cost a job: real Slurm jobs with and without them, side by side.

Two clusters run at the same time, one with hooks, and jobs go to both in turn. The figure is the
time from a job's allocation to its script (`srun` on an idle node, so nothing waits in a queue),
and of a step with 32 tasks to its last task. Needs root and Slurm 22.05.

    python benchmarks/slurm_hooks.py [JOBS]
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.slurm_nodes import SlurmNodes

CASES = {
    "a job with one GPU": ("--gres=gpu:1", "true"),
    "a job without GPUs": ("-n1", "true"),
    "32 tasks with one GPU": ("--gres=gpu:1", "-n32", "--overcommit", "true"),
    "32 tasks without GPUs": ("-n32", "--overcommit", "true"),
}


def run(nodes: SlurmNodes, words: tuple[str, ...]) -> float:
    """Run a job to its end, epilog included, and return the seconds that srun took."""
    begun = time.monotonic()
    subprocess.run(
        nodes.cluster.inside("srun", *words),
        check=True, env=nodes.cluster.environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    took_s = time.monotonic() - begun
    nodes.cluster.until_idle()
    return took_s


async def main(count: int) -> None:
    """Print the medians of each case, in milliseconds."""
    clusters = []
    try:
        for name in ("with", "without"):
            folder = Path(tempfile.mkdtemp(prefix=f"agentd-hooks-{name}-", dir="/tmp"))
            folder.chmod(0o755)
            nodes = SlurmNodes(folder, 1, 2)
            clusters.append(nodes)
            await nodes.start()
        for hook in ("prolog", "epilog", "task-prolog"):
            (clusters[1].folder / hook).write_text("#!/bin/sh\n")
        for case, words in CASES.items():
            took = {nodes: [] for nodes in clusters}
            for _ in range(count):
                for nodes in clusters:
                    took[nodes].append(await asyncio.to_thread(run, nodes, words))
            hooked, plain = (statistics.median(took[nodes]) * 1000 for nodes in clusters)
            print(f"{case}: {hooked:.0f} ms, without hooks {plain:.0f} ms: {hooked - plain:+.0f}")
    finally:
        for nodes in clusters:
            await nodes.close()
            subprocess.run(["rm", "-r", nodes.folder], check=False)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 15))
