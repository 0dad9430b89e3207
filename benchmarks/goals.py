"""The goals of speed, and which of them are missed: `make bench`.

    python benchmarks/goals.py [PROGRAM…]

Runs the programs beside it that measure something a goal is set for (all, or those named), prints
the JSON of each, and then each goal with what was measured. Exit status: 0 all are met, 1 one is
missed. Counts that noise cannot touch are tests (`tests/test_ceilings.py`). Times are to be
measured on a quiet machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parent
PROGRAMS = ("create", "claims", "plugins", "scale")


class Goal(msgspec.Struct, frozen=True):
    """The most that a figure of a program's JSON may be."""

    program: str
    path: str
    maximum: float
    description: str


GOALS = (
    Goal("create", "create.ratio.median", 1.05, "a create, in those of the raw engine"),
    Goal("create", "create_8_at_once.ratio.median", 1.05, "eight creates at once, in the same"),
    Goal("create", "own_share.cpu_ms", 8, "processor milliseconds of a create with its delete"),
    Goal("create", "own_share.engine_calls.create", 1, "creates that an engine is asked for"),
    Goal("create", "own_share.engine_calls.inspect", 1, "inspections in a create"),
    Goal("create", "start_to_ready.ratio_to_import", 1.4, "a start, in imports of its libraries"),
    Goal("create", "start_to_ready.ms_per_container", 1.0, "milliseconds per adopted container"),
    Goal("claims", "claim_ms", 3, "milliseconds of a claim, its plugin's answer included"),
    Goal("claims", "free_after_s", 1, "seconds from the end of a process to its free device"),
    Goal("claims", "added_s", 0.1, "seconds that 1,000 claims add to a start"),
    Goal("scale", "cycles.left", 0, "containers left after cycles of create and delete"),
)


def run_program(program: str) -> Any:
    """Run a program; print and return its JSON.

    Each start would compile agentd anew where Python may not write its bytecode.
    """
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, FOLDER / f"{program}.py", "--json"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout
    print(text.strip(), flush=True)
    return json.loads(text)


def figure(content: Any, path: str) -> float:
    """Return the figure at a path of members."""
    for name in path.split("."):
        content = content[name]
    return float(content)


def goals_with_figures(results: dict[str, Any]) -> list[tuple[Goal, float]]:
    """Return each goal of what was measured, and its figure."""
    return [
        (goal, figure(results[goal.program], goal.path))
        for goal in GOALS
        if goal.program in results
    ]


def main() -> None:
    """Measure, judge, and say so."""
    programs = sys.argv[1:] or PROGRAMS
    missed_count = 0
    for goal, value in goals_with_figures({program: run_program(program) for program in programs}):
        is_met = value <= goal.maximum
        missed_count += not is_met
        verdict = "met" if is_met else "MISSED"
        print(f"{verdict:6} {goal.description}: {value:g}, at most {goal.maximum:g} ({goal.path})")
    sys.exit(1 if missed_count else 0)


if __name__ == "__main__":
    main()
