"""
Best of n: solvers write at the same moment, and the program that passes most of the visible tests is the solution.

    accelerate launch --config_file recipes/zero2.yaml recipes/train_magrpo.py --config recipes/configs/qwen2.5-coder-1.5b.yaml \\
        --workflow recipes/examples/best_of_n.py:BestOfN --num_agents 3
"""

from marcog_trl import Agent, Execute, Workflow
from marcog_trl.problems import solution_job
from marcog_trl.workflows.feedback import shown_tests


class BestOfN(Workflow):
    needs_tests = True

    def __init__(self, num_agents=3, visible_tests=1):
        role = "Write the Python function asked for below. Code only."
        self.agents = tuple(Agent(f"solver{i}", role) for i in range(1, num_agents + 1))
        self.visible_tests = visible_tests

    def play(self, problem):
        replies = yield {agent.name: self.ask(agent.name, problem) for agent in self.agents}
        verdicts = yield Execute([solution_job(problem, reply) for reply in replies.values()])
        passed = [
            sum(result.status == "passed" for _, result in shown_tests(verdict, self.visible_tests))
            for verdict in verdicts
        ]
        return list(replies.values())[passed.index(max(passed))]
