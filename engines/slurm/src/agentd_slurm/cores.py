"""The cores near a GPU, as Slurm counts them: socket by socket, whatever their numbers in Linux."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path


def read_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> dict[int, str]:
    """Return the `Cores=` of each NUMA node; nothing on a host with a single one."""
    cores: list[tuple[int, int]] = []
    """Package and NUMA node of each core, in the order of their first threads."""
    for node in sorted(cpus.glob("cpu[0-9]*/node[0-9]*"), key=lambda path: _number(path.parent)):
        topology = node.parent / "topology"
        if not topology.exists():  # offline
            continue
        threads = (topology / "thread_siblings_list").read_text(encoding="ascii")
        if int(threads.replace("-", ",").split(",")[0]) == _number(node.parent):
            package = (topology / "physical_package_id").read_text(encoding="ascii")
            cores.append((int(package), _number(node)))
    groups = list(dict.fromkeys(cores))
    packages = list(dict.fromkeys(package for package, _ in cores))
    cores.sort(key=lambda core: (packages.index(core[0]), groups.index(core)))
    nodes = sorted({node for _, node in cores})
    near = ([index for index, core in enumerate(cores) if core[1] == node] for node in nodes)
    return dict(zip(nodes, map(_ranges, near), strict=True)) if len(nodes) > 1 else {}


def _number(path: Path) -> int:
    return int(path.name.lstrip("cpunode"))


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as `0-3,8-11`."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = ([number for _, number in run] for _, run in runs)
    return ",".join(f"{run[0]}-{run[-1]}" for run in ends)
