"""minGPT's hydra file: pytorch/examples, distributed/minGPT-ddp/mingpt/gpt2_train_cfg.yaml."""

from toolkit_foreign.rules import (
    BATCH_SIZE,
    CLIP_NORM,
    COUNT,
    COUNT_OR_ZERO,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Options,
    Rule,
    text,
)

DATA = {
    "path": Rule(text, "data.path"),
    "block_size": Rule(COUNT, "model_config.block_size train.max_seq_length"),
    "train_split": Rule(FRACTION, "data.train_split", note="the end of the text is held out"),
    "truncate": Rule(FRACTION, "data.truncate"),
}
GPT = {
    "model_type": Rule(text, "model_name"),
    "n_layer": Rule(COUNT, "model_config.n_layer"),
    "n_head": Rule(COUNT, "model_config.n_head"),
    "n_embd": Rule(COUNT, "model_config.n_embd"),
}
OPTIMIZER = {
    "weight_decay": Rule(NOT_NEGATIVE, "optimizer.weight_decay"),
    "learning_rate": Rule(POSITIVE, "train.learning_rate"),
}
TRAINER = {
    "max_epochs": Rule(COUNT, "train.epochs"),
    "batch_size": BATCH_SIZE,
    "data_loader_workers": Rule(COUNT_OR_ZERO, "data.num_workers"),
    "grad_norm_clip": CLIP_NORM,
    "snapshot_path": Rule(
        text,
        "resume out_dir",
        lambda file, path: {"resume": "auto", "out_dir": path.removesuffix(".pt")},
        note="checkpoints are folders in --out_dir",
    ),
    "save_every": Rule(
        COUNT,
        "train.save_interval",
        no_effect="no effect: the steps per epoch are unknown before the data is read; a run saves after each fifth "
        "and every 10 minutes, or every --train.save_interval steps",
    ),
    "use_amp": Rule({True: "auto", False: "32-true"}, "precision", note="auto: bf16-mixed on CUDA, 32-true on a CPU"),
}
IMPLIED: dict[str, Options] = {
    "data_config": {"data": "CharText", "data.stride": 1},  # an epoch has a row for each character
    "gpt_config": {"model_name": "gpt-mini"},
    "optimizer_config": {"train.lr_schedule": "constant", "train.lr_warmup_steps": 0},
}
"""Options that a group implies without a key."""
