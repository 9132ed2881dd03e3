"""Save and load training state (optimizer and loop), in one file or sharded, and resolve ``--resume``."""
