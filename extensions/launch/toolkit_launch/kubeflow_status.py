"""Report progress to Kubeflow Trainer (KEP-2779), for ``kubectl get trainjob``."""

import json
import os
import ssl
import time
from contextlib import ExitStack
from threading import Thread
from urllib.request import Request, urlopen

from toolkit.distributed import ranks
from toolkit.io.safe_parse import read_bounded
from toolkit.training.launch import Launch
from toolkit.training.run import Callback, Metrics, Run, late

SERVER = "KUBEFLOW_TRAINER_SERVER"
"""Prefix of three environment variables, set if the cluster has the feature gate TrainJobStatus."""
INTERVAL_S = TIMEOUT_S = 5.0


def make_callbacks(launch: Launch, stack: ExitStack) -> list[Callback]:
    """Return the callback on rank 0 of a run that Kubeflow started."""
    return [KubeflowStatus()] if os.environ.get(f"{SERVER}_URL") and ranks.global_rank() == 0 else []


class KubeflowStatus(Callback):
    """Sends progress, remaining time and the latest metrics, on rank 0.

    Training does not wait for the server: a thread sends, and a status that is due before the last request has ended is
    dropped. Only the first failure prints a warning.
    """

    def __init__(self) -> None:
        self.metrics: Metrics = {}
        self.next_at = 0.0  # seconds of training
        self.error: str | None = None  # the first; "" after its warning
        self.request = Thread()
        self.request.start()  # sends nothing; from here on there is a last request to wait for

    @late
    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        self.metrics |= metrics
        if metrics["seconds"] >= self.next_at and not self.request.is_alive():
            self.next_at = metrics["seconds"] + INTERVAL_S
            step, total = trainer.progress.step, trainer.display.total_steps
            # not 100 % before final/ is complete
            self._send(trainer, total and min(99, 100 * step // total), trainer.display.seconds_left(step))

    def on_train_end(self, trainer: Run) -> None:
        self.request.join(2 * TIMEOUT_S)
        self._send(trainer, 100, 0)
        self.request.join(2 * TIMEOUT_S)

    def _send(self, trainer: Run, percentage: int | None, seconds_left: float | None) -> None:
        if self.error:
            trainer.display.message(f"warning: the run's progress could not be sent to Kubeflow: {self.error}")
            self.error = ""
        status = {
            "progressPercentage": percentage,
            "estimatedRemainingSeconds": None if seconds_left is None else int(seconds_left),
            # the API limits names to 64 characters
            "metrics": [{"name": name[:64], "value": str(value)} for name, value in self.metrics.items()],
            "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self.request = Thread(target=self._post, args=[json.dumps({"trainerStatus": status}).encode()], daemon=True)
        self.request.start()

    def _post(self, body: bytes) -> None:
        try:
            # read the files for each request: Kubernetes renews them
            context = ssl.create_default_context(cafile=os.environ[f"{SERVER}_CA_CERT"])
            token = read_bounded(os.environ[f"{SERVER}_TOKEN"]).decode().strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            urlopen(Request(os.environ[f"{SERVER}_URL"], body, headers), None, TIMEOUT_S, context=context).close()
        except Exception as error:  # training continues, whatever the server, the network and the files do
            self.error = repr(error) if self.error is None else self.error
