"""A reader who runs the commands of all pages in one folder, in the order of the site."""

import contextlib
import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import transformers
import yaml

from helpers.groups import start_server
from helpers.hub_stub import Hub
from helpers.processes import Forked, finish
from helpers.talker import make_talker
from helpers.tiny_configs import HF_CONFIGS
from helpers.tiny_models import randomize
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.data.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

OWN = "JSON --data.json_path faq.jsonl"
DEFAULT = "pretrain --config config_hub/pretrain/default.yaml"

# What cannot run here as written: a pattern of a command, what runs instead, the reason.
STAND_INS = [
    (r"git clone .*", "", "the folder is a clone"),
    (r"source \.venv/.*", "", "make pretrain writes it"),
    (r"python scripts/(benchmark|leaderboard).*", "", "minutes, and other tools' environments"),
    (r"(FAULTS=quick )?make test-faults.*|python -m tests.faults.*", "", "hours"),
    (r"python -m pytest .*", "", "test_extend_page_test_commands"),
    (r"torchrun .* train_\w+.py", "", "test_python_page.py"),
    (r"python scripts/smollm2_to_hf.py (\S+)", r"cp -r hub/talker \1", "the tiny model in its place"),
    (r"toolkit convert_from_hf \S+ checkpoints/HuggingFaceTB/\S+", "", "the second way to the same folder"),
    (r"toolkit .*\bepoch_1\b.*", "", "a folder of torchtune's"),
    (r"toolkit pretrain --config gpt2_train_cfg.yaml", "", "minGPT's file: extensions/foreign/tests"),
    (r"toolkit doctor --prove .*", "", "a GPU"),
    (r"(?!toolkit (plan|launch) ).*--(devices|nproc_per_node) 8.*", "", "eight GPUs"),
    (r"(.*) --push_to_hub \S+(.*)", r"\1\2", "tests/commands/test_push_to_hub.py"),
    (r".*--(eval\.)?tasks [\w,]*(arc_easy|hellaswag).*", "", "data of the hub"),
    (r".*HuggingFaceFW.*", "", "data of the hub"),
    (r"(.*--data) HuggingFace \S+ \S+ --data.packing best_fit \S+ 2048(.*)", rf"\1 {OWN}\2", "data of the hub"),
    (r"(.*--data) Alpaca(.*)", rf"\1 {OWN}\2", "data of the hub"),
    (r"(.*--data Preference --data)\.repo_id \S+(.*)", r"\1.json_path given_pairs.jsonl\2", "data of the hub"),
    (r".* > answers.jsonl", r"""\g<0>; sed -i 's/"text": "/&No. Not/' answers.jsonl""", "sentences"),
    (r"(toolkit pretrain) (gpt2|pythia-160m|smollm2-135m) (.*)", r"\1 pico-llama \3", "hours on a CPU"),
    (r"(.*--train\.max_tokens) \d\S+(.*)", r"\1 20000\2", "minutes"),
    (r"(.*--train\.max_steps) \d{4,}(.*)", r"\1 100\2", "minutes"),
    (r"(.*--train\.max_time) \d+(.*)", r"\1 0.02\2", "minutes"),
    (r"(toolkit pretrain --(?:train|optimizer).*)", r"\1 --train.global_batch_size 4", "minutes"),
    (r"make pretrain.*", f"toolkit {DEFAULT} --train.max_tokens 8192 --train.lr_warmup_steps 1", "minutes"),
]  # fmt: skip

# files that a page shows, named before the block
FILES = re.compile(r"`(\w+\.(?:py|yaml))`(?:[^`\n]|\n(?!\n))*:\n\n```(?:python|yaml)\n(.*?)```", re.S)
TRAINS = re.compile(r"^(?:\w+=\S+ )*toolkit (?!.*--dry_run)(?:pretrain|finetune_\w+) .*--out_dir (?!/|s3:)(\S+)", re.M)

# installs nothing: what the page installs must be there
PIP = """\
for word; do
    case $word in install|uninstall|-*|.*|*.txt|torchvision) ;; *)
    python -c "from importlib.metadata import version; version('${word%%[<>=]*}')" ;; esac
done"""
TOOLKIT = f"""\
if [ "$1" = serve ]; then
    {BIN}/toolkit "$@" --port $SERVER_PORT > serve.log 2>&1 < /dev/null &
    echo $! >> servers
    until grep -q "/v1 serves" serve.log; do kill -0 $!; sleep 0.1; done
else exec {sys.executable} -S bin/client.py "$@"; fi"""
CLIENT = """\
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect("bin/socket")
connection.sendall(json.dumps([sys.argv[1:], dict(os.environ)]).encode() + b"\\n")
code, out, err = json.load(connection.makefile())
sys.stdout.write(out), sys.stderr.write(err), sys.exit(code)
"""
COMMAND = """\
import os, sys, torch
from huggingface_hub import constants
from toolkit.cli import main
files = constants.HUGGINGFACE_CO_URL_TEMPLATE
constants.HUGGINGFACE_CO_URL_TEMPLATE = os.environ["HF_ENDPOINT"] + files[files.index("/{"):]
constants.ENDPOINT, constants.HF_HUB_OFFLINE = os.environ["HF_ENDPOINT"], False
torch.set_num_threads(1)  # makes the pool anew that a fork has broken, before transformers' threads race for it
if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
"""

# the programs of clusters: each resolves the options of the command in its file
CLUSTERS = {
    "sbatch": 'exec bash "$@"',
    "srun": 'exec "$@" --print_config',
    "kubectl": """exec python - "$3" <<'END'
import subprocess, sys, yaml
*_, job = yaml.safe_load_all(open(sys.argv[1]))
subprocess.run([*job["spec"]["trainer"]["command"], "--print_config"], check=True)
END""",
    "sky": """exec python - "${@: -1}" <<'END'
import subprocess, sys, yaml
command = yaml.safe_load(open(sys.argv[1]))["run"].rstrip()
subprocess.run(f"{command} --print_config", shell=True, check=True)
END""",
    "docker": 'until [ "$1" = --entrypoint=toolkit ]; do shift; done; shift 2; exec toolkit "$@" --print_config',
}


def pages() -> list[str]:
    """Return the names of the pages with commands, README first, in the order of the site."""
    names = re.findall(r"'([^']+)\.md'", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    return [name for name in names if commands_of(name)]


def text_of(page: str) -> str:
    path = ROOT / "README.md" if page == "index" else ROOT / "tutorials" / f"{page}.md"
    return path.read_text() if path.exists() else ""  # others are generated


def commands_of(page: str) -> list[str]:
    """Return the page's blocks of commands."""
    return re.findall(r"```bash\n(.*?)```", text_of(page), re.S)


def shorten(block: str) -> str:
    """Return the block with one command per line, and what runs here in place of what cannot."""
    commands = re.sub(r" *\\\n *", " ", block).split("\n")
    for pattern, instead, _ in STAND_INS:
        commands = [re.sub(rf"^{pattern}$", instead, command) for command in commands]
    return "\n".join(commands)


def add_commands(folder: Path, commands: dict[str, str]) -> None:
    """Write command stubs, as lines of bash."""
    (folder / "bin").mkdir()
    for name, lines in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash -e\n{lines}\n")
        (folder / "bin" / name).chmod(0o755)


def run(block: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run commands in the folder, with its stubs first on PATH."""
    path = os.pathsep.join([str(folder / "bin"), str(BIN), os.environ["PATH"]])
    done = subprocess.run(
        [shutil.which("bash"), "-e", "-c", block],
        cwd=folder, env=os.environ | {"PATH": path} | variables, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, block + done.stdout[-2000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done


class _Commands(socketserver.StreamRequestHandler):
    """Runs a command of toolkit, forked where torch is imported, in the current folder."""

    def handle(self) -> None:
        arguments, environ = json.loads(self.rfile.readline())
        out, err = finish(process := Forked(arguments, Path("bin", "command.py").absolute(), **environ), seconds=3000)
        self.wfile.write(json.dumps([process.returncode, out, err]).encode())


class Reader:
    """Has a clone of the repository and runs the pages' commands in it; the hub gets a tiny model for each name."""

    def __init__(self, folder: Path, hub: Hub, variables: dict[str, str]) -> None:
        start_server()
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = str(probe.getsockname()[1])
        cache = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
        self._variables = variables | cache | {"SERVER_PORT": self._port, "CUDA_VISIBLE_DEVICES": ""}
        for name in ("scripts", "config_hub", "tutorials"):
            (folder / name).symlink_to(ROOT / name)
        _write_models(folder / "hub", hub)
        _write_given(folder)
        add_commands(folder, CLUSTERS | {"pip": PIP, "toolkit": TOOLKIT})
        (folder / "bin" / "client.py").write_text(CLIENT)
        (folder / "bin" / "command.py").write_text(COMMAND)
        with contextlib.chdir(folder):  # the path of a socket is short
            self._server = socketserver.ThreadingUnixStreamServer("bin/socket", _Commands)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def read(self, page: str) -> None:
        """Write the files of the page, and run its commands. Its server runs until the next page."""
        self.stop_server()
        for name, content in FILES.findall(text_of(page)):
            (self.folder / name).write_text(content)
        for block in map(shorten, commands_of(page)):
            self.last = self.run(block)
            for out_dir in TRAINS.findall(block):
                assert (self.folder / out_dir / "final" / "COMPLETE").exists(), out_dir

    def run(self, commands: str) -> subprocess.CompletedProcess:
        with contextlib.chdir(self.folder):
            return run(commands.replace(":8000", f":{self._port}"), self.folder, **self._variables)

    def stop_server(self) -> None:
        self.run("touch servers; kill $(cat servers) 2> /dev/null || true; rm servers")

    def close(self) -> None:
        self.stop_server()
        self._server.shutdown()
        self._server.server_close()


def _write_given(folder: Path) -> None:
    """Write the files that the pages expect of their readers."""
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": f"{n} + 1?", "completion": f"{n + 1}"} for n in range(300)]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in rows[:40]]
    text = "The quick brown fox jumps over the lazy dog.\n" * 3000
    (folder / "faq.json").write_text(json.dumps(rows))
    for name, lines in (("faq.jsonl", rows), ("given_pairs.jsonl", pairs)):
        (folder / name).write_text("\n".join(map(json.dumps, lines)))
    for name in ("my_texts", "held_out", "my_shards"):
        (folder / name).mkdir()
    for name in ("input.txt", "my_texts/1.txt", "held_out/1.txt"):
        (folder / name).write_text(text)
    parquet.write_table(pyarrow.table({"text": [text[:4000]] * 40}), folder / "my_shards" / "1.parquet")


def _write_models(folder: Path, hub: Hub) -> None:
    """Put a tiny model into the hub under each name that the pages download; ``folder`` has them, too."""
    native = make_talker(folder / "native", block_size=512, n_merges=1)
    export_hf(native, folder / "talker")
    tokenizer, config = Tokenizer.load(native), HF_CONFIGS["olmoe"]()
    config.update({"intermediate_size": 64, "vocab_size": tokenizer.vocab_size})  # --quantize needs multiples of 64
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, seed=0)
    model.save_pretrained(folder / "experts")
    tokenizer.save(folder / "experts")
    for repo in {name for page in pages() for name in re.findall(r"toolkit download (\S+)", text_of(page))}:
        files = folder / ("experts" if "OLMoE" in repo else "talker")
        hub.add(repo, {str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.is_file()})
