"""Events that our own calls cause are known as such, and hide no others."""

from agentd.runtimes.docker.streams import ContainerEvent, OwnEvents

NAME = "agentd-x-k1"


def event(action: str, container: str = "c1") -> ContainerEvent:
    return ContainerEvent(action, container, NAME, "k1")


def listening() -> OwnEvents:
    own = OwnEvents()
    own.listen()
    return own


def test_late_events_of_a_removed_container_are_own() -> None:
    own = listening()
    own.removed("c1")
    assert own.is_own(event("die"))
    assert own.is_own(event("destroy"))
    assert not own.is_own(event("destroy"))


def test_events_of_the_next_container_of_a_name_are_told() -> None:
    own = listening()
    own.removed("c1")
    assert not own.is_own(event("create", "c2"))
    assert not own.is_own(event("die", "c2"))


def test_end_is_told_before_the_removal() -> None:
    own = listening()
    own.expect(NAME)
    assert own.is_own(event("start"))
    assert not own.is_own(event("die"))


def test_removed_containers_are_remembered_up_to_a_bound() -> None:
    own = listening()
    for number in range(1000):
        own.removed(f"c{number}")
    assert not own.is_own(event("destroy", "c0"))
    assert own.is_own(event("destroy", "c999"))


def test_nothing_is_expected_by_one_who_does_not_listen() -> None:
    own = OwnEvents()
    own.removed("c1")
    own.listen()
    assert not own.is_own(event("destroy"))
