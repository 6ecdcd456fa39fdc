"""
A helper and a main coder, of whom the main coder can run Python before it answers. Needs a model that can call tools.

    accelerate launch --config_file recipes/zero2.yaml recipes/train_magrpo.py --model_name_or_path Qwen/Qwen3-1.7B \\
        --workflow recipes/examples/checked.py:CheckedCollaboration --max_completion_length 1024
"""

from dataclasses import replace

from marcog_trl import Collaboration, python_tool


class CheckedCollaboration(Collaboration):
    def __init__(self, num_agents=2, num_turns=1, feedback="level_feedback", visible_tests=1):
        super().__init__(num_agents, num_turns, feedback, visible_tests)
        *helpers, main = self.agents
        role = f"{main.role} Before you answer, you may try code with python_tool."
        self.agents = (*helpers, replace(main, role=role, tools=[python_tool]))
