"""``--callbacks helpers.step_records.StepRecords``: digests of everything that a rank's next step depends on."""

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from toolkit import Callback
from toolkit.data.batch import Batch
from toolkit.distributed import ranks
from toolkit.distributed.names import canonical_name
from toolkit.distributed.shards import shard_of, sharded_values


class StepRecords(Callback):
    """Writes ``out_dir/records/WHEN-RANK.json``: "start" when the run resumes, and steps from the first checkpoint on.

    A record has SHA-256 digests of this rank's parameters and optimizer tensors, the options of the optimizer's groups,
    the random states, the position in the data, and the batches and metrics of the step. At the start and at the first
    checkpoint, rank 0 also has digests of the unsharded tensors.

    Each step draws a number from each generator, as data augmentation would: without, a run without dropout would not
    show a wrong random state.
    """

    def on_train_start(self, trainer) -> None:
        reader, read = trainer.run.reader, trainer.run.reader.read

        def read_and_record() -> list[Batch]:
            self.batches = read()
            return self.batches

        reader.read = read_and_record
        (trainer.out_dir / "records").mkdir(parents=True, exist_ok=True)
        if trainer.progress.step:
            write(trainer, "start", state_of(trainer, is_gathered=True))

    def on_step_end(self, trainer, metrics) -> None:
        drawn = [random.random(), np.random.random(), torch.rand(()).item()]
        step, first = trainer.progress.step, trainer.args.train.save_interval
        if step >= first:
            measured = {name: value for name, value in metrics.items() if name != "step_seconds"}
            of_step = {"batches": [describe(batch) for batch in self.batches], "drawn": drawn, "metrics": measured}
            write(trainer, str(step), state_of(trainer, is_gathered=step == first) | {"of the step": of_step})


def write(trainer, when: str, record: dict[str, Any]) -> None:
    (trainer.out_dir / "records" / f"{when}-{ranks.global_rank()}.json").write_text(json.dumps(record))


def state_of(trainer, is_gathered: bool) -> dict[str, Any]:
    """Return the record. With ``is_gathered`` this is a collective."""
    optimizer, progress = trainer.run.checkpointer.optimizer, trainer.progress
    tensors, gathered = {}, {}
    for name, parameter in trainer.run.checkpointer.module.named_parameters():
        state = sharded_values(optimizer.state.get(shard_of(parameter), {}), parameter)
        for key, value in ({"weight": parameter.detach()} | state).items():
            full_name, is_sharded = f"{canonical_name(name)} {key}", isinstance(value, DTensor)
            tensors[full_name] = digest(value.to_local() if is_sharded else value)
            if is_gathered:
                unsharded = value.full_tensor() if is_sharded else value
                if ranks.global_rank() == 0:
                    gathered[full_name] = digest(unsharded) if is_sharded else tensors[full_name]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    generators = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    position = {name: getattr(progress, name) for name in ("step", "tokens", "samples")}
    return {
        "tensors": tensors,
        "groups": repr(groups),
        "random": {name: digest(state) for name, state in generators.items()},
        "position": position | {"order": repr(trainer.run.reader.state(progress.samples))},
        "gathered": gathered,
    }


def describe(batch: Batch) -> list[Any]:
    """Return the positions of the rows in the sample stream, their indices, and a digest of all numbers."""
    tensors = [batch.input_ids, batch.labels, *batch.packed.values(), *batch.values.values()]
    return [batch.sample_keys, batch.ids, digest("".join(map(digest, tensors)))]


def digest(value: Any) -> str:
    """Return the SHA-256 of a tensor with its shape and dtype, or of anything else as text."""
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(str(value).encode()).hexdigest()
    hashed = hashlib.sha256(f"{tuple(value.shape)} {value.dtype}".encode())
    hashed.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()
