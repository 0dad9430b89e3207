import pytest

from agentd.core.labels import MAX_AGENT_BYTES, MAX_NODE_BYTES, find_label_excess, labels_size


def test_size_of_labels_is_that_of_keys_and_values_in_utf8() -> None:
    assert labels_size({}) == 0
    assert labels_size({"ab": "\u20ac", "\u00e9": ""}) == 7
    assert labels_size({"a": "\ud800"}) == 2  # of a damaged record


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
    excess = find_label_excess({"a": "bc"}, "x", agent_bytes=agent_bytes, node_bytes=node_bytes)
    assert (excess.free if excess else None) == free
    assert find_label_excess({}, "x", agent_bytes=agent_bytes, node_bytes=node_bytes) is None


def test_agents_share_the_bytes_of_labels_equally() -> None:
    for agents, maximum in ((1, MAX_AGENT_BYTES), (4, MAX_AGENT_BYTES), (8, MAX_NODE_BYTES // 8)):
        sums = {"agent_bytes": maximum - 2, "node_bytes": 0, "agents": agents}
        assert find_label_excess({"a": "b"}, "x", **sums) is None
        excess = find_label_excess({"a": "bc"}, "x", **sums)
        assert excess is not None
        assert f"agent x together have at most {maximum} bytes" in excess.bound
