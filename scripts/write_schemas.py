"""Write config_hub/schema/COMMAND.json for the training commands, without installed extensions."""

import contextlib
from pathlib import Path

from toolkit import extension
from toolkit.cli import main
from toolkit.commands import TRAINING

extension._installed = dict
for command in TRAINING:
    path = Path(__file__).parents[1] / "config_hub" / "schema" / f"{command}.json"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file, contextlib.redirect_stdout(file):
        main(["schema", command])
