"""Diagnostics of a machine, a cluster and a layout: `toolkit doctor` and `toolkit verify_parallel`."""
