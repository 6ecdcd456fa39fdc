"""
Debate: two debaters write at the same moment, read each other and revise, and a judge picks one of the two answers.

    accelerate launch --config_file recipes/zero2.yaml recipes/train_shppo.py --config recipes/configs/qwen2.5-coder-1.5b.yaml \\
        --workflow recipes/examples/debate.py:Debate
"""

import re

from marcog_trl import Agent, Slot, Workflow


class Debate(Workflow):
    agents = (
        Agent("first", "Write the Python function asked for below. Keep it simple. Code only."),
        Agent("second", "Write the Python function asked for below. Mind the edge cases. Code only."),
        Agent("judge", "Below are a problem and two answers. Which one is right? Reply with A or B."),
    )
    slots = (Slot("first"), Slot("second"), Slot("first", act=1), Slot("second", act=1), Slot("judge"))

    def play(self, problem):
        drafts = yield {name: self.ask(name, problem) for name in ("first", "second")}
        answers = yield {
            name: self.ask(
                name, problem, f"You wrote:\n{drafts[name]}", f"The other wrote:\n{drafts[other]}", "Revise."
            )
            for name, other in (("first", "second"), ("second", "first"))
        }
        ruling = yield {"judge": self.ask("judge", problem, f"A:\n{answers['first']}", f"B:\n{answers['second']}")}
        picks = re.findall(r"\b[AB]\b", ruling["judge"])
        return answers["second" if picks[-1:] == ["B"] else "first"]
