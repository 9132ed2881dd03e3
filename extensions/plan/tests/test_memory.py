"""The formulas of `toolkit plan` against real tensors: parameters, gradients, optimizer state, activations."""

from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from benchmark_checkpointing import LiveBytes
from helpers.cases import check_each, has_slow_tests, slow_except
from helpers.flash import kernels_on_cpu
from helpers.groups import Case, run_group
from helpers.initialize import add_lora
from toolkit_align.divergence import DistillationLoss, DistillationOptions
from toolkit_plan.measure import trace
from toolkit_plan.measure.inputs import MemoryInputs
from toolkit_plan.measure.memory import Memory, plan_memory
from toolkit_plan.measure.optimizer import state_bytes
from toolkit_plan.measure.sample import one_layer_of_each_kind
from toolkit_plan.measure.trace import StepMemory, step_memory

from toolkit.checkpoints.run.host_copy import HostCopies
from toolkit.checkpoints.run.state_dicts import adapter_state, full_state, tied_names
from toolkit.config import DDPArgs, FSDPArgs
from toolkit.distributed.mesh import Layout
from toolkit.distributed.stages import STAGES_PER_RANK
from toolkit.distributed.strategy import StrategyPlan, plan_strategy
from toolkit.models import aligned, attention
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.attention_kernels import Documents, document_bounds
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.context_parallel import ContextGroup
from toolkit.models.families import get_config
from toolkit.models.flops import count_parameters
from toolkit.models.fp8 import convert_to_fp8
from toolkit.models.gpt import GPT, build_model, model_on_meta
from toolkit.models.head import Head
from toolkit.models.lora import adapted_on_meta, is_adapter
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.neftune import SampleNoise
from toolkit.models.quantize import quantize_linears
from toolkit.optim.classes import build_optimizer
from toolkit.optim.groups import block_params, no_decay_params

SINGLE = StrategyPlan("single", None, Layout(), "")
ADAMW = {"name": "AdamW", "weight_decay": 0.1}
GPT2 = {"n_layer": 3, "n_embd": 96, "n_head": 4, "head_size": 24, "intermediate_size": 384, "n_query_groups": 4}
SMALL = {"vocab_size": 512, "block_size": 128, "n_layer": 4, "n_embd": 128, "n_head": 4, "n_query_groups": 2,
         "intermediate_size": 320}  # fmt: skip
POST = {"post_attention_norm": True, "post_mlp_norm": True}
CONFIGS = {
    "llama": replace(get_config("pico-llama"), vocab_size=512, padded_vocab_size=512),
    "gpt_neox": replace(get_config("pythia-14m"), vocab_size=512, padded_vocab_size=512),
    "gpt2": replace(get_config("gpt2"), vocab_size=512, padded_vocab_size=512, **GPT2),
    "gemma2": ModelConfig(**SMALL, **POST, scale_embeddings=True, norm_offset=True, mlp_class_name="GemmaMLP",
                          sliding_window_size=32, sliding_window_indices=[1, 0, 1, 0],
                          attention_logit_softcapping=50.0, final_logit_softcapping=30.0, tie_embeddings=True),
    "gemma3": ModelConfig(**SMALL, **POST, scale_embeddings=True, norm_offset=True, mlp_class_name="GemmaMLP",
                          sliding_window_size=32, sliding_window_indices=[1, 1, 1, 0], norm_qk=True,
                          rope_indices=[1, 1, 1, 0], rope_local_base_freq=100.0, tie_embeddings=True),
    "mistral": ModelConfig(**SMALL, sliding_window_size=32),
    "olmo2": ModelConfig(**SMALL, **POST, norm_1=False, norm_2=False, norm_qk=True, norm_qk_type="olmo2"),
    "olmo": ModelConfig(**SMALL, norm_class_name="LayerNorm", norm_affine=False, clip_qkv=8.0),
    "phi": ModelConfig(**SMALL | {"n_layer": 8}, norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP",
                       gelu_approximate="tanh", bias=True, lm_head_bias=True, parallel_residual=True,
                       shared_attention_norm=True, rotary_percentage=0.5, norm_qk=True),
    "stablelm": ModelConfig(**SMALL, norm_class_name="LayerNorm", rotary_percentage=0.25, norm_qk=True,
                            norm_qk_type="per_head"),
    "granite": ModelConfig(**SMALL, embedding_multiplier=12.0, attention_multiplier=0.1, residual_multiplier=0.2,
                           logits_scaling=8.0),
    "cohere2": ModelConfig(**SMALL, norm_class_name="LayerNorm", norm_bias=False, parallel_residual=True,
                           shared_attention_norm=True, sliding_window_size=32, sliding_window_indices=[1, 1, 1, 0],
                           rope_indices=[0, 0, 0, -1], logits_scaling=16.0, tie_embeddings=True),
    "hunyuan": ModelConfig(**SMALL, norm_qk=True, norm_qk_after_rope=True, attn_bias=True, attn_proj_bias=True),
    "ministral3": ModelConfig(**SMALL, query_scaling_beta=0.1, rope_adjustments={
        "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 16}),
    "apertus": ModelConfig(**SMALL, norm_qk=True, mlp_class_name="XieluMLP"),
}  # fmt: skip
EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2, "moe_intermediate_size": 96}
CONFIGS["experts"] = replace(CONFIGS["llama"], n_layer=3, norm_topk_prob=True, **EXPERTS)
CONFIGS["shared expert"] = replace(CONFIGS["llama"], moe_indices=[0, 1], shared_expert_intermediate_size=64, **EXPERTS)
CONFIGS["gpt-oss"] = ModelConfig(**SMALL | {"n_layer": 3}, **EXPERTS, bias=True, attention_sinks=True, swiglu_limit=7.0,
                                 norm_topk_prob=True, sliding_window_size=32,
                                 sliding_window_indices=[1, 0, 1])  # fmt: skip
DEEPSEEK = EXPERTS | {
    "router_scores": "sigmoid", "n_expert_groups": 4, "n_topk_groups": 2, "shared_expert_intermediate_size": 96,
    "shared_expert_gate": False, "moe_indices": [0, 1, 1], "n_layer": 3,
}  # fmt: skip
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
CONFIGS["deepseek"] = ModelConfig(**{**SMALL, "n_query_groups": 4} | DEEPSEEK, latent_attention=LATENT)
CONFIGS["deepseek lite"] = replace(
    CONFIGS["deepseek"], latent_attention=LATENT | {"q_lora_rank": None, "v_head_dim": 32}
)
KERNEL_FAMILIES = ("llama", "gemma2", "gemma3", "mistral", "gpt-oss", "deepseek")
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]
LORAS = {
    "full": None,
    "lora": LoRAConfig(),
    "lora all": LoRAConfig(key=True, projection=True, mlp=True, dropout=0.1),
    "dora": LoRAConfig(mlp=True, dora=True),
}


def lora_of(family: str, name: str) -> LoRAConfig | None:
    """Return adapters; on all layers, with experts and routers. Those have no magnitudes."""
    lora = LORAS[name]
    if lora is None or not CONFIGS[family].n_moe_layer:
        return lora
    return replace(lora, mlp=False) if lora.dora else replace(lora, experts=lora.mlp, router=lora.mlp)


def setup_of(family: str, precision: str, lora: LoRAConfig | None = None, **other) -> MemoryInputs:
    values = {"strategy": SINGLE, "micro_batch_size": 2, "accumulation": 1, "seq_length": 128, "optimizer": ADAMW}
    return MemoryInputs(CONFIGS[family], precision, device="cpu", lora=lora, **(values | other))


def plan_state(setup: MemoryInputs) -> Memory:
    """Plan all but activations and logits, without tracing a micro-batch, which takes longest."""
    return plan_memory(setup, step=StepMemory())


def build_on_meta(setup: MemoryInputs) -> GPT:
    return adapted_on_meta(setup.config, setup.lora)


def build(setup: MemoryInputs) -> GPT:
    """Return the initialized model of a setup."""
    model = build_model(setup.config)
    if setup.lora is not None:
        add_lora(model, setup.lora)
    for name, parameter in model.named_parameters():
        if setup.weight_bytes == 2 and not is_adapter(name):
            parameter.data = parameter.data.bfloat16()
    if setup.fp8 != "none":
        convert_to_fp8(model, setup.fp8, setup.device)
    model.execute_with(autocasts_residual=setup.residual_dtype == "bf16")
    return model


def loss_of(model: GPT, setup: MemoryInputs) -> torch.Tensor:
    ids = torch.randint(0, 512, (setup.micro_batch_size, setup.seq_length))
    documents = torch.arange(setup.seq_length).expand_as(ids) // 50 if setup.packed else None
    rows = None if documents is None else Documents(documents, document_bounds(documents))
    positions = None if documents is None else torch.arange(setup.seq_length).expand_as(ids) % 50
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setup.precision.endswith("-mixed")):
        noise = SampleNoise(0.0, 1, tuple(range(len(ids)))) if model.has_dropout else None  # as in a run
        return model(ids, ids, positions=positions, documents=rows, noise=noise)[0]


def saved_bytes(setup: MemoryInputs, model: GPT | None = None) -> int:
    """Return the bytes of all storages that autograd saves in a forward pass, without parameters."""
    model, kept = model or build(setup), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # keep a reference, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, setup)
    return sum(storage.nbytes() for storage in kept.values())


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# ---- activations


FAST = ("llama", "gemma3", "phi")
"""Families whose blocks differ most; in turn each kind of adapters, checkpointing and precision: the fast cases."""
FULL_FAST = ("llama", "gemma3", "gpt-oss", "deepseek")


def full_cases() -> list:
    """Return family, precision; of fast families, one precision in turn is fast."""
    return [
        pytest.param(family, precision, marks=[] if family in FULL_FAST and i % 3 == k else [pytest.mark.slow])
        for i, family in enumerate(CONFIGS)
        for k, precision in enumerate(PRECISIONS)
    ]


@pytest.mark.parametrize(("family", "precision"), full_cases())
def test_activations_of_full_training_match_autograd(family, precision):
    setup = setup_of(family, precision)
    memory = plan_memory(setup)
    assert memory.activations + memory.cast_weights == pytest.approx(saved_bytes(setup), rel=0.01)


@pytest.mark.parametrize("family", slow_except(["gpt2"], ["gpt2", "llama", "gpt_neox", "gemma3", "olmo2"]))
def test_activations_with_a_bf16_residual_stream_match_autograd(family):
    setup = setup_of(family, "bf16-mixed", residual_dtype="bf16")
    memory, plain = plan_memory(setup), plan_memory(setup_of(family, "bf16-mixed"))
    assert memory.activations + memory.cast_weights == pytest.approx(saved_bytes(setup), rel=0.01)
    if family == "gpt2":  # each block's norms and the last one save their input in bf16
        n_norms = 2 * setup.config.n_layer + 1
        halves = n_norms * 2 * setup.tokens * setup.config.n_embd
        assert plain.activations - memory.activations == pytest.approx(halves, rel=0.02)  # statistics and bf16 weights


FP8_CASES = [("llama", "bf16-mixed", "none"), ("llama", "bf16-true", "full"), ("gemma3", "bf16-mixed", "selective")]


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("case", slow_except(FP8_CASES[:1], FP8_CASES))
def test_fp8_layers_save_bf16_inputs_and_no_copies_of_weights(case):
    family, precision, mode = case
    setup = setup_of(family, precision, fp8="tensorwise", activation_checkpointing=mode)
    memory, plain = plan_memory(setup), plan_memory(replace(setup, fp8="none"))
    counted = saved_bytes(setup) if mode == "none" else kept_bytes(setup)
    assert memory.activations + memory.cast_weights == pytest.approx(counted, rel=0.02)
    assert memory.cast_weights < plain.cast_weights or precision == "bf16-true"
    two = replace(sharded(setup, 2, sharding_strategy="SHARD_GRAD_OP"), device="cuda")  # which gathers in fp8
    less = plan_state(replace(two, fp8="rowwise")).unsharded_unit - plan_state(two).unsharded_unit
    blocks = [sum(p.numel() for p in block.parameters() if p.ndim == 2) for block in build_on_meta(setup).blocks]
    assert less == sum(blocks) + blocks[-1]  # the weights, and the buffer of the last all-gather


def lora_cases() -> list:
    """Return family, adapters, precision; of fast families, one kind of adapters and one precision in turn is fast."""
    cases = []
    for i, family in enumerate(CONFIGS):
        for j, lora in enumerate(name for name in LORAS if name != "full"):
            for k, precision in enumerate(PRECISIONS):
                is_fast = family in FAST and i % 3 == j and (i + j) % len(PRECISIONS) == k
                cases.append(pytest.param(family, lora, precision, marks=[] if is_fast else [pytest.mark.slow]))
    return cases


@pytest.mark.parametrize(("family", "lora", "precision"), lora_cases())
def test_activations_of_lora_training_match_autograd(family, lora, precision):
    """The first block saves slightly less than the formula: nothing before it is trainable."""
    setup = setup_of(family, precision, lora_of(family, lora))
    memory = plan_memory(setup)
    assert memory.activations + memory.cast_weights == pytest.approx(saved_bytes(setup), rel=0.1)


@pytest.mark.parametrize("family", slow_except(["llama"], CONFIGS))
def test_packed_rows_save_a_mask_in_every_layer(family):
    setup = setup_of(family, "bf16-true", packed=True)
    assert plan_memory(setup).activations == pytest.approx(saved_bytes(setup), rel=0.02)


@pytest.mark.parametrize("packed", [False, True])
def test_context_parallel_ranks_save_activations_of_their_tokens_and_all_keys(packed):
    def all_keys(group: ContextGroup, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.repeat(1, 1, group.size, 1) for t in own)

    setup = setup_of("llama", "32-true", packed=packed)
    shared = replace(setup, strategy=replace(SINGLE, kind="fsdp", sharding="FULL_SHARD", layout=Layout(context=4)))
    model = build(setup)
    model.execute_with(context=ContextGroup(0, 4))
    with mock.patch.object(ContextGroup, "gather", all_keys):
        expected = saved_bytes(setup, model)
    assert plan_memory(shared).activations == pytest.approx(expected, rel=0.1)
    assert expected < 0.5 * saved_bytes(setup)


def test_activations_grow_with_tokens_and_layers():
    one = plan_memory(setup_of("llama", "32-true")).activations
    assert plan_memory(setup_of("llama", "32-true", micro_batch_size=4)).activations == pytest.approx(2 * one, rel=0.02)
    more = replace(setup_of("llama", "32-true"), config=replace(CONFIGS["llama"], n_layer=4))
    assert plan_memory(more).activations == pytest.approx(2 * one, rel=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("family", slow_except(["llama"], ["llama", "mistral", "gemma3", "gpt-oss"]))
def test_without_gqa_kernels_keys_and_values_of_all_heads_are_saved(family, precision, monkeypatch):
    """As on CUDA in fp32 and with masks; here simulated on the CPU, whose kernels support GQA."""
    setup, masks_seen = setup_of(family, precision, packed=True), []
    monkeypatch.setattr(attention, "sdpa_supports_gqa", lambda q, mask: bool(masks_seen.append(mask)))
    monkeypatch.setattr(trace, "_trace", trace._trace.__wrapped__)  # not cached
    planned = plan_memory(setup).activations
    masks_seen.clear()
    documents = 8 * setup.tokens  # not saved, but in memory
    assert planned == pytest.approx(saved_bytes(setup) + documents, rel=0.02)
    assert len(masks_seen) == setup.config.n_layer


@pytest.mark.parametrize("family", slow_except(["mistral"], KERNEL_FAMILIES))
def test_attention_kernels_save_neither_masks_nor_scores(family, monkeypatch, request):
    """As on CUDA in 16 bits; here the same calls on the CPU."""
    monkeypatch.setattr(trace, "_trace", trace._trace.__wrapped__)  # not cached
    all_modes = has_slow_tests(request)
    for packed in (False, True) if all_modes else (True,):
        with kernels_on_cpu(checks=False) as calls:
            setup = setup_of(family, "bf16-true", packed=packed)
            model = build(setup)
            loss_of(model, setup)  # compiling saves tensors, too
            assert plan_memory(setup).activations == pytest.approx(saved_bytes(setup, model), rel=0.02), packed
            assert bool(calls) == (family != "gemma2" and (packed or family in ("mistral", "gemma3", "gpt-oss"))), (
                packed
            )
            for mode in ("selective", "full") if calls and all_modes else ():  # not what torch.compile keeps
                setup = setup_of(family, "bf16-true", packed=packed, activation_checkpointing=mode)
                assert plan_memory(setup).activations == pytest.approx(kept_bytes(setup), rel=0.02), (packed, mode)


def kept_bytes(setup: MemoryInputs) -> int:
    """Return the bytes that exist when the blocks and the last norm have run, without what the norm does not save."""
    model, counted = build(setup), []
    checkpoint_blocks(model, (Block,), setup.activation_checkpointing)
    saves_copy = setup.precision == "bf16-true" and setup.config.norm_class_name == "RMSNorm"  # in fp32
    with LiveBytes(model.parameters()) as live:
        model.transformer.ln_f.register_forward_hook(
            lambda _, x, out: counted.append(live.now() - out.nbytes - (x[0].nbytes if saves_copy else 0))
        )
        loss_of(model, setup)
    return counted[0]


def checkpointing_cases() -> list:
    """Return family, adapters, precision, mode; of fast families, one mode and one precision in turn is fast."""
    cases = []
    for i, family in enumerate(CONFIGS):
        for j, (mode, lora) in enumerate([("full", "full"), ("selective", "full"), ("selective", "lora all")]):
            for k, precision in enumerate(PRECISIONS):
                is_fast = family in FAST and i % 3 == j and (i + j) % len(PRECISIONS) == k
                cases.append(pytest.param(family, lora, precision, mode, marks=[] if is_fast else [pytest.mark.slow]))
    return cases


@pytest.mark.parametrize(("family", "lora", "precision", "mode"), checkpointing_cases())
def test_checkpointed_activations_match_counted_bytes(family, lora, precision, mode):
    setup = setup_of(family, precision, lora_of(family, lora), activation_checkpointing=mode)
    memory = plan_memory(setup)
    assert memory.activations + memory.cast_weights == pytest.approx(kept_bytes(setup), rel=0.02)


@pytest.mark.parametrize("mode", slow_except(["selective"], ["selective", "full"]))
@pytest.mark.parametrize("family", slow_except(["gemma3"], ["llama", "mistral", "gemma3"]))
def test_checkpointed_packed_rows_share_masks(family, mode):
    setup = setup_of(family, "bf16-true", packed=True, activation_checkpointing=mode)
    assert plan_memory(setup).activations == pytest.approx(kept_bytes(setup), rel=0.02)


PEAKS = [  # family, adapters, precision, checkpointing, micro-batches per step, when the peak is
    ("llama", "full", "bf16-mixed", "none", 1, "head"),
    ("llama", "full", "bf16-mixed", "full", 2, "backward"),
    ("shared expert", "lora all", "bf16-mixed", "full", 1, "backward"),
    ("gemma3", "full", "bf16-true", "selective", 1, "backward"),
    ("shared expert", "full", "32-true", "full", 1, "backward"),
    ("phi", "lora all", "bf16-mixed", "none", 1, "forward"),
]


@pytest.mark.parametrize("case", slow_except(PEAKS[:2], PEAKS), ids=lambda case: "-".join(map(str, case)))
def test_the_peak_of_a_micro_batch_is_the_counted_one(case):
    """In the forward and the backward pass of all layers, of which the plan has recorded one of each kind."""
    family, lora, precision, mode, accumulation, where = case
    values = {"activation_checkpointing": mode, "accumulation": accumulation}
    setup = setup_of(family, precision, lora_of(family, lora), **values, micro_batch_size=8)
    setup = replace(setup, config=replace(setup.config, n_layer=6) if family == "llama" else setup.config)
    model = build(setup).train()
    checkpoint_blocks(model, (Block,), mode)
    for parameter in model.parameters() if accumulation > 1 else ():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    known = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with LiveBytes(known) as live:
        loss_of(model, setup).backward()
    step = step_memory(setup)
    peaks = {"head": step.saved + step.casts + step.head, "forward": step.forward, "end": step.end}
    peaks["backward"] = max(size for _, size in step.backward)
    assert max(peaks.values()) == pytest.approx(live.peak, rel=0.01)
    assert peaks[where] == max(peaks.values())


QUANTIZED = [("llama", "full", "bf16-mixed"), ("experts", "lora all", "bf16-true"), ("llama", "lora all", "32-true")]


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("case", slow_except(QUANTIZED[:1], QUANTIZED), ids=lambda case: "-".join(case))
def test_quantized_weights_are_counted_where_they_are_computed(case):
    """They are not saved, and at the peak one layer's exists."""
    family, lora, precision = case
    setup = setup_of(family, precision, replace(lora_of(family, lora), dropout=0.0) if lora != "full" else None)
    qat = {"weights": "int8-int4", "group_size": 32, "dtype": "float32" if precision == "32-true" else "bfloat16"}
    setup = replace(setup, config=replace(setup.config, qat=qat), micro_batch_size=8)
    memory, model = plan_memory(setup), build(setup).train()
    with LiveBytes(model.parameters()) as live:
        loss_of(model, setup).backward()
    step = step_memory(setup)
    peak = max(step.saved + step.casts + step.head, step.forward, step.end, *(size for _, size in step.backward))
    assert memory.activations + memory.cast_weights == pytest.approx(saved_bytes(setup), rel=0.02)
    assert peak == pytest.approx(live.peak, rel=0.02)


def test_a_new_layer_is_planned(monkeypatch):
    """A projection in the blocks of which neither measure/ nor planning/ knows."""
    create, run = Block.__init__, Block.forward

    def create_with_projection(self, config, *args):
        create(self, config, *args)
        self.extra = torch.nn.Linear(config.n_embd, 5 * config.n_embd)

    def run_with_projection(self, *args):
        out = run(self, *args)
        return out + self.extra(out).relu().unflatten(-1, (5, -1)).sum(-2)

    memory = plan_memory(setup_of("llama", "bf16-mixed", micro_batch_size=8))
    monkeypatch.setattr(Block, "__init__", create_with_projection)
    monkeypatch.setattr(Block, "forward", run_with_projection)
    config = replace(CONFIGS["llama"], vocab_size=520, padded_vocab_size=520)  # models are cached by their config
    setup = replace(setup_of("llama", "bf16-mixed", micro_batch_size=8), config=config)
    model, planned = build(setup).train(), plan_memory(setup)
    with LiveBytes(model.parameters()) as live:
        loss_of(model, setup).backward()
    assert planned.weights == nbytes(model.parameters())
    assert planned.activations + planned.cast_weights + planned.logits == pytest.approx(live.peak, rel=0.01)
    assert planned.activations > 1.1 * memory.activations


@pytest.mark.parametrize("precision", slow_except(["bf16-mixed"], PRECISIONS))
def test_cuda_saves_no_attention_matrix(precision, request):
    for family in CONFIGS if has_slow_tests(request) else ("gemma3",):
        if (family, precision) != ("gemma2", "32-true"):  # there soft-capped scores are saved
            setup = replace(setup_of(family, precision, micro_batch_size=1), device="cuda")
            short, long = (plan_memory(replace(setup, seq_length=n)).activations for n in (64, 128))
            masks = 4 * 4 * 128 * 128  # of a few layers at most
            assert long <= 2 * short + masks


# ---- weights, gradients, optimizer


OPTIMIZERS = {"AdamW": ADAMW, "SGD": {"name": "SGD"}, "momentum": {"name": "SGD", "momentum": 0.9},
              "Adafactor": {"name": "Adafactor"}}  # fmt: skip
MODELS = [("llama", "full"), ("llama", "lora all"), ("experts", "full"), ("experts", "lora all")]
EXACT = [("bf16-mixed", *MODELS[0], optimizer) for optimizer in OPTIMIZERS]
EXACT += [("bf16-mixed", *MODELS[-1], "AdamW")]


@pytest.mark.parametrize(
    "case",
    slow_except(EXACT, [(p, *m, o) for p in ("bf16-mixed", "bf16-true") for m in MODELS for o in OPTIMIZERS]),
    ids="-".join,
)
def test_weights_gradients_and_optimizer_are_exact(case):
    precision, family, lora, name = case
    optimizer = OPTIMIZERS[name]
    setup = setup_of(family, precision, lora_of(family, lora), optimizer=optimizer)
    model, memory = build(setup), plan_state(setup)
    loss_of(model, setup).backward()
    built = build_optimizer(model, optimizer, 1e-3, precision, no_decay_params(model))
    gradients = nbytes(p.grad for p in model.parameters() if p.grad is not None)
    built.step()
    states = [v for state in built.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    named = dict(model.named_parameters())
    assert memory.weights == nbytes(p for n, p in named.items() if not is_adapter(n))
    assert memory.adapters == nbytes(p for n, p in named.items() if is_adapter(n))
    assert memory.gradients == gradients
    assert memory.optimizer == pytest.approx(nbytes(states), abs=1)


LOW_MEMORY = {
    "masters": ("bf16-master", ADAMW, 1),
    "masters, accumulated": ("bf16-master", ADAMW, 2),
    "bf16 moments": ("bf16-mixed", ADAMW | {"state_dtype": "bf16"}, 1),
    "masters, bf16 moments": ("bf16-master", ADAMW | {"state_dtype": "bf16"}, 1),
    "Muon": ("32-true", {"name": "Muon"}, 1),
    "masters, Muon, bf16 moments": ("bf16-master", {"name": "Muon", "state_dtype": "bf16"}, 1),
    "8 bits": ("32-true", {"name": "AdamW8bit"}, 1),
    "masters, 8 bits": ("bf16-master", {"name": "AdamW8bit"}, 1),
}


@pytest.mark.parametrize("family", slow_except(["llama"], ["llama", "gemma2", "experts"]))
def test_low_memory_optimizers_are_counted_exactly(family):
    """State and gradients exactly; the memory of a step is an upper bound, but for small temporaries of Muon."""

    def check(precision, optimizer, accumulation):
        setup = setup_of(family, precision, optimizer=optimizer, accumulation=accumulation)
        model, memory = build(setup), plan_state(setup)
        if setup.sums_in_fp32:
            for parameter in model.parameters():
                parameter.grad_dtype = torch.float32
        inside = block_params(model, (Block,))
        built = build_optimizer(model, optimizer, 1e-3, precision, no_decay_params(model), in_blocks=inside)
        loss_of(model, setup).backward()
        assert memory.gradients == nbytes(p.grad for p in model.parameters())
        built.step()
        storages = {}
        for value in (v for s in built.state.values() for v in s.values() if isinstance(v, torch.Tensor)):
            storages[value.untyped_storage().data_ptr()] = value.nbytes
        assert memory.weights == nbytes(model.parameters())
        assert memory.optimizer == pytest.approx(sum(storages.values()), abs=8)
        known = [v for s in built.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        with LiveBytes([*model.parameters(), *(p.grad for p in model.parameters()), *known]) as live:
            built.step()
        if optimizer["name"] != "AdamW8bit":  # bitsandbytes' CPU kernels have temporaries that its CUDA kernels lack
            assert 0.75 * memory.update <= live.peak + 1000 <= 1.04 * memory.update + 2000

    check_each(check, LOW_MEMORY.values())


def test_intermediate_values_of_optimizers_that_are_not_fused():
    """On CUDA all weights of a group are updated at once, with or without decay; here the same on the CPU."""

    def check(name, precision):
        setup = replace(setup_of("llama", precision, optimizer={"name": name}), device="cuda")
        model, memory = build(setup), plan_state(setup)
        options = {"name": name, "foreach": True}
        built = build_optimizer(model, options, 1e-3, precision, no_decay_params(model))
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            known = [v for s in built.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
            with LiveBytes([*model.parameters(), *(p.grad for p in model.parameters()), *known]) as live:
                built.step()
        assert memory.update == pytest.approx(live.peak, rel=0.05)

    check_each(check, [("AdamW", "16-mixed"), ("RMSprop", "32-true"), ("NAdam", "32-true")])
    assert plan_state(replace(setup_of("llama", "bf16-mixed"), device="cuda")).update == 0


@pytest.mark.parametrize(
    ("family", "lora"),
    [pytest.param("llama", "full", marks=pytest.mark.slow), ("gemma2", "full"), ("llama", "lora all")],
)
def test_copy_for_async_save_is_exact(family, lora):
    setup = setup_of(family, "bf16-mixed", LORAS[lora], async_save=True)
    model, memory = build(setup), plan_state(setup)
    optimizer = build_optimizer(model, ADAMW, 1e-3, setup.precision, no_decay_params(model))
    loss_of(model, setup).backward()
    optimizer.step()
    state = full_state(model, optimizer, tied_names(model)) if setup.lora is None else adapter_state(model, optimizer)
    copies = HostCopies()
    for _ in range(2):  # the second copy takes the memory of the first
        copies.begin(model, optimizer)
        copies.copy(state, "state")
    assert memory.checkpoint_copy == pytest.approx(sum(buffer.nbytes for buffer in copies._buffers.values()), abs=1)
    assert memory.total == plan_state(replace(setup, async_save=False)).total + memory.checkpoint_copy
    on_gpu = plan_state(replace(setup, device="cuda"))
    assert on_gpu.host_copy == memory.checkpoint_copy and on_gpu.checkpoint_copy == 0


def test_optimizer_state_bytes():
    assert state_bytes({"name": "SGD"}, torch.float32, (100, 7)) == 0
    assert state_bytes(ADAMW, torch.float32, (1000, 70)) == 2 * 4 * 70_000 + 4  # two moments, and the counter
    assert state_bytes(ADAMW, torch.bfloat16, (1000,)) == 2 * 2 * 1000 + 4
    rows_and_columns = state_bytes({"name": "Adafactor"}, torch.float32, (1000, 70))
    assert 4 * 1070 <= rows_and_columns <= 4 * 1075


def test_parameters_are_counted_once():
    tied = count_parameters(build_on_meta(setup_of("llama", "32-true")))
    assert tied.total == tied.trained == sum(p.numel() for p in GPT(CONFIGS["llama"]).parameters())
    lora = count_parameters(build_on_meta(setup_of("llama", "32-true", LoRAConfig())))
    assert lora.trained == lora.total - tied.total > 0


# ---- quantized base


@pytest.mark.parametrize(("quantize", "per_weight"), [("bnb.nf4", 0.5625), ("bnb.nf4-dq", 0.515869140625)])
def test_quantized_base_counts_bits_and_scales(quantize, per_weight):
    setup = setup_of("gpt_neox", "bf16-true", LoRAConfig())
    plain, small = plan_memory(setup), plan_memory(replace(setup, quantize=quantize))
    linear = 6 * (3 * 128 * 128 + 128 * 128 + 2 * 128 * 512)
    assert plain.weights - small.weights == 2 * linear
    assert small.quantized_base == per_weight * linear
    assert small.elsewhere == plain.elsewhere + 2 * 128 * 512  # a weight is dequantized in the blocks, not at the loss


@pytest.mark.parametrize("quantize", slow_except(["bnb.nf4-dq"], ["bnb.nf4", "bnb.nf4-dq"]))
def test_quantized_base_matches_bitsandbytes(quantize):
    pytest.importorskip("bitsandbytes")
    setup = setup_of("gpt_neox", "bf16-true", LoRAConfig(mlp=True), quantize=quantize)
    model = build(setup)
    quantize_linears(model, quantize)
    states = [p.quant_state for p in model.parameters() if hasattr(p, "quant_state")]
    scales = [s.absmax for s in states] + [s.state2.absmax for s in states if s.nested]
    packed = nbytes(p for p in model.parameters() if hasattr(p, "quant_state"))
    memory = plan_memory(setup)
    assert len(states) == 4 * 6
    assert memory.quantized_base == pytest.approx(packed + nbytes(scales), rel=0.01)
    assert memory.activations == pytest.approx(saved_bytes(setup, model), rel=0.1)


# ---- strategies


def sharded(setup: MemoryInputs, devices: int, nodes: int = 1, **fsdp) -> MemoryInputs:
    options = FSDPArgs(**fsdp)
    plan = plan_strategy("auto", options, DDPArgs(), devices=devices, num_nodes=nodes, accelerator="cuda",
                         precision=setup.precision)  # fmt: skip
    return replace(setup, strategy=plan, fsdp=options)


def test_states_are_sharded_and_vectors_replicated_under_mixed_precision():
    setup = setup_of("gpt_neox", "bf16-mixed")
    unsharded, four = plan_memory(setup), plan_memory(sharded(setup, 4))
    vectors = 4 * sum(p.numel() for p in build_on_meta(setup).parameters() if p.ndim < 2)
    assert four.weights == pytest.approx(vectors + (unsharded.weights - vectors) / 4)
    assert four.optimizer == pytest.approx(2 * four.weights, rel=0.01)
    assert plan_state(sharded(setup_of("gpt_neox", "32-true"), 4)).weights == unsharded.weights / 4
    assert four.cast_weights == 0 < unsharded.cast_weights


def test_unsharded_units_are_those_at_the_loss():
    setup = setup_of("gpt_neox", "32-true")
    model = build_on_meta(setup)
    block = sum(p.numel() for p in model.transformer.h[0].parameters())
    root = sum(p.numel() for p in model.transformer.ln_f.parameters())
    head = model.lm_head.weight.numel()
    assert plan_state(sharded(setup, 2)).unsharded_unit == 4 * (root + 2 * head)  # with the buffer of its all-gather
    kept = plan_state(sharded(setup, 2, sharding_strategy="SHARD_GRAD_OP")).unsharded_unit
    assert kept == 4 * (6 * block + 3 * head + root)


@pytest.mark.parametrize("precision", slow_except(["bf16-mixed"], PRECISIONS))
def test_a_frozen_model_has_weights_and_at_the_loss_logits(precision):
    """Measured: the weights as built, and the peak of the loss with both heads."""
    big = replace(CONFIGS["llama"], vocab_size=5_000, padded_vocab_size=5_000, block_size=512)
    frozen = replace(big, n_layer=3, n_embd=96)
    setup = replace(setup_of("llama", precision), config=big, seq_length=512)
    with_frozen = replace(setup, frozen=frozen)
    planned, alone = plan_memory(with_frozen), plan_memory(setup)
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    teacher = GPT(frozen).to(dtype).requires_grad_(False)
    assert planned.frozen_model == nbytes(teacher.parameters()) and alone.frozen_model == 0
    model = build(setup)
    x = torch.randn(2, 512, big.n_embd, dtype=setup.dtype, requires_grad=True)
    hidden, labels = torch.randn(2, 512, frozen.n_embd), torch.zeros(2, 512, dtype=torch.int64)
    known = [*model.parameters(), *teacher.parameters(), x, labels]
    with torch.autocast("cpu", torch.bfloat16, enabled=setup.precision.endswith("-mixed")), LiveBytes(known) as live:
        options = DistillationOptions("jsd", 0.5, 2.0, 0.5)
        loss = DistillationLoss(options, hidden, lambda: (teacher.lm_head.weight, None), None, 5_000)
        model.lm_head.loss(x, labels, compiled=loss).backward()
    assert live.peak + hidden.nbytes == pytest.approx(planned.logits, rel=0.12)
    assert planned.total - alone.total == pytest.approx(planned.frozen_model + planned.logits - alone.logits)
    two = plan_state(sharded(with_frozen, 2))
    assert two.frozen_model == planned.frozen_model / 2
    large = replace(with_frozen, frozen=replace(frozen, intermediate_size=200_000))
    assert plan_memory(large).total > plan_memory(large).frozen_model + 2 * 512 * 3 * 200_000 * setup.compute_bytes


def test_a_padded_copy_of_the_head_is_planned(monkeypatch):
    """FSDP's 16-bit weights are copied to pad an odd vocabulary; mixed precision has a 16-bit copy anyway."""
    monkeypatch.setattr(aligned, "needs_alignment", lambda device, dtype: dtype.itemsize == 2)
    for precision, copies in (("bf16-mixed", 0), ("bf16-true", 1)):
        planned, measured = {}, {}
        for size in (5_001, 5_056):
            config = replace(CONFIGS["llama"], vocab_size=size, padded_vocab_size=size)
            setup = replace(sharded(setup_of("llama", precision), 2), config=config)
            head, x = Head(config.n_embd, size, bias=False), torch.randn(256, config.n_embd, dtype=setup.dtype)
            head, x, labels = head.to(setup.dtype), x.requires_grad_(), torch.arange(256)
            with (
                torch.autocast("cpu", enabled=setup.precision.endswith("-mixed")),
                LiveBytes([head.weight, x, labels]) as live,
            ):
                head.loss(x, labels).backward()
            planned[size], measured[size] = plan_memory(setup).logits, live.peak
        copy = copies * 2 * 5_056 * config.n_embd
        assert planned[5_001] - planned[5_056] == pytest.approx(copy, abs=0.01 * planned[5_056])
        assert measured[5_001] - measured[5_056] == pytest.approx(copy, abs=0.05 * planned[5_056])


def test_adapters_are_sharded_with_their_block():
    setup = setup_of("llama", "32-true", LORAS["lora all"])
    one, two, ddp = (
        plan_state(replace(planned, accumulation=2))
        for planned in (setup, sharded(setup, 2), replace(setup, strategy=replace(SINGLE, kind="ddp")))
    )
    assert two.adapters == one.adapters / 2 and two.gradients == one.gradients == one.adapters
    assert ddp.gradients == 2 * one.gradients  # the buckets, and the gradients of earlier micro-batches
    assert two.optimizer == pytest.approx(one.optimizer / 2, rel=0.01)
    assert ddp.adapters == one.adapters and ddp.optimizer == one.optimizer


def test_accumulated_gradients_are_unsharded_or_shards():
    setup = sharded(setup_of("gpt_neox", "32-true"), 2)
    unsharded = 4 * count_parameters(build_on_meta(setup)).total
    assert plan_state(setup).gradients == unsharded / 2
    assert plan_state(replace(setup, accumulation=2)).gradients == unsharded
    shards = plan_memory(replace(sharded(setup, 2, accumulate="sharded"), accumulation=2))
    assert shards.gradients == unsharded / 2
    assert shards.unsharded_unit == plan_state(setup).unsharded_unit  # with the root's gradient
    assert shards.total >= sum(shards.parts().values())  # the shards wait during the activations


def test_a_step_in_the_backward_pass_has_one_gradient_at_a_time():
    setup = setup_of("llama", "32-true", in_backward=True)
    largest = max(p.numel() for p in build_on_meta(setup).parameters())
    assert plan_state(setup).gradients == 4 * largest


def test_offloaded_shards_are_in_cpu_memory():
    setup = setup_of("gpt_neox", "bf16-mixed")
    model = build_on_meta(setup)
    vectors = 4 * sum(p.numel() for p in model.parameters() if p.ndim < 2)
    shards = 4 * sum(p.numel() for p in model.parameters() if p.ndim >= 2) / 4
    plain, offloaded = (plan_memory(sharded(setup, 4, cpu_offload=offload)) for offload in (False, True))
    assert (offloaded.weights, offloaded.gradients) == (vectors, vectors)
    assert offloaded.optimizer == pytest.approx(2 * vectors, rel=0.01)
    assert offloaded.host == pytest.approx(4 * shards, rel=0.01) and plain.host == 0
    # gradients replace activations in both
    assert plain.total - offloaded.total == pytest.approx(3 * shards, rel=0.03)


def test_hybrid_shards_within_a_node():
    setup = setup_of("gpt_neox", "32-true")
    assert plan_state(sharded(setup, 2, nodes=4)).weights == plan_state(sharded(setup, 2)).weights
    full = sharded(setup, 2, nodes=4, sharding_strategy="FULL_SHARD")
    assert plan_state(full).weights == plan_state(setup).weights / 8


def test_pipeline_counts_the_rank_with_most_memory():
    setup = replace(setup_of("gpt_neox", "32-true"), accumulation=8)
    model = build_on_meta(setup)
    block, vocabulary = (sum(p.numel() for p in part.parameters()) for part in (model.transformer.h[0], model.lm_head))
    norm = sum(p.numel() for p in model.transformer.ln_f.parameters())
    plan = plan_strategy("auto", FSDPArgs(), DDPArgs(), devices=2, num_nodes=1, accelerator="cuda",
                         precision="32-true", model_parallel=Layout(pipeline=2))  # fmt: skip
    memory = {name: plan_memory(replace(setup, strategy=plan, schedule=name)) for name in STAGES_PER_RANK}
    assert memory["1f1b"].weights == 4 * (3 * block + vocabulary + norm)  # of embedding and head only one
    size = 1 << 17  # the first rank, with both ends, needs most
    large = replace(setup, config=replace(setup.config, vocab_size=size, padded_vocab_size=size), strategy=plan)
    both = 2 * size * setup.config.n_embd
    assert plan_memory(replace(large, schedule="zbv")).weights == 4 * (3 * block + both + norm)
    # the last rank receives 8 inputs, of which 7 are also activations; the loss keeps two gradients
    received, width = 8 - 7, setup.config.n_embd
    kept = 4 * width * (received * setup.tokens + 7 * (setup.config.padded_vocab_size + setup.tokens))
    assert memory["gpipe"].activations - kept == pytest.approx(8 * activations_of_half(setup), abs=100)
    assert memory["1f1b"].activations < memory["interleaved"].activations < memory["gpipe"].activations


def activations_of_half(setup: MemoryInputs) -> float:
    return plan_memory(replace(setup, config=replace(setup.config, n_layer=3))).activations


def test_peak_counts_the_larger_of_gradients_and_activations():
    memory = plan_memory(setup_of("llama", "32-true"))
    parts = sum(memory.parts().values())
    step = memory.activations + memory.logits + memory.cast_weights
    assert memory.total == parts - min(step, memory.gradients)
    waiting = plan_memory(setup_of("llama", "32-true", accumulation=2))
    assert waiting.total == pytest.approx(sum(waiting.parts().values()))


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "accumulate"), [(1, "auto"), (2, "unsharded"), (2, "sharded")])
def test_two_ranks_match_the_plan(tmp_path, accumulation, accumulate):
    """Parameters, moments, and gradients between micro-batches, of real processes under FSDP."""
    batch = ["--train.global_batch_size", str(8 * accumulation), "--fsdp.accumulate", accumulate]
    cases = [Case(p, ["--precision", p, *batch]) for p in PRECISIONS]
    flags = ["pico-llama", "--accelerator", "cpu", "--strategy", "fsdp", "--data", "SyntheticTokens",
             "--data.vocab_size", "512", "--train.micro_batch_size", "4", "--train.max_steps", "2",
             "--eval.final_validation", "false", "--train.save_interval", "1", "--train.async_save", "true",
             "--fsdp.state_dict_type", "sharded"]  # fmt: skip
    seen = run_group(tmp_path, 2, cases, flags)
    for precision in PRECISIONS:
        setup = setup_of("llama", precision, accumulation=accumulation, async_save=True)
        memory = plan_memory(sharded(setup, 2, accumulate=accumulate, state_dict_type="sharded"))
        for rank in seen[precision]:
            assert rank["copied"] == pytest.approx(memory.checkpoint_copy, rel=0.05)  # of whole rows
            assert rank["parameters"] == pytest.approx(memory.weights, rel=0.01)
            assert rank["moments"] == pytest.approx(memory.optimizer, rel=0.01)
            name = "gradients" if accumulation == 1 else "waiting"
            assert rank[name] == pytest.approx(memory.gradients, rel=0.01)


def test_layers_of_each_kind_have_the_parameters_of_the_model():
    """Qwen3.5 has attention in every fourth layer."""
    config = get_config("Qwen3.5-0.8B")
    sample, counts = one_layer_of_each_kind(config)
    sizes = [sum(p.numel() for p in block.parameters()) for block in model_on_meta(sample).blocks]
    assert len(counts) == 4 and sum(counts) == config.n_layer
    total = sum(p.numel() for block in model_on_meta(config).blocks for p in block.parameters())
    assert sum(n * size for n, size in zip(counts, sizes, strict=True)) == total
