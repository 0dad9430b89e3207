"""Events that our own calls cause are known as such, and hide no others."""

import pytest

from agentd.runtimes.docker.streams import ContainerEvent, OwnEvents


def event(action: str, container: str = "c1") -> ContainerEvent:
    return ContainerEvent(action, container, "agentd-x-k1", "k1")


def listening() -> OwnEvents:
    own = OwnEvents()
    own.listen()
    return own


def test_end_and_removal_that_were_asked_for_are_own_once() -> None:
    own = listening()
    for action in ("die", "destroy"):
        with own.ending(action, "c1"):
            assert own.is_own(event(action))
        assert not own.is_own(event(action))


def test_end_that_comes_after_the_answer_is_own() -> None:
    own = listening()
    with own.ending("die", "c1"):
        pass
    assert not own.is_own(event("die", "c2"))
    assert own.is_own(event("die"))


def test_end_is_told_where_the_call_failed() -> None:
    own = listening()
    with pytest.raises(OSError, match="lost"), own.ending("die", "c1"):
        raise OSError("lost")
    assert not own.is_own(event("die"))


def test_end_of_a_run_that_began_since_is_told() -> None:
    own = listening()
    with own.ending("die", "c1"):
        pass
    assert not own.is_own(event("start"))
    assert not own.is_own(event("die"))


def test_start_of_a_create_does_not_hide_its_end() -> None:
    own = listening()
    own.expect("agentd-x-k1")
    with own.ending("die", "c1"):
        pass
    assert own.is_own(event("start"))
    assert own.is_own(event("die"))


def test_nothing_is_expected_by_one_who_does_not_listen() -> None:
    own = OwnEvents()
    with own.ending("die", "c1"):
        pass
    own.listen()
    assert not own.is_own(event("die"))
