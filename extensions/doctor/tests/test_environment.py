"""The environment block of `toolkit doctor`: what it contains, and what it must never contain."""

from toolkit_doctor import environment
from toolkit_doctor.environment import find_differences, find_problems, format_sections, variables


def test_variables_by_an_allow_list_and_without_secrets(tmp_path):
    shown = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "4", "LOCAL_RANK": "1",
             "SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "none", "GLOO_SOCKET_IFNAME": "eth0"}  # fmt: skip
    hidden = {"HF_TOKEN": "hf_1", "WANDB_API_KEY": "k", "AWS_SECRET_ACCESS_KEY": "s", "HOME": "/root",
              "SLURM_JWT": "ey", "TORCH_API_KEY": "k", "NCCL_PASSWORD": "p", "TOOLKIT_AUTH": "a"}  # fmt: skip
    url = {"TORCH_HOME": "https://me:secret@host/path"}
    found = variables(shown | hidden | url, [tmp_path / "missing"])
    assert found == shown | {"TORCH_HOME": "https://***@host/path"} and list(found) == sorted(found)


def test_nccl_files_are_read_below_the_environment(tmp_path):
    system, own = tmp_path / "nccl.conf", tmp_path / ".nccl.conf"
    system.write_text("NCCL_DEBUG=WARN\nNCCL_IB_HCA = mlx5\n")
    own.write_text("# NCCL_ALGO=Ring\nNCCL_IB_HCA=mlx5_1\nNCCL_NET=IB\n")
    assert variables({"NCCL_DEBUG": "INFO"}, [system, own]) == {
        "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": f"mlx5_1 ({own})", "NCCL_NET": f"IB ({own})",
    }  # fmt: skip
    assert variables({"NCCL_CONF_FILE": str(own)})["NCCL_NET"] == f"IB ({own})"


def test_differences_between_ranks():
    first = {"Versions": {"torch": "2.11", "peft": "1"}, "Variables": {"RANK": "0", "SLURM_TASK_PID": "7"}}
    other = {"Versions": {"torch": "2.10"}, "Variables": {"RANK": "1", "SLURM_TASK_PID": "8", "NCCL_DEBUG": "INFO"}}
    assert find_differences([first, first]) == []
    assert find_differences([first, first, other]) == [
        "peft: 1 on rank 0, not installed on rank 2",
        "torch: 2.11 on rank 0, 2.10 on rank 2",
        "NCCL_DEBUG: not set on rank 0, INFO on rank 2",
    ]


def test_slow_settings_and_a_gpu_that_torch_does_not_use(monkeypatch):
    monkeypatch.setattr(environment, "_MIN_SHM", 0)
    sections = {"Variables": {"NCCL_IB_DISABLE": "1 (/etc/nccl.conf)", "NCCL_P2P_DISABLE": "0"}, "Devices": {}}
    assert find_problems(sections) == ["NCCL_IB_DISABLE=1 (/etc/nccl.conf): NCCL does not use InfiniBand or RoCE"]
    (problem,) = find_problems({"Variables": {"NCCL_TIMEOUT": "1800"}, "Devices": {}})
    assert problem == "NCCL_TIMEOUT=1800: no effect; set the timeout of collectives with --timeout"
    (problem,) = find_problems({"Variables": {}, "Devices": {"torch": "CPU build", "nvidia-smi": "2 GPUs"}})
    assert "CPU build" in problem
    monkeypatch.setattr(environment, "_MIN_SHM", float("inf"))
    (problem,) = find_problems({"Variables": {}, "Devices": {}})
    assert "/dev/shm" in problem and "--shm-size" in problem


def test_text_is_aligned():
    assert format_sections({"A": {"x": "1", "long": "2"}, "B": {}}) == "A\n  x     1\n  long  2\nB\n  none"
