"""Map option names of transformers, TRL, Lightning, LitGPT, Axolotl, torchtune and other tools to toolkit's options.

A line is ``name name ... = option value; note``. The option must exist in the command; ``-`` means no option, and
the line is for training commands, or after ``-NAME`` for commands with that option.
"""

from collections.abc import Callable, Container
from pathlib import Path

_TABLE = """
lr = train.learning_rate
gpus num_gpus nproc_per_node n_gpu num_processes = devices
nnodes num_machines = num_nodes
fp16 = precision 16-mixed
bf16 = precision bf16-mixed
mixed_precision dtype = precision
wandb use_wandb wandb_log enable_wandb = logger_name wandb
report_to metric_logger = logger_name
target_modules lora_target_modules lora_target = lora_query; choose the layers with --lora_query, --lora_key, \
--lora_value, --lora_projection, --lora_mlp, --lora_head, --lora_experts
target_parameters lora_target_parameters = lora_experts true
lora_attn_modules = lora_query; choose the layers with --lora_query, --lora_key, --lora_value, --lora_projection
apply_lora_to_mlp = lora_mlp true
apply_lora_to_output = lora_head true
lora_rank = lora_r
use_rslora = lora_rslora true
use_dora peft_use_dora = lora_dora true
lora_plus loraplus use_loraplus = loraplus_lr_ratio
outtype quantize = -out_path; the types are those of --dtype, such as Q8_0 and Q4_0; llama-quantize makes \
others from an F16 file
lora_r lora_alpha lora_dropout lora_query lora_key lora_value lora_projection lora_mlp lora_head \
lora_experts lora_router lora_linear_attention lora_rslora lora_dora \
loraplus_lr_ratio from_peft quantize = -; use `toolkit finetune_lora`, or lora=True in Python
load_in_4bit quantization_bit qlora = quantize bnb.nf4
load_in_4bit quantization_bit qlora load_in_8bit = -; 4-bit weights require adapters: toolkit finetune_lora \
--quantize bnb.nf4
gradient_checkpointing use_gradient_checkpointing activation_checkpointing enable_activation_checkpointing = \
train.activation_checkpointing full
save_steps save_interval save_every save_every_n_steps = train.save_interval
save_strategy = train.save_interval; it counts steps
eval_steps eval_interval eval_strategy evaluation_strategy val_check_interval run_val_every_n_steps = \
eval.interval; it counts steps
logging_steps log_every_n_steps log_interval = train.log_interval
max_iters max_steps max_steps_per_epoch num_steps steps = train.max_steps
num_train_epochs num_epochs max_epochs epochs = train.epochs
gradient_accumulation_steps accumulate_grad_batches gradient_accumulation_iters grad_accum_steps = \
train.global_batch_size; it counts the sequences of an optimizer step over all devices
per_device_train_batch_size per_device_eval_batch_size micro_batch_size local_batch_size batch_size = \
train.micro_batch_size
save_total_limit keep_latest_k keep_last_n_checkpoints = train.keep_last
load_best_model_at_end = train.keep_best true
early_stopping_patience = train.patience
metric_for_best_model = eval.best_by
enable_async_checkpointing = train.async_save true
resume_from_checkpoint auto_resume_from_checkpoints = resume
optim optimizer_type optimizer.class_path = optimizer.name
optimizer_in_bwd = optimizer.in_backward true
optimizer.init_args = optimizer.options; the learning rate is train.learning_rate
lr_scheduler lr_scheduler_type = train.lr_schedule
warmup_steps warmup_iters num_warmup_steps = train.lr_warmup_steps
eval_iters = eval.max_iters
warmup_ratio = train.lr_warmup_fraction
max_grad_norm gradient_clip_val grad_clip clip_grad_norm = train.max_norm
hidden_dim hidden_size embed_dim d_model = model_config.n_embd
num_layers n_layers num_hidden_layers = model_config.n_layer
num_heads n_heads num_attention_heads = model_config.n_head
num_kv_heads num_key_value_heads = model_config.n_query_groups
max_seq_len max_length sequence_len seq_len seq_length cutoff_len context_length model_max_length = train.max_seq_length
output_dir = out_dir
output out_path out_dir = -texts; labels go to standard output: toolkit classify ... > FILE
data = -texts; give a file, as --texts FILE
device = accelerator
labels num_labels label_names = -texts; the checkpoint has them
labels num_labels label_names num_classes = -; the labels are those in the data's --data.label_column
head.name head_name = head
head = -model_name; a model gets a head in finetuning: `toolkit finetune_full CHECKPOINT --head classification`
model = -model_name; an architecture is the first word, as in `toolkit pretrain pico-llama`; weights to start from are \
--initial_checkpoint_dir
base_model model_name_or_path model = checkpoint_dir
base_model model_name_or_path model = initial_checkpoint_dir
dataset_name = data HuggingFace; with --data.repo_id NAME
dataset datasets dataset_path = data JSON; with --data.json_path FILE
assistant_only_loss completion_only_loss train_on_input train_on_inputs train_on_prompt = data.train_on
mask_history = data.train_on last_answer
sample_packing packing packed neat_packing = data.packing best_fit
torch_compile compile = compiler torch
use_fsdp = strategy fsdp
tp tp_size tensor_parallel_dim tensor_parallel_degree tensor_model_parallel_size = tensor_parallel_size
pp pp_size pipeline_parallel_degree pipeline_model_parallel_size = pipeline_parallel_size
cp cp_size context_parallel_dim context_parallel_degree sequence_parallel_degree sequence_parallel_size = \
context_parallel_size
ep ep_size expert_parallel_size expert_parallel_degree expert_model_parallel_size = -; experts are sharded as all \
weights are (--strategy fsdp), and not divided by expert
zero_stage deepspeed = strategy fsdp; ZeRO 3 is the default, ZeRO 2 --fsdp.sharding_strategy SHARD_GRAD_OP
hub_model_id = push_to_hub
hub_private_repo = private true
push_to_hub hub_model_id = -; after training, run toolkit convert_to_hf DIR OUT_DIR --push_to_hub USER/NAME
flash_attention flash_attn attn_implementation use_flash_attention_2 sdp_attention = -; attention needs no option: a \
run uses the fastest correct kernel for its device
dpo_beta pref_beta orpo_alpha = objective.beta
loss_type pref_loss dpo_loss = objective.loss_type
simpo_gamma = objective.gamma
rpo_alpha pref_ftx = objective.sft_weight
dpo_label_smoothing = objective.label_smoothing
desirable_weight = objective.desirable_weight
undesirable_weight = objective.undesirable_weight
ref_model ref_model_name_or_path model_ref = objective.reference_dir
max_prompt_length max_completion_length = train.max_seq_length; prompts are cut from the left, then completions
neftune_noise_alpha = train.neftune_alpha
ema_decay ema_beta = train.ema
help = -; --data NAME --help shows the options of a class
api_key = -max_queue; set the environment variable TOOLKIT_API_KEY
model_name served_model_name = checkpoint_dir; it is also the model's name
devices gpus tensor_parallel_size pipeline_parallel_size = -max_queue; one device serves the model
workers = max_concurrent_requests; one process answers all
dry_run = -max_queue; the training commands and `toolkit plan` have it
gres gpus gpus_per_node gpus_per_task ntasks_per_node devices = -claim; give --devices N in \
the training command, after --
nodes num_nodes = -claim; give --num_nodes N in the training command, after --
partition account qos constraint nodelist exclude mem mem_per_cpu mem_per_gpu cpus_per_task reservation = -claim; it \
belongs to sbatch: `sbatch --OPTION VALUE FILE`
dry_run = -claim; toolkit launch starts nothing; `toolkit plan` checks the training command
"""


def suggest_option(key: str, valid_names: Container[str], show: Callable[[str], str]) -> str:
    """Return a hint such as ``; did you mean --train.save_interval?`` for another tool's option name, or "".

    ``key`` is a dotted name; if it is not in the table, its last part is looked up. ``show`` formats an option.
    """
    key = key.replace("-", "_")
    for name in (key, key.rpartition(".")[2]):
        for line in filter(None, _TABLE.splitlines()):
            names, _, target = line.partition(" = ")
            target, _, note = target.partition(";")
            option, _, value = target.partition(" ")
            is_note, required = option.startswith("-"), option.removeprefix("-") or "train.global_batch_size"
            if name in names.split() and required in valid_names:
                hint = "" if is_note else f"; did you mean {f'{show(option)} {value}'.strip()}?"
                return hint + (f";{note}" if note else "")
    return ""


def suggest_data(path: str) -> str:
    """Return a hint for an existing file or folder that is given as ``--data``."""
    names = [path, *map(str, Path(path).glob("*"))]
    for suffix, option in _DATA_OPTIONS.items():
        if any(name.endswith(suffix) for name in names):
            return f"; use --data {option} {path}"
    return ""


def _hints(table: str) -> dict[str, str]:
    """Return {name: hint} of lines ``name name ... = hint``."""
    lines = [line.partition(" = ") for line in table.strip().splitlines()]
    return {name: f"; {hint}" for names, _, hint in lines for name in names.split()}


VALUE_HINTS = _hints("""
strategy=fsdp1 = use fsdp, which resumes its checkpoints
strategy=zero2 = use fsdp with --fsdp.sharding_strategy SHARD_GRAD_OP
strategy=zero3 strategy=deepspeed = use fsdp, which shards like ZeRO 3
fsdp.sharding_strategy=zero2 = use SHARD_GRAD_OP
fsdp.sharding_strategy=zero3 = use FULL_SHARD, or HYBRID_SHARD on several nodes
accelerator=gpu = use cuda
compiler=inductor compiler=true = use torch
data.problem_type=multi_class data.problem_type=multiclass = use single_label_classification
data.problem_type=multi_label data.problem_type=multilabel = use multi_label_classification
head=regression head=token_classification = use classification; numbers as labels make it a regression
head=none head=lm = leave --head out
precision=fp8 precision=float8 = use --train.fp8 tensorwise or rowwise with --precision bf16-mixed
precision=fp16 precision=float16 precision=half precision=16 = use 16-mixed
precision=int8 precision=int4 precision=nf4 = use `toolkit finetune_lora --quantize bnb.nf4`
dtype=q2_k dtype=q3_k_s dtype=q3_k_m dtype=q3_k_l dtype=q4_k dtype=q4_k_s dtype=q4_k_m dtype=q5_k dtype=q5_k_s \
dtype=q5_k_m dtype=q6_k = llama.cpp's llama-quantize makes it from a file of `toolkit convert_to_gguf` \
in F16, BF16 or F32
train.fp8=true = use tensorwise or rowwise
fsdp.state_dict_type=full_state_dict = use full
fsdp.state_dict_type=sharded_state_dict = use sharded
format=k8s format=kubernetes = use kubeflow or jobset
format=sbatch = use slurm
format=sky = use skypilot
fsdp.state_dict_type=local fsdp.state_dict_type=local_state_dict = use sharded: it also writes a file per device, and \
loads on any number
""")
"""Hints for other tools' option values, by ``option=value`` with the value in lower case."""

CLASS_HINTS = _hints("""
TinyLlama MicroLlama SlimPajama StarCoder = use LitData for prepared chunks, as in \
config_hub/pretrain/tiny-llama.yaml, or HuggingFaceText
csv json jsonl ndjson parquet txt = a file is given as --data CSV --data.csv_path FILE, --data JSON --data.json_path \
FILE, --data Parquet --data.parquet_path FILE or --data TextFiles --data.train_data_path FILE
GRPO OnPolicyDistillation = of an extension: `pip install -e extensions/on_policy`
PPO RLOO = use GRPO, of an extension: `pip install -e extensions/on_policy`
Deita LongForm FLAN = use JSON with --data.json_path FILE, or HuggingFace with --data.repo_id NAME
""")
"""Hints for other tools' data modules and objectives."""

_DATA_OPTIONS = {
    ".txt": "TextFiles --data.train_data_path",
    ".csv": "CSV --data.csv_path",
    ".parquet": "Parquet --data.parquet_path",
    ".jsonl": "JSON --data.json_path",
    ".json": "JSON --data.json_path",
}

COMMAND_HINTS = _hints("""
sft train finetune = use finetune_full or finetune_lora; pretrain for plain text
dpo train_dpo orpo cpo simpo kto = use finetune_lora or finetune_full with --objective DPO, KTO, ORPO or SimPO, and \
--data Preference
grpo ppo rloo rlhf reward = finetune_lora --objective DPO learns from pairs of answers; reinforcement learning is an \
extension: `pip install -e extensions/on_policy`
export upload = convert_to_gguf writes a file for llama.cpp, convert_to_hf a folder for `vllm serve`, or for the hub \
with --push_to_hub
env info = use doctor
list ls models = `toolkit pretrain list` prints the architectures
cp = COMMAND --print_config prints a configuration to edit
validate = COMMAND --dry_run checks a configuration, its data and its model
eval test = use evaluate
webui ui = there is no web page; use chat
convert_from_litgpt = LitGPT's checkpoint folders are read directly; convert_to_litgpt writes them
""")
"""Hints for commands of other tools."""
