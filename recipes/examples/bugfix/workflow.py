"""
Fixing bugs: a tester writes an assert that shows the bug in given code, and a fixer reads what it found and corrects the code.

See the README of this folder.
"""

from marcog_trl import Agent, Execute
from marcog_trl.parsing.asserts import assert_in
from marcog_trl.parsing.replies import code_in
from marcog_trl.problems import solution_job
from marcog_trl.workflows import FeedbackWorkflow


class Bugfix(FeedbackWorkflow):
    """
    The tester reads the problem and its code, which has a bug, and writes one assert. The assert is run on this code. The fixer
    reads code, assert and result, and writes the corrected function, which is the solution.

    The code is in the column `buggy_solution`. Problems without one have it in the prompt.

    Args:
        num_turns, feedback, visible_tests, roles, expert: See [`~marcog_trl.workflows.FeedbackWorkflow`].
    """

    needs_entry_point = True

    def __init__(self, num_turns=1, feedback="level_feedback", visible_tests=1, roles=None, expert=None):
        tester = Agent(
            "tester",
            "The code below has a bug. Write one assert that fails on this code and passes on correct code. Only the assert.",
        )
        fixer = Agent(
            "fixer",
            "The code below has a bug. A test was run on it, which may be wrong. Correct the code. Write the whole code. "
            "Code only.",
        )
        super().__init__((tester, fixer), num_turns, feedback, visible_tests, roles, expert)

    def _open(self, agent, problem, *texts):
        buggy = problem.get("buggy_solution")
        if not buggy and not isinstance(problem["prompt"], str):
            raise ValueError("it has no 'buggy_solution', the code with the bug. Add the column")
        code = ["Code:\n" + buggy.strip("\n").rstrip()] if buggy else []
        return super()._open(agent, problem, *code, *texts)

    def _turn(self, problem, chats):
        replies = dict((yield {"tester": chats["tester"]}))
        test, result = assert_in(replies["tester"], problem["entry_point"]), "Test: none"
        if test is not None:
            tested = {**problem, "test": [test], "test_format": "asserts", "setup": ""}
            [verdict] = yield Execute((solution_job(tested, problem.get("buggy_solution") or problem["prompt"]),))
            outcome = "could not be run" if verdict.status == "infrastructure" else verdict.message or "passed"
            result = f"Test: {test}\nResult: {outcome}"
        chats["fixer"] = self._tell(self.agents[1], problem, chats["fixer"], result)
        replies |= yield {"fixer": chats["fixer"]}
        return replies

    def solution(self, problem, replies):
        return code_in(problem, replies["fixer"])

    def _target(self, agent, problem):
        return None if agent.name == "tester" else problem["entry_point"]
