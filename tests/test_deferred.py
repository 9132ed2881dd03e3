import importlib
import sys

import pytest

from toolkit.deferred import defer


def test_a_package_is_executed_at_the_first_name_that_it_defines(tmp_path, monkeypatch):
    package = tmp_path / "deferred_package"
    package.mkdir()
    (package / "part.py").write_text("value = 1")
    (package / "other.py").write_text("import deferred_package\nname = deferred_package.__name__")
    init = "import sys\nfrom deferred_package import part\nimport deferred_package.other\nNAME = part.value + 1"
    (package / "__init__.py").write_text(init)
    monkeypatch.syspath_prepend(tmp_path)
    defer(("deferred_package", "no_such_package"))
    try:
        assert importlib.import_module("deferred_package.part").value == 1
        module = sys.modules["deferred_package"]
        assert module.part.value == 1 and "NAME" not in vars(module)
        with pytest.raises(AttributeError, match="no attribute 'missing'"):
            module.missing  # noqa: B018
        assert vars(module)["NAME"] == 2 and module.other.name == "deferred_package"
        from deferred_package import NAME

        assert NAME == 2 and "no_such_package" not in sys.modules
    finally:
        for name in [name for name in sys.modules if name.startswith("deferred_package")]:
            del sys.modules[name]


@pytest.mark.slow
def test_lightning_is_whole_for_who_uses_it():
    from lightning import Fabric, __version__
    from lightning.fabric import Fabric as TheSame

    assert Fabric is TheSame and __version__.startswith("2.")
