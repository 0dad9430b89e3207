"""Names from outside: what is one, and where anything else is refused."""

import pytest
from msgspec.structs import replace

from agentd.core.kernel.plan import kernel_name
from agentd.core.kernel.record import RecordError, decode, read_members, seal
from agentd.core.kernel.states import ObservedState
from agentd.core.names import (
    find_duplicates,
    is_name,
    name_or_empty,
    quote_untrusted,
    validate_name,
)
from core.kernels import found

NO_NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "../../PWNED",
    "-x",
    "k\n",
    "k\0",
    "x" * 64,
    ".removed-k1",
    "\u00e9",
]


@pytest.mark.parametrize("text", ["k1", "a.b-c_d", "0", "x" * 63])
def test_a_name_passes_every_check(text: str) -> None:
    assert is_name(text)
    assert validate_name(text) == name_or_empty(text) == text
    assert (
        replace(found(ObservedState.RUNNING), kernel_id=text, agent_id=text).ref.kernel_id == text
    )


@pytest.mark.parametrize("text", NO_NAMES)
def test_anything_else_becomes_no_path_and_no_observation(text: str) -> None:
    assert not is_name(text)
    assert name_or_empty(text) == ""
    for made in (
        lambda: validate_name(text),
        lambda: kernel_name("n", text),
        lambda: replace(found(ObservedState.RUNNING), kernel_id=text),
    ):
        with pytest.raises(ValueError, match="invalid name"):
            made()


@pytest.mark.parametrize("text", NO_NAMES[1:])
def test_an_agent_id_of_an_observation_is_a_name_or_unknown(text: str) -> None:
    assert replace(found(ObservedState.RUNNING), agent_id="").agent_id == ""
    with pytest.raises(ValueError, match="invalid name"):
        replace(found(ObservedState.RUNNING), agent_id=text)


@pytest.mark.parametrize("member", ["kernel_id", "agent_id", "node_id"])
def test_a_record_whose_ids_are_no_names_cannot_be_read(member: str) -> None:
    content = read_members(found(ObservedState.RUNNING).record)
    for value in (*NO_NAMES[1:], None, 0, False, ["a"]):
        with pytest.raises(RecordError, match="invalid name"):
            decode(seal({**content, member: value}))


@pytest.mark.parametrize("value", [None, 7, ["k1"], {"k": 1}])
def test_name_must_be_text(value: object) -> None:
    assert not is_name(value)
    assert name_or_empty(value) == ""


def test_text_from_outside_is_quoted_on_one_short_line() -> None:
    assert quote_untrusted("a\nb\x1b[31m") == r"'a\nb\x1b[31m'"
    assert len(quote_untrusted("x" * 10_000)) < 100


class Compared(str):
    """Counts how often any is compared with another."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Compared.comparisons += 1
        return str(self) == other

    __hash__ = str.__hash__


def test_repeated_items_are_found_in_linear_time() -> None:
    names = [Compared(f"n{number}") for number in range(1000)]
    assert find_duplicates(["b", "a", "b", "c", "a"]) == ["a", "b"]
    assert find_duplicates([*names, Compared("n7")]) == ["n7"]
    assert Compared.comparisons < 2 * len(names)
