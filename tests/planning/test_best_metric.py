"""The metric that decides which checkpoint is the best one: its direction, and names that the options rule out."""

import pytest
from helpers.cases import check_each

from toolkit.config import EvalArgs
from toolkit.errors import UserError
from toolkit.objectives import DPO, KTO, Classification, Distillation, NextToken
from toolkit.planning.best_metric import BestMetric, check_best_by

UNKNOWN = "does not say whether the highest or the lowest value is the best; add --eval.best_mode max or min"


def test_a_direction_is_declared_known_or_asked_for():
    """val_t_word_perplexity is a column of an lm-eval task, whose direction lm-eval knows."""
    directions = {"val_acc": True, "val_t_word_perplexity": False, "val_nll": None, "val_ppl": False}
    directions |= {"val_loss_a": None, "val_lossless": True}

    def check(name, mode, is_higher):
        best = BestMetric.from_options(EvalArgs(best_by=name, best_mode=mode), NextToken())
        assert best.among(directions) == BestMetric(f"val_{name}", is_higher)
        states = [{f"val_{name}": 1.0}, {f"val_{name}": 1.0, "is_higher_better": True}]
        assert best.among(directions).is_of(states[is_higher])
        assert best.is_of(states[not is_higher]) == (best.is_higher_better is None)

    check_each(check, [
        ("acc", "auto", True), ("acc", "min", False), ("t_word_perplexity", "auto", False), ("nll", "min", False),
        ("nll", "max", True), ("ppl", "auto", False), ("loss_a", "auto", False), ("lossless", "auto", True),
    ])  # fmt: skip
    with pytest.raises(UserError, match=f"--eval.best_by val_nll: {UNKNOWN}"):
        BestMetric.from_options(EvalArgs(best_by="nll"), NextToken()).among(directions)
    assert BestMetric.from_options(EvalArgs(), NextToken()) == BestMetric("val_loss", False)


def test_names_that_the_options_rule_out():
    def check(options, objective, has_callbacks, message):
        evaluation = EvalArgs(**options)
        if message is None:
            return check_best_by(evaluation, objective, has_callbacks)
        with pytest.raises(UserError, match=message):
            check_best_by(evaluation, objective, has_callbacks)

    distillation = Distillation(teacher_dir="t")
    check_each(check, [
        ({"best_by": "acc"}, NextToken(), False, "val_acc: no metric .* name; did you mean 'val_ppl' or"),
        ({"best_by": "exact_match"}, NextToken(), False, "no metric .*; add --eval.metric exact_match"),
        ({"best_by": "accurac"}, Classification(), False, "did you mean 'val_accuracy'"),
        ({"best_by": "accuracy"}, Classification(), False, None), ({"best_by": "reward_margin"}, DPO(), False, None),
        ({"best_by": "reward_chosen"}, KTO(), False, None), ({"best_by": "divergence"}, distillation, False, None),
        ({"best_by": "loss_web"}, NextToken(), False, None), ({}, NextToken(), False, None),
        ({"best_by": "acc", "tasks": "arc_easy"}, NextToken(), False, None),  # names that are known later
        ({"best_by": "acc"}, NextToken(), True, None),
    ])  # fmt: skip
