"""Diagnose a machine, a cluster or a layout: `toolkit doctor` and `toolkit verify_parallel`."""
