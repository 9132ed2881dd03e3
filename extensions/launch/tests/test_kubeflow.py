"""Progress for Kubeflow Trainer: what its server receives over HTTPS, and that a run never waits for it or fails."""

import json
import ssl
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from threading import Event, Thread
from time import time
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from helpers.groups import free_port
from toolkit_launch import kubeflow_status
from toolkit_launch.kubeflow_status import KubeflowStatus

import toolkit
from toolkit.ui.loggers import read_metrics


class Server(ThreadingHTTPServer):
    """Keeps what it receives. ``answer`` is the status code; while it is None, requests wait."""

    daemon_threads, block_on_close = True, False

    def __init__(self, answer=200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.received, self.tokens = answer, [], []
        self.arrived, self.answers = Event(), Event()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.received.append((self.path, self.headers["Content-Type"], body["trainerStatus"]))
        server.tokens.append(self.headers["Authorization"])
        server.arrived.set()
        if server.answer is None:
            server.answers.wait()
        self.send_response(server.answer or 200)
        self.end_headers()

    def log_message(self, *args):
        pass


def certificate(folder):
    """Write a certificate authority that is also the server's certificate, and its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "t")])
    now, public = datetime.now(timezone.utc), key.public_key()
    usage = {"digital_signature": True, "key_cert_sign": True, "crl_sign": True}
    usage |= dict.fromkeys(["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"], False)
    builder = (
        x509.CertificateBuilder(name, name, public, x509.random_serial_number(), now - timedelta(1), now + timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .add_extension(x509.KeyUsage(**usage, encipher_only=False, decipher_only=False), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), False)
    )
    pem = serialization.Encoding.PEM
    folder.mkdir()
    (folder / "ca.crt").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key").write_bytes(key.private_bytes(pem, *plain))
    return folder


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """A function that starts a server with the variables of a TrainJob's pod."""

    @contextmanager
    def start(answer=200):
        folder, server = certificate(tmp_path / "tls"), Server(answer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        (tmp_path / "token").write_text("first\n")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{server.server_port}/jobs/mine/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(folder / "ca.crt"))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.answers.set()
            server.shutdown()
            thread.join()
            server.server_close()

    return start


class AtStep(toolkit.Callback):
    """Calls ``action`` with the run's KubeflowStatus after step 2, when the server has the first status."""

    def __init__(self, server, action):
        self.server, self.action = server, action

    def on_step_end(self, trainer, metrics):
        if trainer.progress.step == 2:
            assert self.server.arrived.wait(120)
            self.action(*(c for c in trainer.callbacks if isinstance(c, KubeflowStatus)))


def train(folder, server, action):
    sizes = {"max_steps": 4, "max_seq_length": 16, "global_batch_size": 2, "micro_batch_size": 2, "log_interval": 1}
    toolkit.train(
        "pico-llama", toolkit.data.SyntheticTokens(), train=sizes, devices=1, accelerator="cpu", out_dir=folder / "out",
        callbacks=[AtStep(server, action)],
    )  # fmt: skip


def test_the_server_gets_the_progress_of_a_run(serve, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kubeflow_status, "INTERVAL_S", 0.0)

    def renew_token(status):
        status.request.join()
        (tmp_path / "token").write_text("second")

    with serve() as server:
        train(tmp_path, server, renew_token)
    assert "warning" not in capsys.readouterr().out
    paths, types, statuses = zip(*server.received, strict=True)
    assert {*paths} == {"/jobs/mine/status"} and {*types} == {"application/json"}
    assert server.tokens == ["Bearer first"] + ["Bearer second"] * (len(statuses) - 1)
    percentages = [status["progressPercentage"] for status in statuses]
    assert percentages[0] == 25 and percentages[-1] == 100 and percentages == sorted(percentages)
    # unknown after the first step, which may compile; then whole seconds, which Go requires
    assert statuses[0]["estimatedRemainingSeconds"] is None and statuses[-1]["estimatedRemainingSeconds"] == 0
    assert all(type(status["estimatedRemainingSeconds"]) is int for status in statuses[1:])
    values = {metric["name"]: metric["value"] for metric in statuses[-1]["metrics"]}
    rows = read_metrics(tmp_path / "out/logs/metrics.csv")
    assert values["step"] == "4" and float(values["loss"]) == rows[-1]["loss"] and float(values["tokens_per_sec"]) > 0
    assert abs(datetime.fromisoformat(statuses[-1]["lastUpdatedTime"][:-1] + "+00:00").timestamp() - time()) < 3600


def test_training_does_not_wait_for_a_server_that_hangs(serve, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kubeflow_status, "TIMEOUT_S", 120)
    pending = []
    with serve(answer=None) as server:

        def go_on(status):
            pending.append(status.request.is_alive())
            server.answer = 500
            server.answers.set()

        train(tmp_path, server, go_on)
    assert pending == [True]
    printed = capsys.readouterr().out
    assert printed.count("could not be sent to Kubeflow: <HTTPError 500") == 1 and "finished after 4 steps" in printed


@pytest.mark.parametrize("name", ["500", "timeout", "refused", "CA", "token", "variable"])
def test_a_failure_is_one_warning(serve, tmp_path, monkeypatch, name):
    problems = {
        "500": "HTTPError 500",
        "timeout": "timed out",
        "refused": "Connection refused",
        "CA": "CERTIFICATE_VER",
    }
    problems |= {"token": "FileNotFoundError", "variable": "KeyError('KUBEFLOW_TRAINER_SERVER_TOKEN')"}
    lines, status = [], KubeflowStatus()
    display = SimpleNamespace(message=lines.append, total_steps=None, seconds_left=lambda step: None)
    run = SimpleNamespace(display=display, progress=SimpleNamespace(step=1))
    with serve({"500": 500, "timeout": None}.get(name, 200)) as server:
        if name == "timeout":
            monkeypatch.setattr(kubeflow_status, "TIMEOUT_S", 0.1)
        elif name == "refused":
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{free_port()}/")
        elif name == "CA":
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate(tmp_path / "other") / "ca.crt"))
        elif name == "token":
            (tmp_path / "token").unlink()
        elif name == "variable":
            monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_TOKEN")
        for seconds in (0.5, 5.4, 5.6, 10.7):  # the second is too early
            status.on_log(run, {"seconds": seconds, "loss": float("nan")})
            status.request.join()
        status.on_train_end(run)
    (line,) = lines
    assert problems[name] in line and "first" not in line and "\n" not in line
    assert len(server.received) == {"500": 4, "timeout": 4}.get(name, 0)
