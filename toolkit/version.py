"""The version of toolkit, without imports."""

__version__ = "0.1.0"
