"""What the package says of itself: its dependencies."""

import ast
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {"yaml": "pyyaml"}  # where they have other names than what is imported
OWN = {"marcog_trl", "sandbox"}  # `sandbox` is a folder of the package, which its workers import under this name


def imported(at_import):
    """The distributions that the package imports, all of them, or those that `import marcog_trl` needs."""
    names = set()
    for file in (ROOT / "marcog_trl").rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in tree.body if at_import else ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return {DISTRIBUTIONS.get(name, canonicalize_name(name)) for name in names - OWN - sys.stdlib_module_names}


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    extras = {
        canonicalize_name(Requirement(line).name)
        for extra, lines in project["optional-dependencies"].items()
        if extra != "test"
        for line in lines
    }
    assert imported(at_import=True) <= declared
    assert declared <= imported(at_import=False) <= declared | extras
