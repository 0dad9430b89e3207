import pytest

from agentd.core.labels import MAX_AGENT_BYTES, MAX_NODE_BYTES, excess_of, size_of


def test_size_of_labels_is_that_of_keys_and_values_in_utf8() -> None:
    assert size_of({}) == 0
    assert size_of({"ab": "\u20ac", "\u00e9": ""}) == 7
    assert size_of({"a": "\ud800"}) == 2  # of a damaged record


@pytest.mark.parametrize(
    ("agent_bytes", "node_bytes", "free"),
    [
        (0, 0, None),
        (MAX_AGENT_BYTES - 3, 0, None),
        (MAX_AGENT_BYTES - 2, 0, 2),
        (MAX_AGENT_BYTES + 9, 0, 0),
        (0, MAX_NODE_BYTES - 2, 2),
    ],
)
def test_labels_fit_exactly_into_both_sums(
    agent_bytes: int, node_bytes: int, free: int | None
) -> None:
    excess = excess_of({"a": "bc"}, "x", agent_bytes=agent_bytes, node_bytes=node_bytes)
    assert (excess.free if excess else None) == free
    assert excess_of({}, "x", agent_bytes=agent_bytes, node_bytes=node_bytes) is None
