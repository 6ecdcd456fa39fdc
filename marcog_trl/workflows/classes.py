"""Agents that share the methods of a class."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from typing import Any

from marcog_trl.agents import PLACE, Advisor, Agent, Prompt, ask, numbered, with_text
from marcog_trl.checks import COUNT, check_choice, check_number
from marcog_trl.parsing.classes import merge_class, read_part, skeleton_of
from marcog_trl.parsing.prompts import context_of, fill, messages_of
from marcog_trl.workflows.feedback import Feedback, Level, VisibleTests
from marcog_trl.workflows.rounds import CODE, FeedbackWorkflow


SPLITS = ("random", "pick", "one")


class ClassTeam(FeedbackWorkflow):
    """
    Agents that write the methods of one class at the same moment, without seeing each other's replies. The solution is the
    class with the methods of all agents. If several agents wrote a method, the version of the agent that was asked for it is
    used, else that of the first agent. Methods that nobody wrote stay as they are in the skeleton.

    Args:
        num_agents (`int`, *optional*, defaults to `2`, or `1` for `split="one"`): Size of the team.
        split (`str`, *optional*, defaults to `"random"`): How the methods are shared. `"random"`: at random, but always in
            the same way for a problem; the numbers of methods differ by one at most, and agents without a method do not
            speak. `"pick"`: each agent picks its methods. `"one"`: one agent writes all methods.
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback, visible_tests, roles, expert: See [`FeedbackWorkflow`].

    Raises:
        ValueError: If an argument has an unknown value; while playing, if a problem has no class with methods to write.
    """

    needs_entry_point = True

    def __init__(
        self,
        num_agents: int | None = None,
        split: str = "random",
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
        expert: Advisor | None = None,
    ):
        check_choice("split", split, SPLITS)
        num_agents = num_agents if num_agents is not None else 1 if split == "one" else 2
        check_number("num_agents", num_agents, COUNT, whole=True, default=1)
        if split == "one" and num_agents > 1:
            raise ValueError(
                f"num_agents={num_agents} does not fit split='one', where one agent writes all methods. Set split='random'."
            )
        self.split = split
        names = [numbered("coder", i) for i in range(1, num_agents + 1)]
        agents = tuple(Agent(name, self._role(name, names)) for name in names)
        super().__init__(agents, num_turns, feedback, visible_tests, roles, expert)

    def _role(self, name: str, names: list[str]) -> str:
        others = ", ".join(other for other in names if other != name)
        if not others:
            return f"{PLACE}\n\nComplete this class."
        team = f"{PLACE}\n\nYou are {name} in a team that completes this class, with {others}."
        if self.split == "pick":
            pick = "Pick the methods that you write, so that every method is written by exactly one of you."
            return f"{team} All write at the same moment. {pick}"
        return team

    def assigned(self, problem: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """
        The methods that each agent is asked for.

        Args:
            problem (`Mapping`): One dataset row.

        Returns:
            `dict[str, tuple[str, ...]]`: Agent → methods, in the order of the class; all methods with `split="pick"`.

        Raises:
            ValueError: If the problem has no class with methods to write.
        """
        skeleton = skeleton_of(problem)
        names = [agent.name for agent in self.agents]
        if self.split == "pick":
            return dict.fromkeys(names, skeleton.asked)
        dealt = random.Random(skeleton.source).sample(skeleton.asked, len(skeleton.asked))
        shares = (dealt[i :: len(names)] for i in range(len(names)))
        return {
            name: tuple(sorted(share, key=skeleton.asked.index)) for name, share in zip(names, shares, strict=True)
        }

    def _task(self, agent: Agent, problem: Mapping[str, Any]) -> str:
        methods = ", ".join(self.assigned(problem)[agent.name])
        task = f"The methods are: {methods}." if self.split == "pick" else f"Write only these methods: {methods}."
        return f"{fill(agent.role, problem)} {task} Add the imports and helpers that yours need. {CODE}"

    def _open(self, agent: Agent, problem: Mapping[str, Any], *texts: str) -> Prompt:
        prompt, context = problem["prompt"], context_of(problem)
        if context.strip() not in messages_of(prompt)[-1]["content"]:
            prompt = with_text(prompt, context)
        return ask(self._task(agent, problem), prompt, *texts)

    def _turn(self, problem: Mapping[str, Any], chats: dict[str, Prompt]) -> Generator[dict[str, Prompt], Any, dict]:
        silent = {name: "" for name, methods in self.assigned(problem).items() if not methods}
        return silent | (yield {name: chat for name, chat in chats.items() if name not in silent})

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        skeleton = skeleton_of(problem)
        parts = {agent.name: read_part(replies.get(agent.name, ""), skeleton) for agent in self.agents}
        owners = {method: name for name, methods in self.assigned(problem).items() for method in methods}
        return merge_class(skeleton, parts, {} if self.split == "pick" else owners)

    def _target(self, agent: Agent, problem: Mapping[str, Any]) -> str | None:
        return ""

    def _levels(self, agent: Agent, problem: Mapping[str, Any], reply: str) -> list[Level]:
        skeleton = skeleton_of(problem)
        part = read_part(reply, skeleton)
        own = self.assigned(problem)[agent.name]
        levels = []
        for name in skeleton.asked:
            if name in part.methods:
                finding = "found" if name in own else "found, but another agent writes it"
                levels.append(Level(f"Method {name}", finding, name in own))
            elif name in own and self.split != "pick":
                levels.append(Level(f"Method {name}", "missing", False))
        levels = levels or [Level("Methods", "none found", False)]
        return [*levels, Level("Syntax", part.error or "no error", part.error is None)]
