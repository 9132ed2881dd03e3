"""The layout of the ranks: which of them read the same rows, and the sizes of the dimensions."""

from collections import Counter
from itertools import product

from toolkit.distributed.mesh import Layout


def test_every_rank_has_a_place_of_its_own_and_tensor_is_innermost():
    layout = Layout(pipeline=2, replicate=3, shard=2, context=2, tensor=2)
    assert (layout.world_size, layout.data_parallel, layout.loss_ranks) == (48, 6, 12)
    places = [tuple(layout.coordinates(rank).values())[::-1] for rank in range(48)]
    assert places == list(product(*map(range, (2, 3, 2, 2, 2))))


def test_n3_ranks_of_one_row_are_those_of_tensor_context_and_pipeline():
    layout = Layout(pipeline=2, replicate=3, shard=2, context=2, tensor=2)
    assert Counter(map(layout.data_rank, range(48))) == dict.fromkeys(range(6), 8)
    assert [layout.data_rank(rank) for rank in (0, 3, 4, 23, 24)] == [0, 0, 1, 5, 0]
    assert [Layout(replicate=2, shard=2).data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
