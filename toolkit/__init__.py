"""toolkit: pretrain language models with Lightning Fabric."""

import os

# Must stand before torch starts its threads. By default they wait for each other by spinning, which made training three
# times slower beside another busy process (two cores, one of them taken).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
