"""What the recorder sees of storages without data."""

import sys

import torch
from toolkit_plan.measure.recorder import Recorder


def test_no_python_code_runs_when_a_storage_is_freed():
    """Python would discard a Ctrl-C that arrives in such code."""
    calls = []
    with Recorder("forward") as recorder:
        tensor = torch.empty(4, device="meta")
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    del tensor
    sys.setprofile(None)
    recorder.phase = "backward"  # later than the free
    assert calls == []
    assert [(change, phase) for _, change, phase in recorder.changes] == [(16, "forward"), (-16, "forward")]
