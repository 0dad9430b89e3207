"""`make bench` names each goal that is missed, and fails."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import goals

    return goals


def within(goals: Any) -> dict[str, Any]:
    """Return results in which each figure is just what its goal allows."""
    results: dict[str, Any] = {}
    for goal in goals.GOALS:
        *tables, name = goal.path.split(".")
        at = results.setdefault(goal.program, {})
        for table in tables:
            at = at.setdefault(table, {})
        at[name] = goal.most
    return results


def run(goals: Any, monkeypatch: pytest.MonkeyPatch, results: dict[str, Any]) -> int:
    monkeypatch.setattr(goals, "measured", results.__getitem__)
    monkeypatch.setattr(sys, "argv", ["goals.py", *results])
    with pytest.raises(SystemExit) as end:
        goals.main()
    return int(str(end.value.code))


def test_goals_that_are_met_end_with_zero(goals, monkeypatch, capsys) -> None:
    assert run(goals, monkeypatch, within(goals)) == 0
    assert capsys.readouterr().out.count("met ") == len(goals.GOALS)


@pytest.mark.parametrize("place", range(6))
def test_a_missed_goal_is_named_and_fails(goals, monkeypatch, capsys, place: int) -> None:
    results = json.loads(json.dumps(within(goals)))
    goal = goals.GOALS[place]
    *tables, name = goal.path.split(".")
    at = results[goal.program]
    for table in tables:
        at = at[table]
    at[name] = goal.most + 0.01
    assert run(goals, monkeypatch, results) == 1
    missed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MISSED")]
    assert len(missed) == 1
    assert goal.what in missed[0]


def test_each_goal_is_of_a_program_that_is_there(goals) -> None:
    for goal in goals.GOALS:
        assert goal.program in goals.PROGRAMS
        assert (FOLDER / f"{goal.program}.py").exists()
