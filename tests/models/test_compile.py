"""How many graphs torch.compile makes of the blocks: each costs seconds, and beyond torch's limit blocks run eager."""

import json
from collections.abc import Iterable

import pytest
import torch
from torch._dynamo.utils import counters

from tests.models.test_gpt import small
from tests.models.test_parity import HF_CONFIGS
from toolkit.models.families import config_from_hf
from toolkit.models.gpt import GPT

FIXED = [(24, True), (24, True), (24, False), (24, True)]
RAGGED = [(24, True), (17, True), (30, True), (9, True), (24, False), (19, False)]
WINDOWS = {"n_layer": 6, "sliding_window_size": 16, "sliding_window_indices": [1, 0] * 3}
GEMMA2 = WINDOWS | {"attention_logit_softcapping": 50.0, "post_attention_norm": True, "post_mlp_norm": True}


@pytest.fixture(autouse=True)
def forget_graphs():
    yield
    torch.compiler.reset()


def count_graphs(model: GPT, calls: Iterable[tuple[int, bool]], *, dynamic: bool | None = None, packed=False) -> int:
    """Graphs of a run of (tokens per row, is training), none of them broken and no limit reached."""
    graphs = 0

    def backend(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    counters.clear()
    for block in model.transformer.h:
        block.compile(backend=backend, dynamic=dynamic)
    for length, is_training in calls:
        ids, extra = torch.randint(0, 90, (2, length)), {}
        if packed:
            extra["documents"] = (torch.arange(length) >= length // 2).long().expand(2, length)
        model.train(is_training)
        with torch.set_grad_enabled(is_training):
            loss, _ = model(ids, ids, **extra)
        if is_training:
            loss.backward()
    assert not counters["graph_break"] and not counters["recompile_limit"]
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    return graphs


def test_blocks_that_compute_the_same_share_a_graph():
    """One for training and one for validation, of each kind of layer; ragged rows need no more."""
    llama, gemma2 = small("llama", n_layer=4), small("llama", **GEMMA2)
    assert count_graphs(llama, FIXED, dynamic=False) == 2
    assert count_graphs(gemma2, FIXED, dynamic=False) == 4


def test_lengths_that_change_stay_far_from_the_recompile_limit():
    assert count_graphs(small("llama", n_layer=4), RAGGED, dynamic=True) <= 3
    assert count_graphs(small("llama", n_layer=4), RAGGED, dynamic=True, packed=True) <= 3
    assert count_graphs(small("llama", **GEMMA2), RAGGED) == 6  # where nobody has asked for dynamic shapes


@pytest.mark.slow
@pytest.mark.parametrize("name", HF_CONFIGS)
def test_graphs_of_every_family(name):
    pytest.importorskip("transformers")
    config = config_from_hf(json.loads(HF_CONFIGS[name]().to_json_string()))
    layers = range(config.n_layer)
    kinds = len({(config.window(i), config.rope_index(i), config.has_experts(i)) for i in layers})
    assert count_graphs(GPT(config), FIXED, dynamic=False) <= 2 * kinds
    assert count_graphs(GPT(config), RAGGED, dynamic=True) <= 3 * kinds
