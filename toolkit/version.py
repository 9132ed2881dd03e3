"""The version of toolkit, without imports."""

__version__ = "0.2.0"
