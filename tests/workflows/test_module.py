"""Agents that write one function each."""

import pytest
from players import Executor, last, play

from marcog_trl import TeamSettings, load_problems
from marcog_trl.execution import Verdict
from marcog_trl.execution.jobs import plan
from marcog_trl.problems import solution_job
from marcog_trl.team.data_checks import fault_in
from marcog_trl.workflows import Module, Single


@pytest.fixture(scope="module")
def problem():
    return load_problems("modules", "test[:1]")[0]


def reply(problem):
    return f"```python\n{problem['canonical_solution']}```"


def spoiled(problem, name):
    return reply(problem).replace(f"def {name}(", f"def {name}(*rest):\n    return None\n\n\ndef other(")


class TestProblems:
    def test_splits(self):
        sizes = {split: len(load_problems("modules", split)) for split in ("train", "validation", "test")}
        assert sizes == {split: len(load_problems("builtin", split)) // 4 for split in sizes}
        with pytest.raises(ValueError, match="split='dev' of problem set 'modules' is invalid"):
            load_problems("modules", "dev")

    def test_solutions_pass(self, problem, executor):
        whole = Single().solution(problem, {"solver": reply(problem)})
        assert executor.run([solution_job(problem, whole)])[0].status == "passed"
        assert plan(solution_job(problem, whole)).total == len(problem["test"]) > 4


class TestPlay:
    @pytest.mark.parametrize("num_agents", [2, 4])
    def test_each_agent_is_asked_for_its_functions(self, problem, num_agents):
        workflow = Module(num_agents)
        [stage] = play(workflow, {agent.name: [""] for agent in workflow.agents}, problem=problem)
        asked = [
            name
            for prompt in stage.values()
            for name in last(prompt).split("Write only ")[1].split(". ")[0].split(" and ")
        ]
        assert sorted(asked) == problem["functions"] and len(stage) == num_agents
        assert all(problem["prompt"].strip() in last(prompt) for prompt in stage.values())

    def test_the_solution_has_each_function_from_its_agent(self, problem, executor):
        workflow = Module(2)
        replies = {"coder": spoiled(problem, "solve_2"), "coder2": spoiled(problem, "solve_1")}
        [verdict] = executor.run([solution_job(problem, workflow.solution(problem, replies))])
        assert verdict.status == "passed"
        [verdict] = executor.run(
            [
                solution_job(
                    problem, workflow.solution(problem, dict(zip(replies, reversed(replies.values()), strict=True)))
                )
            ]
        )
        assert isinstance(verdict, Verdict) and 0 < verdict.passed < verdict.total

    def test_what_does_not_fit(self, problem):
        workflow = TeamSettings(workflow="module", num_agents=5).make_workflow()
        assert "fewer than the 5 agents: set a smaller num_agents" in fault_in(problem, workflow, {})
        [other] = load_problems("builtin", "test[:1]")
        assert "its functions=[] are fewer than the 4 agents" in fault_in(other, Module(), {})
        with pytest.raises(ValueError, match="num_agents=1 must be at least 2"):
            Module(1)

    def test_feedback_names_what_is_missing(self, problem):
        replies = {"coder": [reply(problem), ""], "coder2": ["no code", ""]}
        workflow = Module(2, num_turns=2, feedback="level_feedback", visible_tests=0)
        _, second = play(workflow, replies, Executor("passed"), problem)
        assert "Definition of solve_3: found" in last(second["coder"])
        assert "Definition of solve_2: missing" in last(second["coder2"])
