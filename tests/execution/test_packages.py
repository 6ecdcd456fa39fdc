"""Installed packages that programs may import: those that the user names, with what they require, and no others."""

import importlib.util

import pytest

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.execution.packages import find_packages


pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("sympy"), reason="sympy is missing, which comes with torch"
)

SYMPY = "import sympy\ndef f(n): return str(sympy.factorint(n))"
TESTS = ["assert f(12) == '{2: 2, 3: 1}'"]


def test_named_packages_are_imported_once():
    with CodeExecutor(num_workers=1, isolation="best_effort", packages=["sympy"], timeout=60) as executor:
        (first,) = executor.run([Job(SYMPY, TESTS)])
        assert first.message == ""
        loaded = "import sys\nloaded = 'sympy' in sys.modules\nimport sympy\ndef f(n): return loaded"
        verdicts = executor.run([Job(f"{loaded}\n# {k}", ["assert f(12)"]) for k in range(2)])
        assert [verdict.message for verdict in verdicts] == ["", ""]
        in_tests = Job("def f(n): return [n]", ["import sympy\nassert sympy.Integer(f(3)[0]) == 3"])
        required = Job("import mpmath\ndef f(n): return str(mpmath.mpf(n))", ["assert f(12) == '12.0'"])
        others = Job("import packaging", ["assert f(12)"], entry_point="f")
        verdicts = executor.run([in_tests, required, others])
        assert [verdict.message for verdict in verdicts[:2]] == ["", ""]
        assert "No module named 'packaging'" in verdicts[2].message


def test_no_others_are_imported():
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        (verdict,) = executor.run([Job(SYMPY, TESTS)])
        assert verdict.status == "error" and "No module named 'sympy'" in verdict.message


def test_packages_cannot_be_changed():
    """A program cannot replace a package for the next program, in memory or on disk."""
    change = (
        "import sympy\nsympy.factorint = lambda n: n\nimport os\n"
        "def f(n):\n    try: open(sympy.__file__, 'a')\n    except OSError as error: return type(error).__name__"
    )
    with CodeExecutor(num_workers=1, isolation="best_effort", packages=["sympy"], timeout=60) as executor:
        changed, verdict = executor.run([Job(change, ["assert f(1) == 'PermissionError'"]), Job(SYMPY, TESTS)])
        assert (changed.message, verdict.message) == ("", "")


def test_what_is_required_comes_along():
    found = find_packages(["sympy"])
    assert {"sympy", "mpmath"} <= set(found.modules) and "sympy" in found.load and "mpmath" not in found.load
    assert "torch" not in found.modules and set(find_packages([]).modules) <= {"numpy"}
    assert find_packages(["huggingface-hub"]).load[0] == "huggingface_hub"  # by the name under which it is installed


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["sympy", "pandaz"], r"packages=\['sympy', 'pandaz'\]: 'pandaz' is not installed. Install it, or remove it"),
        ("sympy", "packages='sympy' must be a list of names"),
        ([3], r"packages=\[3\] must be a list of names"),
    ],
)
def test_packages_that_are_not_there(names, message):
    with pytest.raises(ValueError, match=message):
        CodeExecutor(isolation="best_effort", packages=names)
