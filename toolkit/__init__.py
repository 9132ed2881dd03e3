"""toolkit: pretrain language models with Lightning Fabric."""

import os

# Must stand before torch starts its threads. They wait for each other by spinning, by default for so long that training
# became eight times slower beside another busy process (two cores, one of them taken). Ten thousand turns cost nothing
# on a quiet machine, and then a thread sleeps. Read by GNU's OpenMP, which torch's builds for Linux use.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
