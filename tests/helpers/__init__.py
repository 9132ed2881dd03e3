"""What several test files share; `tests/` is on the path (see pyproject.toml)."""
