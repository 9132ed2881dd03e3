"""`toolkit launch`: each file is valid for its system, and holds the checked command and no secret."""

import re
import shlex
import subprocess
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import yaml
from helpers.cases import check_each

from toolkit.cli import main

RUN = ["pretrain", "pico-llama", "--train.max_steps", "3", "--log.run", "two words"]
SIZE = ["--devices", "8", "--num_nodes", "2"]
IMAGE, SHARED, CLAIM = ["--image", "hub/toolkit:1"], ["--shared_dir", "/shared"], ["--claim", "disk"]
SECRET = ["--secrets", "HF_TOKEN"]
OPTIONS = {
    "slurm": [*SHARED, *SECRET],
    "kubeflow": [*IMAGE, *SHARED, *CLAIM, *SECRET],
    "jobset": [*IMAGE, *SHARED, *CLAIM, *SECRET],
    "skypilot": ["--gpu", "H100", *SECRET],
    "ray": [*SHARED, *SECRET],
    "docker": [*IMAGE, *SHARED, *SECRET],
}
OUT = {format: "s3://bucket/run" if format == "skypilot" else "/shared/run" for format in OPTIONS}


def render(capsys, format: str, *options: str, run: list[str] | None = None) -> str:
    command = run or [*RUN, *SIZE, "--out_dir", OUT[format]]
    assert main(["launch", format, *OPTIONS[format], *options, "--", *command]) == 0
    return capsys.readouterr().out


def command_of(format: str, text: str) -> list[str]:
    """Return the words of the training command in a file."""
    text = text.replace("\\\n", "")
    if format == "docker":
        words = shlex.split(text)
        return ["toolkit", *words[words.index("hub/toolkit:1") + 1 :]]
    if format == "ray":
        return ["toolkit", *run_driver(text)["options"]]
    if format == "slurm":
        return shlex.split(re.search(r"^srun (toolkit .*) \"\$@\"", text, re.M)[1])
    *_, document = yaml.safe_load_all(text)
    if format == "skypilot":
        return shlex.split(document["run"])
    if format == "kubeflow":
        return document["spec"]["trainer"]["command"]
    pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod["containers"][0]["command"]


def run_driver(text: str) -> dict:
    """Execute a driver script without Ray; return what it calls toolkit_ray.train with."""
    calls: list[dict] = []
    train = SimpleNamespace(
        __name__="toolkit_ray", train=lambda options, **others: calls.append({"options": options} | others)
    )
    stub = SimpleNamespace(init=lambda **options: calls.append(options))
    parts = SimpleNamespace(FailureConfig=dict, RunConfig=dict)
    with patch.dict("sys.modules", {"ray": stub, "ray.train": parts, "toolkit_ray": train}):
        exec(text, {})
    return calls[0] | calls[1]


@pytest.mark.parametrize("format", OPTIONS)
def test_file_has_the_command_its_size_and_no_secret(format, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = render(capsys, format)
    assert command_of(format, text) == ["toolkit", *RUN, *SIZE, "--out_dir", OUT[format], "--resume", "auto"]
    assert "HF_TOKEN" in text and "hf_secret" not in text
    if format != "docker":
        assert re.match(r"(#!/bin/bash\n)?# 2 x 8 GPUs, about [\d.]+ GB of memory each", text)
    # the word toolkit may come first, and --resume auto is not added twice
    assert render(capsys, format, run=["toolkit", *command_of(format, text)[1:]]) == text


def without_quantities(value):
    """Remove quantities, for which the models have a wrapper that parses no YAML."""
    if isinstance(value, list):
        return [without_quantities(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {key: {} if key in ("requests", "limits") else without_quantities(value[key]) for key in value}


@pytest.mark.parametrize("is_on_gpus", [True, False])
@pytest.mark.parametrize("format", ["kubeflow", "jobset"])
def test_kubernetes_objects_have_no_unknown_fields(format, is_on_gpus, capsys):
    from kubeflow_trainer_api import models

    kinds = {
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    size = SIZE if is_on_gpus else [*SIZE, "--accelerator", "cpu", "--train.global_batch_size", "32"]
    documents = list(yaml.safe_load_all(render(capsys, format, run=[*RUN, *size, "--out_dir", OUT[format]])))
    for document in documents:
        document = without_quantities(document)
        checked = kinds[document["kind"]].model_validate(document)
        # the models ignore unknown fields: these would be missing here
        assert checked.model_dump(by_alias=True, exclude_unset=True) == document
    text = str(documents)
    assert text.count("'nvidia.com/gpu': '8'") == 2 * is_on_gpus
    assert "'mountPath': '/dev/shm'" in text and "'claimName': 'disk'" in text


def test_kubernetes_repeats_no_user_error(capsys):
    (job_set,) = yaml.safe_load_all(render(capsys, "jobset"))
    (rule,) = job_set["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (job,) = job_set["spec"]["replicatedJobs"]
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert rule["onExitCodes"] == {"containerName": pod["containers"][0]["name"], "operator": "In", "values": [2, 3]}
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy requires it
    address = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}["MASTER_ADDR"]
    assert address == f"{job_set['metadata']['name']}-{job['name']}-0-0.{job_set['metadata']['name']}"


def test_ray_reserves_one_gpu_per_process_and_passes_secrets_on(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    call = run_driver(render(capsys, "ray"))
    assert (call["num_workers"], call["resources"]) == (16, {"GPU": 1})
    assert call["runtime_env"] == {"env_vars": {"HF_TOKEN": "hf_secret"}}
    assert call["run_config"] == {"failure_config": {"max_failures": 50}}


def test_skypilot_reads_its_task(capsys, tmp_path):
    sky = pytest.importorskip("sky", reason="needs skypilot")
    (tmp_path / "task.yaml").write_text(render(capsys, "skypilot", "--spot"))
    task = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators, resources.use_spot) == (2, {"H100": 8}, True)


def test_out_writes_the_file(capsys, tmp_path):
    text = render(capsys, "slurm")
    assert render(capsys, "slurm", "--out", str(tmp_path / "job.sbatch")) == ""
    assert (tmp_path / "job.sbatch").read_text() == text
    assert subprocess.run(["bash", "-n", tmp_path / "job.sbatch"]).returncode == 0


def test_checkpoints_of_the_cluster_only_are_not_planned(capsys):
    end = [*SIZE, "--out_dir", "/shared/run"]
    run = ["finetune_lora", "/shared/model", "--data", "JSON", "--data.json_path", "/shared/chats.json", *end]
    assert "memory unknown: /shared/model is not" in render(capsys, "slurm", run=run)
    run = [*RUN, "--objective", "Distillation", "--objective.teacher_dir", "/shared/teacher", *end]
    assert "memory unknown: /shared/teacher is not" in render(capsys, "slurm", run=run)


def test_mistakes_are_one_line(refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.yaml").write_text("seed: 1")
    run = [*RUN, *SIZE, "--out_dir", "/shared/run"]
    cases = {
        "no command": (["slurm"], "--: must be given before the training command"),
        "empty command": (["slurm", "--", "toolkit"], "COMMAND: must be given"),
        "other command": (["slurm", "--", "chat", "x"], "chat: the command to launch must come first"),
        "wrong flag": (["slurm", *SHARED, "--", *run, "--train.max_stepz", "3"], "--train.max_stepz: no such option"),
        "flag of the other part": (["slurm", "--devices", "8", "--", *run], "give --devices N in the training command"),
        "flag of sbatch": (["slurm", "--cpus-per-task", "8", "--", *run], "belongs to sbatch: `sbatch --OPTION VALUE"),
        "flag of plan": (["slurm", "--dry_run", "--", *run], "`toolkit plan` checks the training command"),
        "other name": (["k8s", "--", *run], "format k8s: must be one of"),
        "other name's format": (["kubernetes", "--", *run], "docker; use kubeflow or jobset"),
        "number of GPUs": (["slurm", *SHARED, "--gpu", "H100:8", "--", *run], "--gpu H100, and --devices 8 after"),
        "no resume": (["slurm", *SHARED, "--", *run, "--resume=false"], "--resume false: not supported in a launch"),
        "batch": (["slurm", *SHARED, "--", *run, "--train.global_batch_size", "31"], "--train.global_batch_size 16"),
        "auto": (["slurm", *SHARED, "--", *RUN, "--out_dir", "/shared/run"], "add --devices 8"),
        "local file": (
            ["docker", "--image", "toolkit", *SHARED, "--", *run, "--config", "more.yaml"],
            "--config more.yaml: a path of this machine, which the job does not have; give a URL",
        ),
        "relative": (["slurm", *SHARED, "--", *RUN, *SIZE], "--out_dir out/pretrain: must be in --shared_dir /shared"),
        "no disk": (["slurm", "--", *run], "use a URL such as s3://bucket/run, or give --shared_dir PATH"),
        "temporary": (["slurm", "--", *RUN, *SIZE, "--out_dir", "/tmp/run"], "--out_dir /tmp/run: may be lost"),
        "local URL": (["slurm", "--", *RUN, *SIZE, "--out_dir", "file:///tmp/run"], "may be lost with its machine"),
        "out of it": (["slurm", *SHARED, "--", *RUN, *SIZE, "--out_dir", "/shared/../tmp"], "must be in --shared_dir"),
        "relative disk": (["slurm", "--shared_dir", "x", "--", *run], "--shared_dir x: must be an absolute path"),
        "no claim": (["jobset", *IMAGE, *SHARED, "--", *run], "--claim NAME: must be given together"),
        "odd disk": (["slurm", "--shared_dir", "/a b", "--", *run], "--shared_dir /a b: must be an absolute path"),
        "odd image": (["docker", "--image", "a b", *SHARED, "--", *run], "--image a b: must be the name of an image"),
        "twice": (
            ["kubeflow", *IMAGE, *SHARED, *CLAIM, "--", *run, "--max_restarts", "2"],
            "--max_restarts 2: not supported with kubeflow, which restarts",
        ),
        "no image": (["kubeflow", *SHARED, *CLAIM, "--", *run], "--image: must be given with kubeflow"),
        "no effect": (["docker", *IMAGE, "--time", "1:00", "--", *run], "--time 1:00: has no effect with docker"),
        "time": (["slurm", *SHARED, "--time", "1h", "--", *run], "--time 1h: must be a time of SLURM"),
        "name": (["slurm", *SHARED, "--name", "My run", "--", *run], "--name My run: must be"),
        "no GPU": (["skypilot", "--", *RUN, *SIZE, "--out_dir", "s3://bucket/run"], "--gpu: must be given"),
        "small GPU": (["slurm", *SHARED, "--gpu", "T4", "--", "pretrain", "Llama-2-7b-hf", *run[2:]], "has 16 GB"),
        "unknown GPU": (["slurm", *SHARED, "--gpu", "H1000", "--", *run], "--gpu H1000: unknown GPU"),
        "resume": (["slurm", *SHARED, "--", *run, "--resume", "true"], "--resume true: not supported in a launch file"),
        "value": (["slurm", *SHARED, "--secrets", "HF_TOKEN=hf_x", "--", *run], "--secrets: must be names"),
        "folder": (["slurm", *SHARED, "--out", "/no/such/file", "--", *run], "--out /no/such/file: No such file"),
    }  # fmt: skip

    def check(argv: list[str], text: str) -> None:
        error = refusal("launch", *argv)
        assert error.startswith("toolkit launch: ") and text in error
        assert "hf_x" not in error

    check_each(check, cases.values())
