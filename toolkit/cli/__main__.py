"""``python -m toolkit.cli``."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
