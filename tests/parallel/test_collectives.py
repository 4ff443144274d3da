"""What travels between ranks: how many collectives, of how many bytes, and none of them as long as the sequence."""

from __future__ import annotations

import pytest

from split_calls import counted, refused

pytestmark = pytest.mark.xdist_group("ranks")
# One head width of 4, two heads, R = 4 features, float32: S and z, and an exponent or four.
STATE = 4 * 2 * (4 * 4 + 4 + 1)
# Of every call: a digest of it, and two lengths.
CALL = ("_allgather_base_", 24)
EXPONENTIAL_STATE = 4 * 2 * (4 * 4 + 4 + 4)


@pytest.mark.parametrize("length", [1_024, 8_192])
def test_a_layer_sends_a_state_whatever_the_length(on_ranks, length):
    for forward, backward in on_ranks(2, counted, length, None):
        assert forward == [CALL, ("_allgather_base_", STATE)]
        assert backward == [("_reduce_scatter_base_", 2 * STATE)]


@pytest.mark.parametrize("length", [1_024, 8_192])
def test_a_window_sends_its_neighbours_tokens_too(on_ranks, length):
    # Both parts begin with a block: the last block of 16 tokens goes to the next rank, keys, values and biases.
    halo = 4 * 2 * 16 * (4 + 4 + 1)
    for rank, (forward, backward) in enumerate(on_ranks(2, counted, length, 16)):
        sent = [("alltoall_base_", halo * (rank == 0)), ("_allgather_base_", EXPONENTIAL_STATE)]
        assert forward == [CALL, *sent]
        assert backward == [("_reduce_scatter_base_", 2 * EXPONENTIAL_STATE), ("alltoall_base_", halo * (rank == 1))]


def test_lengths_that_are_not_given_come_with_the_call(on_ranks):
    for forward, backward in on_ranks(2, counted, 64, 16, asks=True):
        assert forward[0] == CALL
        assert [name for name, _ in forward[1:]] == ["alltoall_base_", "_allgather_base_"]
        assert len(backward) == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("mesh of two dimensions", 'give one of them, as mesh["sequence"]'),
        ("reordered", "gives each rank tokens from both ends of a text"),
        ("in order", "nothing"),
        ("no mesh", "must be a torch.distributed.device_mesh.DeviceMesh, got str"),
        ("statistics", "takes query_mean, key_mean from all tokens of a call"),
        ("merged", "window must be an integer or None"),
        ("lengths", "rank 0 holds 6, got (5, 5)"),
        ("left padding", "got rows [1] that begin with a masked token: pad on the right"),
        ("queries", "got 3 queries and 6 keys"),
        ("gates and bias", "with gates give is_causal=True and no key_bias"),
    ],
)
def test_what_is_refused(on_ranks, fault, message):
    shape = (2, 2) if fault == "mesh of two dimensions" else 2
    assert message in on_ranks(shape, refused, fault)[0]
