"""The number of compiled graphs of the blocks: each takes seconds, and beyond torch's limit blocks run eagerly."""

import json
from collections.abc import Callable, Iterable
from functools import partialmethod
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.flash import kernels_on_cpu
from helpers.tiny_configs import HF_CONFIGS
from torch import nn
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

from tests.models.test_gpt import small
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.attention_kernels import Documents, document_bounds
from toolkit.models.block import Block
from toolkit.models.families import config_from_hf
from toolkit.models.gpt import GPT, build_model
from toolkit.training.model_spec import compile_blocks

FIXED = [(24, True), (24, True), (24, False), (24, True)]
RAGGED = [(24, True), (17, True), (30, True), (9, True), (24, False), (19, False)]
WINDOWS = {"n_layer": 6, "sliding_window_size": 16, "sliding_window_indices": [1, 0] * 3}
LINEAR = {
    "linear_attention": {"n_key_heads": 2, "n_value_heads": 4, "key_size": 8, "value_size": 8, "conv_size": 4},
    "linear_attention_indices": [1, 0] * 2,
}  # fmt: skip
GEMMA2 = WINDOWS | {"attention_logit_softcapping": 50.0, "post_attention_norm": True, "post_mlp_norm": True}


@pytest.fixture(autouse=True)
def undo():
    with mock.patch.object(torch.fx.experimental._config, "use_duck_shape", True):
        yield
    torch.compiler.reset()


def count_graphs(
    model: GPT,
    calls: Iterable[tuple[int, bool]],
    longest_ragged: int = 0,
    packed: bool = False,
    mode: str = "none",
    compiler: Callable[..., Any] | None = None,
) -> int:
    """Count the graphs for calls of (tokens per row, is training), without graph breaks or recompile limits.

    ``mode``: of activation checkpointing. ``compiler``: of the graphs, which otherwise run as they are.
    """
    graphs = 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward if compiler is None else compiler(graph, inputs)

    counters.clear()
    checkpoint_blocks(model, (Block,), mode)
    with mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend)):
        compile_blocks(model, (Block,), longest_ragged)
    for n_documents, (length, is_training) in enumerate(calls, 1):
        ids, extra = torch.randint(0, 90, (2, length)), {}
        if packed:
            at = torch.arange(length)
            documents = torch.stack([at * n_documents // length, at * 2 // length])
            extra["documents"] = Documents(documents, document_bounds(documents))
        model.train(is_training)
        with torch.set_grad_enabled(is_training):
            loss, _ = model(ids, ids, **extra)
        if is_training:
            loss.backward()
    assert not counters["graph_break"] and not counters["recompile_limit"]
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    return graphs


@pytest.mark.parametrize(
    ("changes", "is_packed", "is_ragged"),
    [
        pytest.param({}, False, False, marks=pytest.mark.slow),
        ({}, False, True),
        pytest.param(GEMMA2, False, True, marks=pytest.mark.slow),
        pytest.param({}, True, False, marks=pytest.mark.slow),
        pytest.param(GEMMA2, False, False, marks=pytest.mark.slow),
        pytest.param({}, True, True, marks=pytest.mark.slow),
        pytest.param(LINEAR, True, True, marks=pytest.mark.slow),
    ],
    ids=["fixed", "ragged", "gemma2-ragged", "packed-fixed", "gemma2-fixed", "packed-ragged", "linear-packed-ragged"],
)
def test_equivalent_blocks_share_a_graph(changes, is_packed, is_ragged):
    """One graph each for training and validation per type of layer, for rows of any length."""
    calls, longest = (RAGGED, 30) if is_ragged else (FIXED, 0)
    model = small("llama", **({"n_layer": 4} | changes))
    assert count_graphs(model, calls, longest, is_packed) == (4 if changes else 2)


PARTITIONED = lookup_backend("aot_eager_decomp_partition")  # as for CUDA, but without Triton
KERNELS = {
    "packed": ({}, True, 2),
    "windows": (WINDOWS, False, 4),
    "sinks": (WINDOWS | {"attention_sinks": True}, True, 4),
    "gemma2": (GEMMA2, True, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("name", KERNELS)
def test_blocks_with_attention_kernels_share_a_graph(name, mode):
    """For any number of documents; Gemma 2's layers with and without windows have equal masks of tensors."""
    changes, is_packed, n_graphs = KERNELS[name]
    for calls, longest in ((FIXED, 0), (RAGGED, 30)):
        with kernels_on_cpu():
            graphs = count_graphs(
                small("llama", **({"n_layer": 4} | changes)), calls, longest, is_packed, mode, PARTITIONED
            )
        assert graphs <= n_graphs, (name, calls)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("style", ["llama", "moe"])
def test_checkpointed_blocks_share_a_graph(style, mode):
    for calls, longest in ((FIXED, 0), (RAGGED, 30)):
        assert count_graphs(small(style, n_layer=4), calls, longest, mode=mode) == 2


@pytest.mark.slow
def test_rows_around_window_and_original_context_share_a_graph():
    longrope = {
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_seq_len": 12,
        "attention_factor": 1.2,
    }
    for changes in (WINDOWS | {"sliding_window_indices": [1] * 6}, {"rope_adjustments": longrope}):
        assert count_graphs(small("llama", **changes), RAGGED, 30) == 2


@pytest.mark.slow
def test_ragged_rows_under_fsdp_break_no_graph():
    """Dynamo takes the head counts of FSDP's modules for numbers that change, as it does with the lengths."""
    model = small("llama")
    for part in model.modules():  # what FSDP sets, and dynamo looks for
        part._is_fsdp_managed_module, part._fsdp_use_orig_params = True, True
    count_graphs(model, [(24, True), (17, True)], 30)


@pytest.mark.slow
def test_varying_lengths_stay_below_recompile_limit():
    assert count_graphs(small("llama", **GEMMA2), RAGGED) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", HF_CONFIGS)
def test_graph_count_of_every_family(name):
    pytest.importorskip("transformers")
    config = config_from_hf(json.loads(HF_CONFIGS[name]().to_json_string()))
    layers = range(config.n_layer)
    kind_of = (
        config.window,
        config.rope_index,
        config.has_experts,
        config.has_linear_attention,
        config.n_attention_parts,
    )
    kinds = len({tuple(f(i) for f in kind_of) for i in layers})
    assert count_graphs(build_model(config), FIXED) <= 2 * kinds
    assert count_graphs(build_model(config), RAGGED, 30) <= 2 * kinds
