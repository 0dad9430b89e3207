"""Errors: what a refusal holds at most, and what of it others may read."""

from agentd.errors import (
    MAX_DETAIL,
    MAX_PROBLEMS,
    MAX_WHERE,
    MAX_WHY,
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    Problem,
    RuntimeFailure,
    UnsupportedResource,
)


def test_refusal_lists_the_first_problems_in_bounded_texts() -> None:
    built = 0

    def problems():
        nonlocal built
        for number in range(10**6):
            built += 1
            yield Problem(f"{number}" * 1000, "w" * 10**5)

    refusal = InvalidRequest(problems())
    assert built == MAX_PROBLEMS + 1
    assert len(refusal.problems) == MAX_PROBLEMS
    assert {len(problem.where) for problem in refusal.problems} == {MAX_WHERE}
    assert {len(problem.why) for problem in refusal.problems} == {MAX_WHY}
    assert len(str(refusal)) == len(refusal.public_text()) == MAX_DETAIL


def test_refusal_says_whether_there_is_more() -> None:
    one = Problem("image", "is unknown")
    assert str(InvalidRequest([one] * MAX_PROBLEMS)).endswith("image: is unknown")
    assert str(InvalidRequest([one] * (MAX_PROBLEMS + 1))).endswith("; and more")


def test_published_text_names_nothing_of_private_members() -> None:
    cases: list[tuple[AgentdError, str]] = [
        (InvalidRequest([Problem("env.SECRET", "is invalid")]), "env: is invalid"),
        (InvalidRequest([Problem("labels.SECRET", "is invalid")]), "labels: is invalid"),
        (InvalidRequest([Problem("command.0", "is invalid")]), "command: is invalid"),
        (InvalidRequest([Problem("SECRET", "is there twice", is_private=True)]), "is there twice"),
        (InvalidRequest([Problem("image", "is invalid")]), "image: is invalid"),
        (
            CommandNotFound("command 'SECRET': not found"),
            "the command does not exist or is not executable",
        ),
        (RuntimeFailure('engine: runc: exec: "SECRET": text file busy'), "engine: runc:"),
        (RuntimeFailure("engine: no space left on device"), "engine: no space left on device"),
    ]
    for error, expected in cases:
        assert error.public_text() == expected


def test_unknown_slots_are_all_listed_and_the_first_named() -> None:
    names = [f"{number:03}" + "x" * 250 for number in range(256)]
    refusal = UnsupportedResource(names, ["cpu"], {})
    assert refusal.facts()["slots"] == names
    assert len(str(refusal)) < (MAX_PROBLEMS + 2) * (MAX_WHERE + 2)
    assert ", and more (this node has: cpu)" in str(refusal)
