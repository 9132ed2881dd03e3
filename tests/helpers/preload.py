"""What the fork server does once for the processes that it forks: imports, and what fills caches."""

from unittest import mock

import litdata  # noqa: F401
import tokenizers.implementations  # noqa: F401

from helpers import rank_worker  # noqa: F401
from helpers.surroundings import freeze_objects
from toolkit import extension
from toolkit.cli.parser import parse
from toolkit.training import rank_consistency
from toolkit.ui.events import package_versions

with mock.patch.object(extension, "_installed", dict):
    parse("pretrain", ["--data", "TextFiles", "--data.train_data_path", "."])
    parse("finetune_lora", [".", "--data", "JSON", "--data.json_path", "."])
package_versions()
rank_consistency._own_version()
freeze_objects()
