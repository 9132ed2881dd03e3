"""Train on more than the next token: preferences, a teacher, labels and rewards; `toolkit classify`."""

from toolkit.extension import Command, Extension

EXTENSION = Extension(
    data={
        "Classification": "toolkit_align.classification.Classification",
        "Preference": "toolkit_align.preference_data.Preference",
    },
    objectives={
        "Classification": "toolkit_align.scores.Classification",
        "DPO": "toolkit_align.preference.DPO",
        "Distillation": "toolkit_align.distillation.Distillation",
        "KTO": "toolkit_align.kto.KTO",
        "ORPO": "toolkit_align.preference.ORPO",
        "Reward": "toolkit_align.scores.Reward",
        "SimPO": "toolkit_align.preference.SimPO",
        "TokenReward": "toolkit_align.scores.TokenReward",
    },
    heads={
        "classification": "toolkit_align.scores.Classification",
        "reward": "toolkit_align.scores.Reward",
        "token_reward": "toolkit_align.scores.TokenReward",
    },
    metrics={"reward": "toolkit_align.reward.reward"},
    commands={
        "classify": Command(
            "toolkit_align.classify",
            "print labels or scores of texts, by a model with a head",
            positionals=("checkpoint_dir",),
            after="serve",
        )
    },
)
