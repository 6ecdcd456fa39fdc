"""Published sets load from copies of their rows: right solutions pass, wrong ones fail. The problems are our own."""

import base64
import json
import pickle
import zlib

import pytest
from datasets import Dataset

from marcog_trl.execution import CodeExecutor
from marcog_trl.problems import check_problems, load_problems, solution_job
from marcog_trl.rewards import execution_reward


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1, isolation="best_effort", packages=["pytest"]) as made:
        yield made


DOUBLE = "n = int(input())\nprint(2 * n)"
STARTER = "class Solution:\n    def double(self, xs: List[int]) -> List[int]:\n        "
METHOD = "class Solution:\n    def double(self, xs: List[int]) -> List[int]:\n        return [2 * x for x in xs]"
FUNCTION = "def double(x):\n    return 2 * x"

APPS = [
    {"problem_id": 0, "question": "Double a number.", "solutions": json.dumps([DOUBLE]), "difficulty": "interview",
     "input_output": json.dumps({"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"]}), "url": "u", "starter_code": ""},
    {"problem_id": 1, "question": "Double a list.", "solutions": json.dumps([METHOD]), "difficulty": "introductory", "url": "u",
     "input_output": json.dumps({"fn_name": "double", "inputs": [[[1, 2]], [[]]], "outputs": [[[2, 4]], [[]]]}), "starter_code": STARTER},
]  # fmt: skip
TACO = [
    {**{k: v for k, v in row.items() if k != "problem_id"}, "raw_tags": "[]", "name": None, "source": "codeforces", "tags": "[]",
     "skill_types": "[]", "time_limit": "2.0 seconds", "memory_limit": None}
    for row in APPS
]  # fmt: skip


def packed(cases):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


LIVECODEBENCH = [
    {"question_title": "A", "question_content": "Double a number.", "platform": "atcoder", "question_id": "abc1_a", "contest_id": "abc1",
     "contest_date": "2024-01-01T00:00:00", "starter_code": "", "difficulty": "easy", "metadata": "{}",
     "public_test_cases": json.dumps([{"input": "1\n", "output": "2", "testtype": "stdin"}]),
     "private_test_cases": packed([{"input": "4\n", "output": "8", "testtype": "stdin"}])},
    {"question_title": "B", "question_content": "Double a list.", "platform": "leetcode", "question_id": "3000", "contest_id": "w1",
     "contest_date": "2024-01-01T00:00:00", "starter_code": STARTER, "difficulty": "easy", "metadata": '{"func_name": "double"}',
     "public_test_cases": json.dumps([{"input": "[1, 2]", "output": "[2, 4]", "testtype": "functional"}]),
     "private_test_cases": json.dumps([{"input": "[]", "output": "[]", "testtype": "functional"}])},
]  # fmt: skip
PRIME = [
    {"data_source": "taco", "ability": "code", "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "Double it."}],
     "reward_model": {"ground_truth": APPS[0]["input_output"], "style": "rule"}, "extra_info": {"index": 0, "split": "train"}},
    {"data_source": "apps", "ability": "code", "prompt": [{"role": "user", "content": "Write double(x)."}],
     "reward_model": {"ground_truth": json.dumps({"fn_name": "double", "inputs": [[1], [4]], "outputs": [[2], [8]]}), "style": "rule"},
     "extra_info": {"index": 1, "split": "train"}},
]  # fmt: skip
VERIFIABLE = [
    {"source": "taco", "task_type": "verifiable_code", "in_source_id": "1", "prompt": "Double it.", "problem_id": "vfc_1",
     "gold_standard_solution": DOUBLE, "metadata": "{}", "verification_info": json.dumps({"language": "python", "test_cases": [
         {"fn_name": None, "input": given, "output": wanted, "type": "stdin_stdout"} for given, wanted in (("1\n", "2\n"), ("4\n", "8\n"))]})},
]  # fmt: skip
DEEPCODER = [
    {"problem": "Double it.", "solutions": [f"```python\n{DOUBLE}\n```"], "starter_code": "",
     "tests": json.dumps({"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"]})},
    {"problem": "Double it.", "solutions": [f"```python\n{DOUBLE}\n```"], "starter_code": "",
     "tests": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "4", "output": "8", "testtype": "stdin"}])},
]  # fmt: skip
LEETCODE = [
    {"task_id": "double", "question_id": 1, "difficulty": "Easy", "tags": ["Array"], "problem_description": "Double a list.",
     "starter_code": STARTER, "prompt": "import math\nfrom typing import *\nfrom collections import *\ninf = float('inf')\n",
     "completion": METHOD, "entry_point": "Solution().double", "query": "You are an expert. Double a list.", "response": "",
     "input_output": [{"input": "xs = [1, 2]", "output": "[2, 4]"}],
     "test": "def check(candidate):\n    assert candidate(xs = [1, 2]) == [2, 4]\n    assert candidate(xs = []) == []\n"},
    {"task_id": "total", "question_id": 2, "difficulty": "Easy", "tags": ["List"], "problem_description": "Add up a list.",
     "starter_code": "class Solution:\n    def total(self, head: Optional[ListNode]) -> int:\n        ",
     "prompt": "from typing import *\n\nclass ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n"
     "        self.next = next\n\ndef list_node(values: list):\n    node = None\n    for value in reversed(values):\n"
     "        node = ListNode(value, node)\n    return node\n",
     "completion": "class Solution:\n    def total(self, head):\n        return 0 if head is None else head.val + self.total(head.next)",
     "entry_point": "Solution().total", "query": "Add up.", "response": "", "input_output": [{"input": "head = [1, 2]", "output": "3"}],
     "test": "def check(candidate):\n    assert candidate(head = list_node([1, 2])) == 3\n    assert candidate(head = list_node([])) == 0\n"},
]  # fmt: skip
KODCODE = [
    {"version": "v1.0", "style": "instruct", "subset": "Prefill", "question_id": "Prefill_1_I", "question": "Double a number.",
     "solution": FUNCTION, "test": "from solution import double\n\ndef test_one():\n    assert double(1) == 2\n\ndef test_four():\n"
     "    assert double(4) == 8\n", "gpt_difficulty": "easy", "gpt_pass_percentage": 1.0,
     "test_info": [{"docstring": "", "function_declaration": "def double(x):", "function_name": "double", "parameter_list": "(x)"}]},
    {"version": "v1.0", "style": "complete", "subset": "Prefill", "question_id": "Prefill_2_C", "question": "def double(x): ...",
     "solution": FUNCTION, "test": "import pytest\nfrom solution import double\n\n"
        "def test_all():\n    assert double(1.5) == pytest.approx(3)\n\ndef test_errors():\n    with pytest.raises(TypeError):\n"
     "        double(None)\n", "gpt_difficulty": "easy", "gpt_pass_percentage": 1.0,
     "test_info": [{"docstring": "", "function_declaration": "def double(x):", "function_name": "double", "parameter_list": "(x)"}]},
]  # fmt: skip
PLUS = (
    "def assertion(out, exp, atol):\n    if atol == 0 and isinstance(exp, float):\n        atol = 1e-6\n"
    "    assert out == exp, f'out: {out}, exp: {exp}'\n\n"
)
CASES = "inputs = [[1], [4], [-3]]\nresults = [2, 8, -6]\n"
MBPPPLUS = [
    {"task_id": task_id, "code": FUNCTION, "prompt": "Write a function to double a number.", "source_file": "f.ipynb",
     "test_imports": [], "test_list": ["assert double(1) == 2"],
     "test": f"{PLUS}{CASES}for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(double(*inp), exp, 0)\n"}
    for task_id in (2, 3)
]  # fmt: skip
HUMANEVALPLUS = [
    {"task_id": f"HumanEval/{i}", "prompt": 'def double(x):\n    """Double x."""\n', "canonical_solution": "    return 2 * x\n",
     "entry_point": "double", "test": f"{PLUS}def check(candidate):\n    {CASES.rstrip().replace(chr(10), chr(10) + '    ')}\n"
     "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assertion(candidate(*inp), exp, 0)\n"}
    for i in (0, 1)
]  # fmt: skip
BIGCODEBENCH = [
    {"task_id": f"BigCodeBench/{i}", "complete_prompt": 'import math\n\ndef task_func(x):\n    """Double x."""\n',
     "instruct_prompt": "Double x. You should write self-contained code starting with:\n```\nimport math\ndef task_func(x):\n```",
     "canonical_solution": "    return math.prod([2, x])", "code_prompt": "import math\ndef task_func(x):\n",
     "test": "import unittest\nclass TestCases(unittest.TestCase):\n    def test_one(self):\n        self.assertEqual(task_func(1), 2)\n"
     "    def test_four(self):\n        self.assertEqual(task_func(4), 8)\n",
     "entry_point": "task_func", "doc_struct": "{}", "libs": "['math']"}
    for i in (0, 1)
]  # fmt: skip
PROGRAM, WRONG = f"```python\n{DOUBLE}\n```", "```python\nprint(input())\n```"
SETS = {
    "apps": (APPS, [(PROGRAM, WRONG), (METHOD, METHOD.replace("2 *", "3 *"))]),
    "taco": (TACO, [(PROGRAM, WRONG), (METHOD, METHOD.replace("2 *", "3 *"))]),
    "livecodebench": (LIVECODEBENCH, [(PROGRAM, WRONG), (METHOD, METHOD.replace("2 *", "3 *"))]),
    "prime": (PRIME, [(PROGRAM, WRONG), (FUNCTION, "def double(x):\n    return x")]),
    "verifiable": (VERIFIABLE, [(PROGRAM, WRONG)]),
    "deepcoder": (DEEPCODER, [(PROGRAM, WRONG)] * 2),
    "leetcode": (LEETCODE, [(METHOD, METHOD.replace("2 *", "3 *")), (LEETCODE[1]["completion"], STARTER.replace("double", "total") + "return 1")]),
    "kodcode": (KODCODE, [(FUNCTION, "def double(x):\n    return 3 * x")] * 2),
    "mbppplus": (MBPPPLUS, [(FUNCTION, "def double(x):\n    return abs(2 * x)")] * 2),
    "humanevalplus": (HUMANEVALPLUS, [(FUNCTION, "def double(x):\n    return abs(2 * x)")] * 2),
    "bigcodebench": (BIGCODEBENCH, [("def task_func(x):\n    return math.prod([2, x])", "def task_func(x):\n    return 3 * x")] * 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", SETS)
def test_right_solutions_of_published_sets_pass(tmp_path, executor, name, kind):
    rows, replies = SETS[name]
    write = Dataset.from_list(rows).to_parquet if kind == "parquet" else Dataset.from_list(rows).to_json
    write(tmp_path / f"set.{kind}")
    problems = load_problems(str(tmp_path / f"set.{kind}"))
    assert len(problems) == len(rows)
    check_problems(name, problems, {"prompt": "agents", "test": "reward"}, packages=["pytest"])
    right, wrong = zip(*replies, strict=True)
    jobs = [
        solution_job(problem, reply) for side in (right, wrong) for problem, reply in zip(problems, side, strict=True)
    ]
    verdicts = executor.run(jobs)
    assert [verdict.status for verdict in verdicts[: len(rows)]] == ["passed"] * len(rows), verdicts[: len(rows)]
    assert all(verdict.status == "failed" for verdict in verdicts[len(rows) :]), verdicts[len(rows) :]
    columns = {column: problems[column][:] for column in problems.column_names if column != "prompt"}
    given = {"prompts": problems["prompt"][:], "executor": executor, **columns}
    assert execution_reward(completions=list(right), **given) == [1.0] * len(rows)
    assert max(execution_reward(completions=list(wrong), **given)) < 1


def test_references_pass(tmp_path, executor):
    for name in ("apps", "leetcode", "kodcode", "mbppplus", "humanevalplus", "bigcodebench"):
        Dataset.from_list(SETS[name][0]).to_parquet(tmp_path / f"{name}.parquet")
        problems = load_problems(str(tmp_path / f"{name}.parquet"))
        jobs = [solution_job(problem, problem["canonical_solution"]) for problem in problems]
        assert [verdict.status for verdict in executor.run(jobs)] == ["passed"] * len(problems), name


def test_tests_and_metadata_may_be_mappings(tmp_path, executor):
    cases = {"inputs": ["1\n"], "outputs": ["2\n"], "fn_name": None}
    functional = [{"input": "[1]", "output": "[2]", "testtype": "functional", "metadata": {"func_name": "double"}}]
    for row, reply in (
        ({**APPS[0], "input_output": cases}, DOUBLE),
        (
            {
                **LIVECODEBENCH[0],
                "public_test_cases": [{"input": "1", "output": "2", "testtype": "stdin"}],
                "metadata": {"a": 1},
            },
            DOUBLE,
        ),
        ({**PRIME[0], "reward_model": {"ground_truth": cases, "style": "rule"}}, DOUBLE),
        ({**VERIFIABLE[0], "verification_info": json.loads(VERIFIABLE[0]["verification_info"])}, DOUBLE),
        ({**DEEPCODER[0], "tests": cases}, DOUBLE),
        ({**DEEPCODER[0], "starter_code": STARTER, "tests": json.dumps(functional)}, METHOD),
    ):
        Dataset.from_list([row]).to_parquet(tmp_path / "set.parquet")
        (problem,) = load_problems(str(tmp_path / "set.parquet"))
        assert executor.run([solution_job(problem, reply)])[0].status == "passed"


def test_names_that_tests_use_come_from_any_block(executor):
    fence = "`" * 3
    reply = f"{fence}python\n{FUNCTION}\n{fence}\nand\n{fence}python\ndef triple(x):\n    return 3 * x\n{fence}"
    for test in (["assert double(1) == 2", "assert triple(1) == 3"], ["assert triple(double(1)) == 6"]):
        for entry_point in ("double", "triple"):
            problem = {
                "prompt": "Write double and triple.",
                "entry_point": entry_point,
                "test": test,
                "test_format": "asserts",
            }
            assert executor.run([solution_job(problem, reply)])[0].status == "passed"


def test_rows_without_tests_in_python_are_left_out(tmp_path):
    mathematics = {**PRIME[0], "ability": "math", "reward_model": {"ground_truth": "\\frac{1}{2}", "style": "rule"}}
    Dataset.from_list([*PRIME, mathematics]).to_parquet(tmp_path / "set.parquet")
    with pytest.warns(UserWarning, match="1 of the 3 rows .* have no tests and are left out"):
        assert len(load_problems(str(tmp_path / "set.parquet"))) == 2
    Dataset.from_list([*APPS, {**APPS[0], "input_output": ""}]).to_parquet(tmp_path / "apps.parquet")
    with pytest.warns(UserWarning, match="1 of the 3 rows .* have no tests and are left out"):
        assert len(load_problems(str(tmp_path / "apps.parquet"))) == 2


def test_rows_of_public_sets_whose_tests_cannot_be_run_are_left_out(tmp_path):
    fixture = {
        **KODCODE[0],
        "question_id": "Prefill_3_I",
        "test": "from solution import double\n\ndef test_one(tmp_path):\n    assert double(1)",
    }
    Dataset.from_list([*KODCODE, fixture]).to_parquet(tmp_path / "set.parquet")
    with pytest.warns(
        UserWarning,
        match="1 of the 3 rows .* cannot be used and are left out, such as 'Prefill_3_I': test_one takes tmp_path",
    ):
        assert len(load_problems(str(tmp_path / "set.parquet"))) == 2
    Dataset.from_list([fixture]).to_parquet(tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match="test_one takes tmp_path"):
        load_problems(str(tmp_path / "bad.parquet"))


@pytest.mark.parametrize("name", SETS)
def test_tests_of_ones_own_stay(tmp_path, name):
    rows = [{**row, "test": "assert double(7) == 14"} for row in SETS[name][0][:1]]
    Dataset.from_list(rows).to_parquet(tmp_path / "set.parquet")
    if name in ("humanevalplus", "bigcodebench", "leetcode"):
        rows = [{**row, "entry_point": "double"} for row in rows]
        Dataset.from_list(rows).to_parquet(tmp_path / "set.parquet")
    assert load_problems(str(tmp_path / "set.parquet"))["test"][:] == [["assert double(7) == 14"]]


def test_a_pickle_holds_text_only(tmp_path):
    bad = base64.b64encode(zlib.compress(pickle.dumps(print))).decode()
    Dataset.from_list([{**LIVECODEBENCH[0], "private_test_cases": bad}]).to_parquet(tmp_path / "set.parquet")
    with pytest.raises(pickle.UnpicklingError, match=r"the tests hold builtins\.print, but must be text"):
        load_problems(str(tmp_path / "set.parquet"))


def test_prompts_say_what_to_write(tmp_path):
    Dataset.from_list(APPS).to_parquet(tmp_path / "apps.parquet")
    program, method = load_problems(str(tmp_path / "apps.parquet"))["prompt"]
    assert program == "Double a number.\n\nRead from standard input and write to standard output."
    assert method.startswith("Double a list.\n\nComplete this code:\n```python\nclass Solution:\n    def double(")
    Dataset.from_list(KODCODE).to_parquet(tmp_path / "kodcode.parquet")
    assert (
        "It has to define:\n```python\ndef double(x): ...\n```"
        in load_problems(str(tmp_path / "kodcode.parquet"))[0]["prompt"]
    )
