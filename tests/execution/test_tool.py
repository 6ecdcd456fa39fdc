"""`python_tool`: what agents see of the programs that they run."""

import pytest
from transformers.utils import get_json_schema

from marcog_trl.execution import CodeExecutor, Job, python_tool
from marcog_trl.execution.tool import CHARACTERS


def test_returns_what_is_printed():
    assert python_tool("for i in range(3):\n    print(i, 'é')") == "0 é\n1 é\n2 é"


def test_says_that_nothing_was_printed():
    assert python_tool("x = 2") == "The program printed nothing."


def test_long_output_is_cut():
    output = python_tool(f"print('a' * {2 * CHARACTERS})")
    assert output == "a" * CHARACTERS + " ... (cut)"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('before')\n1 / 0", "before\nZeroDivisionError: division by zero (line 2)"),
        ("def (", "SyntaxError: invalid syntax (line 1, column 5)"),
        ("open('/etc/passwd')", "PermissionError: [Errno 13] Permission denied: '/etc/passwd' (line 1)"),
        ("x = 'a' * 10**9", "MemoryError (line 1)"),
        ("print('before', flush=True)\nwhile True: pass", "before\ntime limit reached"),
    ],
)
def test_failures_are_raised_with_the_output_before(monkeypatch, code, message):
    monkeypatch.setattr("marcog_trl.execution.tool.SECONDS", 0.5)
    with pytest.raises(RuntimeError) as error:
        python_tool(code)
    assert str(error.value) == message


def test_its_schema_asks_for_code_only():
    schema = get_json_schema(python_tool)["function"]
    assert list(schema["parameters"]["properties"]) == ["code"] and "prints" in schema["description"]


def test_output_is_kept_only_if_a_job_asks_for_it():
    job = {"code": "print(input() * 3)", "tests": [("ab", "ababab"), ("c", "d")], "test_format": "stdio"}
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        kept, other = executor.run([Job(**job, kept_output=4), Job(**job)])
    assert [(result.status, result.output) for result in kept.tests] == [("passed", "abab"), ("failed", "ccc\n")]
    assert [result.output for result in other.tests] == ["", ""]
    with pytest.raises(ValueError, match="kept_output=-1"), CodeExecutor(num_workers=1) as executor:
        executor.run([Job(**job, kept_output=-1)])
