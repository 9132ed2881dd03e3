"""The table of options that are not supported together."""

from dataclasses import replace

import pytest
import torch
from helpers.cases import check_each
from torch import nn

from toolkit.cli import main
from toolkit.config import EvalArgs, OptimizerArgs, TrainArgs
from toolkit.data import Classification, Preference, PythonStdlib, SyntheticTokens
from toolkit.distributed.strategy import plan_strategy
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config
from toolkit.models.lora_config import LoRAConfig
from toolkit.objectives import DPO, KTO, Distillation, NextToken, Reward
from toolkit.objectives import Classification as Classify
from toolkit.planning import facts
from toolkit.planning.batch_plan import plan_batch
from toolkit.planning.compatibility import ROWS, find_conflicts, require_compatible
from toolkit.planning.facts import Facts
from toolkit.planning.run_args import RunArgs, with_options

ARGS = RunArgs(
    command="pretrain",
    data=SyntheticTokens(),
    train=TrainArgs(max_norm=0.0),
    eval=EvalArgs(),
    optimizer=OptimizerArgs(),
    out_dir="out",
)
IN_BACKWARD, BF16 = {"optimizer.in_backward": True}, {"optimizer.state_dtype": "bf16"}
LORA, MODULE, SGD = {"lora": LoRAConfig()}, {"module": nn.Linear(1, 1)}, {"optimizer_class": torch.optim.SGD}
SPLIT = {"tensor_parallel_size": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
GEMMA_4 = get_config("gemma-4-E4B")
LINEAR = {"n_key_heads": 1, "n_value_heads": 2, "key_size": 8, "value_size": 8, "conv_size": 4}
NF4, MIXED = {"quantize": "bnb.nf4"}, {"precision": "16-mixed"}
NO_VALIDATION = {"eval.interval": 0, "eval.final_validation": False}
CONTEXT = {"context_parallel_size": 2}
FP8, BF16_MIXED = {"train.fp8": "tensorwise"}, {"precision": "bf16-mixed"}
RESIDUAL = {"train.residual_dtype": "bf16"}
DISTILLATION = {"objective": Distillation("teacher")}
FSDP, CUDA = {"devices": 2}, {"device": "cuda", "devices": 1}
EXTENSION, SCHEDULE_FREE = {"devices": 2, "extension": "thunder_fsdp"}, {"sets_weights": True}
PIPELINE, MICRO, LLAMA = {"pipeline_parallel_size": 2}, {"devices": 2, "micro": 8}, get_config("mini-llama")


PAIRS = {"command": "finetune_lora", "data": Preference(), "objective": DPO(), "lora": LoRAConfig()}
HEAD = {"command": "finetune_full", "data": Classification(), "objective": Classify()}


class Preferences(NextToken):
    """An objective of an extension."""


def facts_of(
    options: dict, *, devices=1, device="cpu", precision="32-true", micro=None, extension=None, **facts
) -> Facts:
    """The facts about a run on these devices, as resolving it finds them; without accumulation by default."""
    args = with_options(ARGS, options)
    strategy = plan_strategy(
        args.strategy, args.fsdp, args.ddp,
        devices=devices, num_nodes=1, accelerator=device, precision=precision, model_parallel=args.model_parallel,
    )  # fmt: skip
    strategy = replace(strategy, extension=extension)
    batch = plan_batch(64, micro or 64 // devices, devices, model_parallel=args.model_parallel.world_size)
    return Facts(args, precision, device, devices, strategy, batch, **facts)


# (options, the facts about the run, the message)
CASES = [
    ({"model_name": "x", "initial_checkpoint_dir": "y"}, {},
     "--model_name x is not supported with --initial_checkpoint_dir y: the checkpoint defines the architecture; remove "
     "one of them"),
    ({"strategy": "single"}, {"devices": 2},
     "--strategy single is not supported with 2 devices; use auto, fsdp or ddp"),
    ({}, {"devices": 2, "device": "mps"}, "--devices 2 is not supported with --accelerator mps: mps has one device"),
    ({"strategy": "ddp"}, {"devices": 2, "detail": True},
     "TORCH_DISTRIBUTED_DEBUG=DETAIL is not supported with ddp on a CPU: torch crashes; use --strategy fsdp"),
    ({"strategy": "ddp", "fsdp.sharding_strategy": "FULL_SHARD"}, {"devices": 2},
     "--fsdp.sharding_strategy FULL_SHARD is not supported with --strategy ddp: ddp does not shard; remove one of"),
    ({"strategy": "ddp", "fsdp.forward_prefetch": True}, {"devices": 2},
     "--fsdp.forward_prefetch true has no effect with ddp, 2 replicas (--strategy ddp); remove it"),
    ({"strategy": "fsdp", "ddp.bucket_cap_mb": 1.0}, {"devices": 2},
     "--ddp.bucket_cap_mb 1.0 has no effect with fsdp FULL_SHARD, one unit per block, 2 shards"),
    ({"timeout": 5.0}, {}, "--timeout 5.0 has no effect with a single process; remove it"),
    ({"strategy": "ddp", "ddp.static_graph": True}, {"devices": 2, "micro": 8},
     "--ddp.static_graph true is not supported with accumulation (global batch 64 = micro batch 8 x 2 devices x 4 "
     "accumulated): torch's DDP cannot combine them; use --train.micro_batch_size 32"),
    (CONTEXT, FSDP | {"model": get_config("Mixtral-8x7B-v0.1")},
     "--context_parallel_size 2 is not supported with experts (MoE): the load-balancing loss needs complete rows; "),
    (CONTEXT | MODULE | {"block_classes": (nn.Linear,)}, FSDP,
     "--context_parallel_size 2 is not supported with a user-provided or extension model: only toolkit's GPT splits "),
    (CONTEXT | {"objective": Preferences()}, FSDP,
     "--context_parallel_size 2 is not supported with --objective Preferences: only the next-token loss is a sum over"),
    (CONTEXT | {"compiler": "thunder"}, FSDP,
     "--context_parallel_size 2 is not supported with --compiler thunder; use --compiler torch or none"),
    (DISTILLATION | MODULE | {"block_classes": (nn.Linear,)}, FSDP,
     "--objective Distillation is not supported with a user-provided or extension model: only toolkit's GPT computes"),
    (DISTILLATION | SPLIT, FSDP,
     "--objective Distillation is not supported with --tensor_parallel_size 2: its frozen model is not divided; "),
    (DISTILLATION, EXTENSION,
     "--objective Distillation is not supported with --strategy thunder_fsdp: the frozen model's head cannot be "
     "gathered alone; use --strategy fsdp or ddp"),
    ({"strategy": "ddp", "tensor_parallel_size": 2}, {"devices": 2},
     "--tensor_parallel_size 2 is not supported with --strategy ddp: only FSDP can be combined with it; use "
     "--strategy fsdp"),
    ({"strategy": "ddp"} | CONTEXT, {"devices": 2}, "--context_parallel_size 2 is not supported with --strategy ddp"),
    ({"strategy": "ddp"} | PIPELINE, MICRO, "--pipeline_parallel_size 2 is not supported with --strategy ddp"),
    (SPLIT, {"model": get_config("Mixtral-8x7B-v0.1")} | FSDP,
     "--tensor_parallel_size 2 is not supported with experts (MoE): they are not divided; remove one of them"),
    (SPLIT, {"model": ModelConfig(latent_attention=LATENT)} | FSDP,
     "--tensor_parallel_size 2 is not supported with latent attention (MLA): its heads are not split across ranks"),
    (SPLIT, {"model": ModelConfig(linear_attention=LINEAR)} | FSDP,
     "--tensor_parallel_size 2 is not supported with linear attention: its heads are not split across ranks; "),
    (CONTEXT, {"model": ModelConfig(linear_attention=LINEAR)} | FSDP,
     "--context_parallel_size 2 is not supported with linear attention: its state needs complete rows; remove one"),
    *(({f"{name}_parallel_size": 2}, {"model": GEMMA_4} | case,
       f"--{name}_parallel_size 2 is not supported with Gemma 4: its layers share keys and values and take per-layer ")
      for name, case in (("tensor", FSDP), ("context", FSDP), ("pipeline", MICRO))),
    ({"compiler": "thunder"}, {"model": GEMMA_4},
     "--compiler thunder is not supported with Gemma 4: its blocks take per-layer inputs; use --compiler torch"),
    (SPLIT, {"model": get_config("OLMo-2-1124-7B")} | FSDP,
     "--tensor_parallel_size 2 is not supported with --model_config.norm_qk_type olmo2: the norm needs all heads of a "
     "token; remove one of them"),
    (SPLIT | MODULE | {"block_classes": (nn.Linear,)}, FSDP,
     "--tensor_parallel_size 2 is not supported with a user-provided or extension model: only toolkit's own layers"),
    (SPLIT | {"compiler": "thunder"}, FSDP,
     "--tensor_parallel_size 2 is not supported with --compiler thunder; use --compiler torch or none"),
    (SPLIT | NF4 | LORA, FSDP,
     "--tensor_parallel_size 2 is not supported with --quantize bnb.nf4: 4-bit blocks are not divided; remove one"),
    (SPLIT | {"lora": LoRAConfig(dropout=0.1)}, FSDP,
     "--tensor_parallel_size 2 is not supported with --lora_dropout 0.1: the ranks would drop different elements; use "
     "--lora_dropout 0"),
    (SPLIT | {"optimizer.name": "Muon"}, FSDP,
     "--tensor_parallel_size 2 is not supported with --optimizer.name Muon: it needs complete matrices; use AdamW"),
    (SPLIT | BF16, FSDP,
     "--tensor_parallel_size 2 is not supported with --optimizer.state_dtype bf16: the ranks would round equal values"),
    ({"pipeline.schedule": "gpipe"}, {"devices": 2},
     "--pipeline.schedule gpipe has no effect with --pipeline_parallel_size 1; remove it"),
    ({"pipeline_parallel_size": 4}, {"devices": 4, "micro": 32},
     "--pipeline_parallel_size 4 is not supported with 2 micro-batches per step: --pipeline.schedule 1f1b needs one "
     "per stage, interleaved equally many in each round; use --train.global_batch_size 128, or a smaller"),
    (PIPELINE | {"pipeline.schedule": "interleaved"}, MICRO | {"model": LLAMA},
     "--pipeline_parallel_size 2 is not supported with the 6 layers of mini-llama: all 4 stages have equally many; use "
     "1, 3"),
    (PIPELINE, MICRO | {"model": replace(LLAMA, n_expert=2, n_expert_per_token=1, mlp_class_name="LLaMAMoE")},
     "--pipeline_parallel_size 2 is not supported with experts (MoE): the balancing loss is a mean"),
    (PAIRS | {"command": "pretrain"}, {},
     "--objective DPO is not supported with pretrain; use finetune_lora or finetune_full"),
    (PAIRS | {"data": PythonStdlib()}, {},
     "--objective DPO is not supported with --data PythonStdlib: it compares completions; use --data Preference"),
    (PAIRS | {"objective": NextToken()}, {},
     "--data Preference is not supported with --objective NextToken: it would also train on the rejected"),
    (PAIRS | {"objective": KTO(), "train.global_batch_size": 1}, {"micro": 1},
     "--objective KTO is not supported with --train.global_batch_size 1: it compares with other samples"),
    (PAIRS | {"from_peft": "adapters"}, {},
     "--objective DPO is not supported with --from_peft adapters: the model without adapters is not the initial"),
    (PIPELINE | MODULE | {"block_classes": (nn.Linear,)}, MICRO,
     "--pipeline_parallel_size 2 is not supported with a user-provided or extension model: its forward is not divided"),
    (PIPELINE | BF16, MICRO,
     "--pipeline_parallel_size 2 is not supported with --optimizer.state_dtype bf16: the copies of a tied embedding"),
    (PIPELINE, MICRO | MIXED,
     "--pipeline_parallel_size 2 is not supported with --precision 16-mixed: the schedules do not scale losses; use "),
    (PIPELINE | {"objective": Preferences()}, MICRO,
     "--pipeline_parallel_size 2 is not supported with --objective Preferences: the last stage computes"),
    (PIPELINE | {"compiler": "thunder"}, MICRO,
     "--pipeline_parallel_size 2 is not supported with --compiler thunder; use --compiler torch or none"),
    (PIPELINE | {"lora": LoRAConfig()},
     {"model": ModelConfig(linear_attention=LINEAR, linear_attention_indices=[1, 0])} | MICRO,
     "--pipeline_parallel_size 2 is not supported with adapters of only attention in a model with linear attention: "),
    (PIPELINE | {"lora": LoRAConfig(query=False, value=False, head=True)}, MICRO,
     "--pipeline_parallel_size 2 is not supported with --lora_head true without other adapters: the other stages have"),
    (PIPELINE | SGD, MICRO | {"model": LLAMA},
     "--pipeline_parallel_size 2 is not supported with a user-provided or extension optimizer of tied embeddings: it "
     "may not update each weight independently"),
    (PIPELINE | {"fsdp.accumulate": "sharded"}, MICRO,
     "--pipeline_parallel_size 2 is not supported with --fsdp.accumulate sharded: the schedule reduces gradients once"),
    (PIPELINE | {"pipeline.schedule": "zbv", "train.activation_checkpointing": "full"}, MICRO,
     "--pipeline.schedule zbv is not supported with --train.activation_checkpointing full: its backward pass runs in"),
    (PIPELINE | {"pipeline.schedule": "zbv"}, MICRO | {"model": replace(LLAMA, n_layer=8)},
     "--pipeline.schedule zbv is not supported with tied embeddings: the first and the last stage are on one device"),
    ({"fsdp.param_dtype": "bf16"}, FSDP,
     "--fsdp.param_dtype bf16 is not supported with --precision 32-true: the weights have another dtype; use "
     "bf16-mixed"),
    ({"fsdp.param_dtype": "fp16"}, {"precision": "bf16-mixed", **FSDP},
     "--fsdp.param_dtype fp16 is not supported with --precision bf16-mixed"),
    ({"fsdp.param_dtype": "fp32"}, {"precision": "bf16-true", **FSDP},
     "--fsdp.param_dtype fp32 is not supported with --precision bf16-true"),
    ({"fsdp.reduce_dtype": "fp16"}, {"precision": "bf16-mixed", **FSDP},
     "--fsdp.reduce_dtype fp16 is not supported with --precision bf16-mixed"),
    ({"fsdp.cpu_offload": True}, CUDA | MIXED,
     "--fsdp.cpu_offload true is not supported with --precision 16-mixed: loss scaling needs gradients on the device"),
    ({"optimizer.options": {"fused": True}}, CUDA | MIXED,
     "--optimizer.options fused is not supported with --precision 16-mixed"),
    (FP8 | NF4 | LORA, BF16_MIXED,
     "--train.fp8 tensorwise is not supported with finetune_lora: torchao replaces plain linear layers, not layers"),
    (FP8, {},
     "--train.fp8 tensorwise is not supported with --precision 32-true: the other layers compute in bf16; use "
     "bf16-mixed or bf16-true"),
    (FP8 | SPLIT, FSDP | BF16_MIXED,
     "--train.fp8 tensorwise is not supported with --tensor_parallel_size 2; remove one of them"),
    (FP8, EXTENSION | BF16_MIXED, "--train.fp8 tensorwise is not supported with --strategy thunder_fsdp; remove one"),
    (FP8 | {"compiler": "thunder"}, BF16_MIXED,
     "--train.fp8 tensorwise is not supported with --compiler thunder; remove one of them"),
    (FP8 | MODULE, BF16_MIXED,
     "--train.fp8 tensorwise is not supported with a user-provided module; remove one of them"),
    (RESIDUAL, {}, "--train.residual_dtype bf16 is not supported with --precision 32-true: the blocks do not compute"),
    (RESIDUAL, CUDA | MIXED, "--train.residual_dtype bf16 is not supported with --precision 16-mixed: the blocks do"),
    (RESIDUAL, {"precision": "bf16-master"},
     "--train.residual_dtype bf16 has no effect with --precision bf16-master: it is already in bf16; remove it"),
    (RESIDUAL | MODULE, BF16_MIXED,
     "--train.residual_dtype bf16 is not supported with a user-provided or extension model; remove one of them"),
    (RESIDUAL | {"compiler": "thunder"}, BF16_MIXED,
     "--train.residual_dtype bf16 is not supported with --compiler thunder; remove one of them"),
    ({"fsdp.shard_size": 2, "fsdp.sharding_strategy": "FULL_SHARD"}, FSDP,
     "--fsdp.shard_size 2 has no effect with --fsdp.sharding_strategy FULL_SHARD; use HYBRID_SHARD"),
    ({"fsdp.accumulate": "sharded"}, FSDP,
     "--fsdp.accumulate sharded has no effect with one micro-batch per step: nothing is accumulated; remove it"),
    ({"fsdp.cpu_offload": True, **NF4, **LORA}, CUDA,
     "--fsdp.cpu_offload true is not supported with --quantize bnb.nf4: 4-bit weights stay on the device"),
    ({"strategy": "fsdp", **MODULE}, FSDP,
     "--strategy fsdp is not supported with a module without known blocks: FSDP shards block by block; set "
     "block_classes"),
    ({"train.activation_checkpointing": "full", **MODULE}, {},
     "--train.activation_checkpointing full is not supported with a module without known blocks"),
    ({"optimizer.name": "Muon", **MODULE}, {},
     "--optimizer.name Muon is not supported with a module without known blocks"),
    ({"train.neftune_alpha": 5.0}, {},
     "--train.neftune_alpha 5.0 is not supported with pretrain: it regularizes finetuning; remove it"),
    ({"train.neftune_alpha": 5.0, "command": "finetune_full", **MODULE}, {},
     "--train.neftune_alpha 5.0 is not supported with a user-provided or extension model"),
    (PAIRS | {"train.neftune_alpha": 5.0}, {}, "--train.neftune_alpha 5.0 is not supported with --objective DPO"),
    (HEAD | {"command": "pretrain"}, {}, "--head classification is not supported with pretrain; use finetune_lora or"),
    (HEAD | {"data": PythonStdlib()}, {},
     "--head classification is not supported with --data PythonStdlib: it needs labels; use --data Classification"),
    (HEAD | {"objective": Reward(), "data": PythonStdlib()}, {},
     "--head reward is not supported with --data PythonStdlib: it compares completions; use --data Preference"),
    (HEAD | {"objective": NextToken()}, {},
     "--data Classification is not supported with --objective NextToken: it has labels, not answers; use --head class"),
    (HEAD | MODULE, {}, "--head classification is not supported with a user-provided or extension model"),
    (HEAD | SPLIT, FSDP, "--head classification is not supported with --tensor_parallel_size 2: the score layer is"),
    (HEAD | {"lora": LoRAConfig(head=True)}, {},
     "--head classification is not supported with --lora_head true: there is no LM head; the score layer is always"),
    (HEAD | LORA | {"from_peft": "peft"}, {}, "--head classification is not supported with --from_peft peft"),
    (HEAD | {"train.tie_embeddings": True}, {},
     "--train.tie_embeddings true has no effect with --head classification: there is no LM head; remove it"),
    (HEAD | {"eval.metric": "number"}, {},
     "--eval.metric number is not supported with --head classification: there"),
    (HEAD | {"eval.max_new_tokens": 8}, {},
     "--eval.max_new_tokens 8 is not supported with --head classification: there is no LM head to generate with"),
    ({**NF4, **LORA}, CUDA | MIXED,
     "--quantize bnb.nf4 is not supported with --precision 16-mixed: 4-bit layers compute in bf16 or fp32; use "
     "bf16-true, or 32-true on a GPU without bfloat16"),
    ({"fsdp.state_dict_type": "sharded", **LORA}, FSDP,
     "--fsdp.state_dict_type sharded has no effect with finetune_lora"),
    ({"train.tie_embeddings": True, **LORA}, {},
     "--train.tie_embeddings true is not supported with finetune_lora: the base model is frozen; remove it"),
    ({"lora": LoRAConfig(experts=True)}, {"model": LLAMA},
     "--lora_experts true has no effect with a model without experts (MoE); remove it"),
    ({"lora": LoRAConfig(router=True)}, {"model": LLAMA},
     "--lora_router true has no effect with a model without experts (MoE); remove it"),
    ({**SPLIT, "lora": LoRAConfig()}, {"model": ModelConfig(attention_gate=True)} | FSDP,
     "--tensor_parallel_size 2 is not supported with --lora_query true of gated attention: an adapter's rows of"),
    ({"lora": LoRAConfig()}, {"model": ModelConfig(linear_attention=LINEAR)},
     "finetune_lora with adapters of only attention has no effect with a model whose layers all have linear"),
    ({"lora": LoRAConfig(linear_attention=True)}, {"model": LLAMA},
     "--lora_linear_attention true has no effect with a model without linear attention; remove it"),
    ({"lora": LoRAConfig(mlp=True)}, {"model": get_config("Mixtral-8x7B-v0.1")},
     "--lora_mlp true has no effect with a model whose MLPs are all experts (MoE); use --lora_experts true"),
    (LORA, {"precision": "bf16-master"},
     "--precision bf16-master is not supported with finetune_lora: adapters are already fp32 and their base is bf16; "
     "use bf16-true"),
    ({"optimizer.name": "Muon"}, EXTENSION,
     "--optimizer.name Muon is not supported with --strategy thunder_fsdp: its shards are not rows of matrices"),
    (SGD, {"needs_unsharded": True, **FSDP},
     "a user-provided or extension optimizer is not supported with fsdp: its needs_unsharded is True"),
    ({}, {"precision": "bf16-master", **FSDP}, "--precision bf16-master is not supported with fsdp"),
    (BF16, EXTENSION, "--optimizer.state_dtype bf16 is not supported with --strategy thunder_fsdp"),
    (SGD, {"precision": "bf16-master"}, "--precision bf16-master is not supported with a user-provided"),
    (BF16 | SGD, {}, "--optimizer.state_dtype bf16 is not supported with a user-provided"),
    (BF16, {"precision": "bf16-true"}, "--optimizer.state_dtype bf16 is not supported with --precision bf16-true"),
    (BF16, CUDA | MIXED, "--optimizer.state_dtype bf16 is not supported with --precision 16-mixed"),
    (BF16 | {"optimizer.name": "AdamW8bit"}, {},
     "--optimizer.state_dtype bf16 is not supported with --optimizer.name AdamW8bit: its moments are 8-bit"),
    (BF16 | {"optimizer.name": "SGD"}, {"has_moments": False},
     "--optimizer.state_dtype bf16 has no effect with --optimizer.name SGD: it has no moments with these options"),
    ({"optimizer.name": "SOAP"}, FSDP,
     "--optimizer.name SOAP is not supported with fsdp: it needs complete matrices; use --strategy ddp"),
    ({}, EXTENSION | SCHEDULE_FREE, "a schedule-free optimizer is not supported with --strategy thunder_fsdp"),
    ({"train.ema": 0.99}, SCHEDULE_FREE, "--train.ema 0.99 is not supported with a schedule-free optimizer"),
    ({"train.lr_schedule": "wsd"}, SCHEDULE_FREE,
     "--train.lr_schedule wsd is not supported with a schedule-free optimizer: the average replaces the decay"),
    ({"train.ema": 0.99}, EXTENSION, "--train.ema 0.99 is not supported with --strategy thunder_fsdp: it may hold"),
    (IN_BACKWARD | LORA, {}, "--optimizer.in_backward true has no effect with finetune_lora"),
    (IN_BACKWARD, {"devices": 2}, "--optimizer.in_backward true is not supported with 2 devices"),
    (IN_BACKWARD, {"micro": 32}, "--optimizer.in_backward true is not supported with accumulation (global batch 64 = "),
    (IN_BACKWARD | {"train.max_norm": 1.0}, {},
     "--optimizer.in_backward true is not supported with --train.max_norm 1.0: clipping needs the norm of all "
     "gradients first; use --train.max_norm 0"),
    (IN_BACKWARD | {"train.skip_spikes": 6.0}, {},
     "--optimizer.in_backward true is not supported with --train.skip_spikes 6.0: the weights are updated before the "
     "loss and the norm are known; remove one of them"),
    (IN_BACKWARD, CUDA | MIXED, "--optimizer.in_backward true is not supported with --precision 16-mixed"),
    (IN_BACKWARD | SGD, {}, "--optimizer.in_backward true is not supported with a user-provided"),
    (IN_BACKWARD | {"fsdp.cpu_offload": True}, CUDA,
     "--optimizer.in_backward true is not supported with --fsdp.cpu_offload true"),
    (MODULE | {"eval.metric": "rouge_l"}, {}, "--eval.metric rouge_l is not supported with a user-provided module"),
    (PIPELINE | {"eval.metric": "rouge_l"}, MICRO, "--eval.metric rouge_l is not supported with --pipeline_parallel_"),
    (CONTEXT | {"eval.metric": "rouge_l"}, MICRO, "--eval.metric rouge_l is not supported with --context_parallel_siz"),
    (MODULE | {"eval.tasks": "mmlu"}, {}, "--eval.tasks mmlu is not supported with a user-provided module: it cannot"),
    (PIPELINE | {"eval.tasks": "mmlu"}, MICRO, "--eval.tasks mmlu is not supported with --pipeline_parallel_size 2: "),
    ({"eval.best_by": "val_bpb"}, {},
     "--eval.best_by val_bpb has no effect with a run without --train.keep_best true or --train.patience; set one of"),
    ({"eval.best_mode": "max"}, {},
     "--eval.best_mode max has no effect with a run without --train.keep_best true or --train.patience; set one of"),
    (NO_VALIDATION | {"eval.metric": "rouge_l"}, {},
     "--eval.metric rouge_l is not supported with a run without validations; set --eval.interval"),
    (NO_VALIDATION | {"eval.tasks": "mmlu"}, {}, "--eval.tasks mmlu is not supported with a run without validations"),
    (NO_VALIDATION | {"train.keep_best": True}, {},
     "--train.keep_best true is not supported with a run without validations; set --eval.interval"),
    ({"train.patience": 2, "eval.interval": 0}, {},
     "--train.patience 2 has no effect with --eval.interval 0; set --eval.interval"),
    ({"train.lr_schedule": "constant", "train.min_lr": 1e-5}, {},
     "--train.min_lr 1e-05 has no effect with --train.lr_schedule constant; remove one of them"),
]  # fmt: skip


@pytest.fixture
def thunder(monkeypatch):
    monkeypatch.setattr("toolkit.config.options.COMPILERS", ("auto", "none", "torch", "thunder"))


def test_each_row_is_violated_by_a_run_and_says_so(monkeypatch, thunder):
    def check(options: dict, run: dict, message: str) -> None:
        run = dict(run)
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL" if run.pop("detail", False) else "OFF")
        facts = facts_of(options, **run)
        (found,) = find_conflicts(facts)
        assert found.startswith(message) and "{" not in found
        violated.update(row for row in ROWS if row.applies(facts))
        with pytest.raises(UserError) as error:
            require_compatible(facts)
        assert str(error.value) == found

    violated = set()
    check_each(check, CASES)
    assert not [row.message() for row in ROWS if row not in violated]


def test_supported_runs_violate_no_row():
    def check(options: dict, run: dict) -> None:
        assert not list(find_conflicts(facts_of(options, **run)))

    sizes = {"fsdp.auto_wrap": "size", "fsdp.min_num_params": 20000}
    check_each(check, [
        ({}, {}),
        ({}, {"devices": 8, "device": "cuda", "precision": "bf16-mixed"}),
        ({"fsdp.accumulate": "sharded"}, {"micro": 8, **FSDP}),
        *(({"optimizer.name": name}, FSDP) for name in ("Muon", "AdamW8bit", "Adafactor")),
        (BF16, FSDP),
        (PIPELINE | {"optimizer.name": "Muon"}, MICRO | {"model": replace(LLAMA, norm_affine=False)}),
        (PIPELINE | SGD, MICRO | {"model": replace(LLAMA, tie_embeddings=False)}),
        (PIPELINE | SGD | LORA, MICRO | {"model": LLAMA}),
        (SGD | {"strategy": "ddp"}, {"needs_unsharded": True, **FSDP}),
        (sizes | {"train.activation_checkpointing": "full", "compiler": "torch"}, FSDP),
        (sizes | NF4 | LORA | {"compiler": "torch"}, FSDP),
        (IN_BACKWARD, {"precision": "bf16-master"}),
        (MODULE | {"strategy": "ddp"}, {"devices": 2}),
        (NF4 | LORA, {"precision": "bf16-true"}),
        (FP8 | CONTEXT | {"compiler": "torch", "train.activation_checkpointing": "full"}, FSDP | BF16_MIXED),
        (FP8 | PIPELINE, MICRO | {"precision": "bf16-true", "model": LLAMA}),
    ])  # fmt: skip


def test_an_optimizer_of_an_extension_may_not_be_updated_in_parts(monkeypatch):
    """Only torch's and toolkit's own optimizers are known to update each weight independently of the others."""
    monkeypatch.setattr(facts, "registered", lambda kind: {"Lion": "toolkit_lion.optimizer.Lion"})
    for options, run in ((IN_BACKWARD, {}), (BF16, {}), ({}, {"precision": "bf16-master"})):
        assert not list(find_conflicts(facts_of(options, **run)))
        (message,) = find_conflicts(facts_of(options | {"optimizer.name": "Lion"}, **run))
        assert "is not supported with a user-provided or extension optimizer" in message


def test_facts_that_are_not_known_yet_violate_no_row(thunder):
    """The first stage knows neither devices nor strategy."""
    for options, _, message in CASES:
        known = list(find_conflicts(Facts(with_options(ARGS, options))))
        assert known in ([], [message]) or known[0].startswith(message), known


def test_the_table_is_printed(capsys):
    assert main(["plan", "compatibility"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [row.message() for row in ROWS] and len({*lines}) == len(lines) > 90
    assert not [line for line in lines if "{" in line or "  " in line]


def test_options_of_one_device_are_kept_for_several():
    """On a CPU nothing is offloaded, and one device shards nothing: a config for several devices runs on one."""
    options = {"fsdp.cpu_offload": True, "fsdp.state_dict_type": "sharded", "fsdp.sharding_strategy": "FULL_SHARD"}
    assert not list(find_conflicts(facts_of(options)))
