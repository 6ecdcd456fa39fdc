"""A team that splits a class: who is asked for what, and that the merged class is the class."""

from pathlib import Path
from textwrap import indent

import pytest
from players import Executor, last, play

from marcog_trl.parsing.classes import read_part, skeleton_of
from marcog_trl.problems import load_problems, solution_job
from marcog_trl.workflows import Centralized, ClassTeam, make_workflow


DATA = Path(__file__).parents[1] / "data" / "classeval_20.json"
SKELETON = '''class Account:
    """Money."""

    def __init__(self):
        self.balance = 0

    def put(self, amount):
        """Put in; return the balance."""

    def take(self, amount):
        """Take out; return the balance."""

    def is_empty(self):
        """Whether there is nothing."""
'''
PROBLEM = {
    "task_id": "bank/1",
    "prompt": "Complete the class.",
    "starter_code": SKELETON,
    "entry_point": "Account",
    "test": "import unittest\n\nclass T(unittest.TestCase):\n    def test_put(self):\n        self.assertEqual(Account().put(2), 2)\n",
    "test_format": "unittest",
}
METHODS = {
    "put": "def put(self, amount):\n    self.balance += amount\n    return self.balance",
    "take": "def take(self, amount):\n    self.balance -= amount\n    return self.balance",
    "is_empty": "def is_empty(self):\n    return not self.balance",
}


@pytest.fixture(scope="module")
def problems():
    return list(load_problems(str(DATA), "test"))


def statuses(verdict):
    return [result.status for result in verdict.tests]


@pytest.mark.parametrize("num_agents", [2, 3])
def test_reference_solutions_that_are_split_and_merged_pass_as_they_do_whole(executor, problems, num_agents):
    """Each agent writes its methods of the reference, in one form or the other."""
    workflow = ClassTeam(num_agents)
    jobs = []
    for k, problem in enumerate(problems):
        skeleton = skeleton_of(problem)
        whole = read_part(problem["canonical_solution"], skeleton)
        imports = "\n".join(statement.text for statement in whole.module)
        # Helper methods and changes of given ones are nobody's: the first agent writes them
        others = tuple(name for name in whole.methods if name not in skeleton.asked)
        replies = {}
        for i, (agent, methods) in enumerate(workflow.assigned(problem).items()):
            written = [whole.methods[name] for name in (methods + others if i == 0 else methods)]
            forms = (
                "\n\n".join([imports, f"class {skeleton.name}:", *written]),
                "\n".join(f"Next:\n```python\n{part}\n```" for part in [imports, *written]),
                "\n\n".join(["Here they are:", imports, *written, "That's all."]),
            )
            if methods:
                replies[agent] = forms[(i + k) % 3]
        jobs.append(solution_job(problem, problem["canonical_solution"]))
        jobs.append(solution_job(problem, workflow.solution(problem, replies)))
    verdicts = executor.run(jobs)
    for problem, undivided, merged in zip(problems, verdicts[::2], verdicts[1::2], strict=True):
        assert statuses(merged) == statuses(undivided), (problem["task_id"], merged)
    # The tests of two classes fail with the reference as well
    assert sum(verdict.status == "passed" for verdict in verdicts) >= 2 * 18


def test_methods_are_dealt_evenly_and_always_alike(problems):
    for num_agents in (1, 2, 3, 5):
        for problem in problems:
            dealt = ClassTeam(num_agents).assigned(problem)
            sizes = [len(methods) for methods in dealt.values()]
            assert max(sizes) - min(sizes) <= 1
            assert sorted(name for methods in dealt.values() for name in methods) == sorted(skeleton_of(problem).asked)
            assert ClassTeam(num_agents).assigned(dict(problem)) == dealt
    deals = [ClassTeam().assigned(problem)["coder"] for problem in problems]
    asked = [skeleton_of(problem).asked for problem in problems]
    assert sum(methods == names[: len(methods)] for methods, names in zip(deals, asked, strict=True)) < 10
    # The same on every machine and in every process
    assert ClassTeam().assigned(PROBLEM) == {"coder": ("put", "is_empty"), "coder2": ("take",)}


def test_prompts_hold_the_class_and_the_methods():
    [stage] = play(ClassTeam(), {"coder": [""], "coder2": [""]}, problem=PROBLEM)
    for agent, methods in (("coder", "put, is_empty"), ("coder2", "take")):
        text = last(stage[agent])
        assert f"You are {agent} in a team" in text and f"Write only these methods: {methods}. Add" in text
        assert text.startswith(f"Complete the class.\n\n{SKELETON.rstrip()}\n\nYou are")
    [stage] = play(ClassTeam(split="pick"), {"coder": [""], "coder2": [""]}, problem=PROBLEM | {"prompt": SKELETON})
    assert "with coder2. All write at the same moment. Pick the methods that you write" in last(stage["coder"])
    for agent in ("coder", "coder2"):
        assert "The methods are: put, take, is_empty." in last(stage[agent])
        assert last(stage[agent]).count(SKELETON.rstrip()) == 1
    [stage] = play(ClassTeam(split="one"), {"coder": [""]}, problem=PROBLEM)
    assert list(stage) == ["coder"]
    assert "\n\nComplete this class. Write only these methods: put, take, is_" in last(stage["coder"])


def test_roles_may_be_replaced():
    workflow = ClassTeam(roles={"coder2": "Take care."})
    [stage] = play(workflow, {"coder": [""], "coder2": [""]}, problem=PROBLEM)
    assert last(stage["coder2"]).startswith("Take care. Write only these methods: take.")


def test_agents_without_a_method_are_silent(executor):
    workflow = ClassTeam(4, num_turns=2, feedback="plain")
    replies = {"coder": METHODS["take"], "coder2": METHODS["is_empty"], "coder3": METHODS["put"]}
    dealt = workflow.assigned(PROBLEM)
    by_agent = {agent: METHODS[methods[0]] for agent, methods in dealt.items() if methods}
    stages = play(workflow, {agent: [text, text] for agent, text in by_agent.items()}, problem=PROBLEM)
    assert [list(stage) for stage in stages] == [list(replies)] * 2
    [verdict] = executor.run([solution_job(PROBLEM, workflow.solution(PROBLEM, by_agent))])
    assert verdict.status == "passed"


def test_the_owner_of_a_method_has_the_last_word():
    other = "def take(self, amount):\n    return None"
    replies = {"coder": "\n\n".join([METHODS["put"], other]), "coder2": METHODS["take"]}
    assert "self.balance -= amount" in ClassTeam().solution(PROBLEM, replies)
    assert "self.balance -= amount" not in ClassTeam(split="pick").solution(PROBLEM, replies)
    assert "return None" in ClassTeam().solution(PROBLEM, replies | {"coder2": "I cannot."})


def feedback(replies, split="random", mode="level_feedback"):
    workflow = ClassTeam(split=split, num_turns=2, feedback=mode)
    _, stage = play(workflow, {agent: [text, ""] for agent, text in replies.items()}, Executor("failed"), PROBLEM)
    return {agent: last(prompt).split("\n") for agent, prompt in stage.items()}


def test_feedback_tells_each_agent_of_its_methods():
    replies = {
        "coder": METHODS["put"],
        "coder2": indent(METHODS["take"], "    ") + "\n\n    def put(self:\n        pass",
    }
    told = feedback(replies)
    assert told["coder"] == [
        "Method put: found",
        "Method is_empty: missing",
        "Syntax: no error",
        "Tests: 0 of 1 passed",
        "AssertionError",
        "Revise your answer. Answer with one Python code block.",
    ]
    assert told["coder2"][:2] == ["Method take: found", "Syntax: line 5, column 12: '(' was never closed"]
    told = feedback({"coder": "\n".join(METHODS.values()), "coder2": "I cannot."}, mode="level_passed")
    assert told["coder"][:4] == [
        "Method put: passed",
        "Method take: failed",
        "Method is_empty: passed",
        "Syntax: passed",
    ]
    assert told["coder2"][:2] == ["Method take: failed", "Syntax: passed"]


def test_feedback_to_agents_that_pick():
    told = feedback({"coder": METHODS["take"], "coder2": "I cannot."}, split="pick")
    assert told["coder"][:2] == ["Method take: found", "Syntax: no error"]
    assert told["coder2"][:2] == ["Methods: none found", "Syntax: no error"]


def test_a_single_agent_may_write_for_the_team():
    workflow = Centralized(ClassTeam())
    reply = f"<coder>\n{METHODS['put']}\n</coder>\n<coder2>\n{METHODS['take']}\n</coder2>"
    [stage] = play(workflow, {"team": [reply]}, problem=PROBLEM | {"prompt": SKELETON})
    assert last(stage["team"]).count("class Account") == 1
    parts = workflow.parts(PROBLEM, {"team": reply})
    assert "self.balance -= amount" in workflow.solution(PROBLEM, parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "fair"}, "split='fair' is unknown. Use one of 'random', 'pick', 'one'"),
        ({"num_agents": 0}, "num_agents=0 must be at least 1"),
        ({"num_agents": 2, "split": "one"}, "num_agents=2 does not fit split='one'"),
        ({"feedback": "loud"}, "feedback='loud' is unknown"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as error:
        make_workflow("classeval", **options)
    assert "\n" not in str(error.value)


def test_by_name():
    workflow = make_workflow("classeval", num_agents=2, split="pick")
    workflow.validate()
    assert isinstance(workflow, ClassTeam) and workflow.needs_entry_point and not workflow.needs_tests
    assert [agent.name for agent in make_workflow("classeval").agents] == ["coder", "coder2"]
    assert [agent.name for agent in make_workflow("classeval", split="one").agents] == ["coder"]


def test_a_problem_that_is_no_class_is_an_error():
    problem = PROBLEM | {"starter_code": "def f(x):\n    pass\n", "entry_point": "f"}
    with pytest.raises(ValueError, match=r"Problem 'bank/1' has entry_point='f'.* workflow='single' "):
        play(ClassTeam(), {}, problem=problem)
