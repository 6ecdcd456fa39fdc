"""The package as it is installed: its dependencies, and a wheel that runs without the checkout."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from marcog_trl.trainers import config


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


def test_a_version_of_trl_that_was_not_tested_is_named(monkeypatch):
    assert f"trl=={config.TESTED_TRL}" in (ROOT / "recipes" / "constraints.txt").read_text().split()
    monkeypatch.setattr(config, "version", lambda name: "1.17.0")
    with pytest.warns(UserWarning, match=r"tested with trl 1\.16\.0, and this is 1\.17\.0"):
        config.warn_of_untested_trl()


# Uses every kind of file that the package reads at run time: templates, metric modules, the workers' sources
USE = """
import sys
from pathlib import Path

import evaluate

import marcog_trl
from marcog_trl.execution import CodeExecutor, Job

folder = Path(marcog_trl.__file__).parent
assert str(folder.parent) == sys.argv[1], folder
for name in marcog_trl.__all__:
    getattr(marcog_trl, name)
evaluate.load(str(folder / "evaluation" / "pass_at_k"))
with CodeExecutor(1, isolation="best_effort") as executor:
    [verdict] = executor.run([Job("def f(x): return x", ["assert f(1) == 1"])])
assert verdict.status == "passed", verdict
"""


class TestWheel:
    @pytest.fixture(scope="class")
    def installed(self, tmp_path_factory):
        """Folder with the package, installed from a wheel."""
        folder = tmp_path_factory.mktemp("wheel")
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / "marcog_trl", folder / "source" / "marcog_trl", ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder / "source")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        offline = ["--no-deps", "--no-index"]
        build = ["wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
        subprocess.run([*pip, *build], check=True)
        [wheel] = folder.glob("*.whl")
        subprocess.run([*pip, "install", *offline, "--target", folder / "site", wheel], check=True)
        return folder / "site"

    def run(self, installed, *argv):
        """What Python prints with the installed package, far from the checkout."""
        environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [sys.executable, *argv], cwd=installed.parent, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_has_every_file(self, installed):
        def files(package):
            own = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
            return {path for path in own if path.suffix not in (".pyc", ".md")}

        assert files(ROOT / "marcog_trl") <= files(installed / "marcog_trl")

    def test_runs(self, installed):
        self.run(installed, "-c", USE, str(installed))

    def test_has_a_command_line(self, installed, tiny_model):
        assert "--problem" in self.run(installed, installed / "bin" / "marcog-trl", "solve", "--help")
        config = ["--config", "qwen2.5-coder-0.5b-cpu-fixer", "--prompt-tokens", "99", "--trainer", "magrpo"]
        planned = self.run(installed, "-m", "marcog_trl", "plan", *config, "--model_name_or_path", tiny_model)
        assert "A rollout has" in planned
