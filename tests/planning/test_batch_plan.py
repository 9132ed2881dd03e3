import pytest

from toolkit.errors import UserError
from toolkit.planning.batch_plan import plan_batch


@pytest.mark.parametrize(
    ("global_size", "micro", "devices", "nodes", "accumulation"),
    [(64, 4, 1, 1, 16), (64, 4, 8, 2, 1), (512, 4, 8, 2, 8), (256, 16, 4, 1, 4), (1, 1, 1, 1, 1)],
)
def test_n1_accumulation_is_exact(global_size, micro, devices, nodes, accumulation):
    plan = plan_batch(global_size, micro, devices, nodes)
    assert plan.accumulation == accumulation
    assert plan.accumulation * plan.micro_batch_size * plan.data_parallel == global_size


@pytest.mark.parametrize(
    ("global_size", "micro", "devices", "nodes", "hints"),
    [
        (125, 5, 4, 1, ["120", "140"]),  # other trainers silently use a smaller batch here
        (16, 1, 3, 1, ["15", "18"]),
        (512, 4, 8, 3, ["480", "576"]),
        (4, 1, 8, 1, ["use --train.global_batch_size 8"]),  # smaller than the world
        (6, 4, 1, 1, ["4 or 8", "--train.micro_batch_size 3"]),
    ],
)
def test_n1_indivisible_batch_is_an_error_with_valid_values(global_size, micro, devices, nodes, hints):
    with pytest.raises(UserError) as error:
        plan_batch(global_size, micro, devices, nodes)
    message = str(error.value)
    assert "\n" not in message and f"--train.global_batch_size {global_size}" in message
    for hint in hints:
        assert hint in message
