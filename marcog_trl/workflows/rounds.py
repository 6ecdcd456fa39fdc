"""Workflows that repeat a round with feedback between the turns, and the workflow of a single agent."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marcog_trl.agents import (
    PLACE,
    Advisor,
    Agent,
    Consult,
    Execute,
    Prompt,
    RequestGenerator,
    Workflow,
    ask,
    without_place,
)
from marcog_trl.checks import ANY, COUNT, check_number
from marcog_trl.execution import Job, Verdict
from marcog_trl.parsing.predicates import defines, returns_value
from marcog_trl.parsing.prompts import fill, messages_of
from marcog_trl.parsing.replies import code_in, error_in
from marcog_trl.problems import solution_job
from marcog_trl.workflows.expert import expert_question
from marcog_trl.workflows.feedback import FEEDBACK_MODES, Feedback, Level, VisibleTests, shown_tests, visible_results


CODE = "Answer with one Python code block."
SOLVER = f"{PLACE}\n\nWrite the complete Python code. {CODE}"


class FeedbackWorkflow(Workflow):
    """
    Base class of the shipped workflows: repeats a round of the team, with feedback between the turns. Each agent sees its
    own history only.

    Args:
        agents (`tuple[Agent, ...]`): The team, in order.
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback (`str` or `Callable`, *optional*, defaults to `"level_feedback"`): What an agent is told before the next
            turn. `"plain"`: to revise its answer. `"passed"`: also whether the solution of the team passes the visible
            tests. `"level_passed"`: also whether each level (definition, syntax, tests) passed. `"level_feedback"`: also
            what was found at each level, and which of the visible tests failed, and how. `"expert_edits"`: also edits
            that `expert` suggests, if it answers. A callable `(problem, agent, reply, results) -> str` returns the text.
        visible_tests (`int`, *optional*, defaults to `1`): How many tests feedback may show. A negative number counts from
            the end; `0` shows none, and `None` all.
        roles (`Mapping[str, str]`, *optional*): Agent name → role text that replaces the agent's own. See [`Agent`] for what
            may stand in it.
        expert (`Callable`, *optional*): Advisor for `feedback="expert_edits"`, such as an
            [`~marcog_trl.workflows.expert.ExpertEdits`].

    Raises:
        TypeError: If `feedback` is a class.
        ValueError: If an argument has an unknown value, or `feedback="expert_edits"` has no expert.
    """

    def __init__(
        self,
        agents: tuple[Agent, ...],
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
        expert: Advisor | None = None,
    ):
        if not callable(feedback) and feedback not in FEEDBACK_MODES:
            modes = ", ".join(map(repr, FEEDBACK_MODES))
            raise ValueError(f"feedback={feedback!r} is unknown. Use one of {modes}, or a function.")
        if isinstance(feedback, type):
            raise TypeError(f"feedback is the class {feedback.__name__}. Pass an instance: {feedback.__name__}(...).")
        if visible_tests is not None:
            check_number("visible_tests", visible_tests, ANY, whole=True, default=1)
        check_number("num_turns", num_turns, COUNT, whole=True, default=1)
        if roles is not None and not isinstance(roles, Mapping):
            raise ValueError(f"roles={roles!r} is not a mapping. Set roles={{{agents[0].name!r}: 'Write ...'}}.")
        names = [agent.name for agent in agents]
        for name, text in (roles or {}).items():
            if name not in names:
                raise ValueError(f"roles has a text for {name!r}, which is not an agent of the team {names}.")
            if not isinstance(text, str):
                raise ValueError(f"roles[{name!r}]={text!r} is not text. Pass a str.")
        self.agents = tuple(replace(agent, role=(roles or {}).get(agent.name, agent.role)) for agent in agents)
        if feedback == "expert_edits" and expert is None:
            raise ValueError("feedback='expert_edits' needs an expert. Set expert=ExpertEdits(Endpoint(...)).")
        self.num_turns = num_turns
        self.feedback = feedback
        self.expert = expert
        self.visible_tests = visible_tests
        self.needs_tests = num_turns > 1 and feedback != "plain"

    def play(self, problem: Mapping[str, Any]) -> RequestGenerator:
        chats = {agent.name: self._open(agent, problem) for agent in self.agents}
        for turn in range(self.num_turns):
            replies = yield from self._turn(problem, chats)
            if turn == self.num_turns - 1:
                break
            reports = yield from self._reports(problem, replies)
            for agent in self.agents:
                report = "\n".join([*reports[agent.name], self._request(agent, problem)])
                chats[agent.name] = [
                    *messages_of(chats[agent.name]),
                    {"role": "assistant", "content": replies[agent.name]},
                    {"role": "user", "content": report},
                ]
        return None  # `solution` reads the replies

    def _reports(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> Generator[Any, Any, dict]:
        """Lines of feedback for each agent, about its reply and the solution of the team."""
        if self.feedback == "plain":
            return {agent.name: [] for agent in self.agents}
        job = solution_job(problem, self.solution(problem, replies))
        [verdict] = yield Execute((job,))
        if isinstance(self.feedback, str) and self.feedback != "expert_edits":
            return {a.name: self._report(a, problem, replies[a.name], job, verdict) for a in self.agents}
        results = visible_results(job, verdict, self.visible_tests)
        if callable(self.feedback):
            questions = [(problem, agent.name, replies[agent.name], results) for agent in self.agents]
            texts = yield Consult(self._ask_user, tuple(questions))
        else:
            assert self.expert is not None
            chats = [
                expert_question(problem, without_place(self._task(agent, problem)), replies[agent.name], results)
                for agent in self.agents
            ]
            texts = yield Consult(self.expert, tuple(chats))
        return {agent.name: [] if text is None else [text] for agent, text in zip(self.agents, texts, strict=True)}

    def _ask_user(self, questions: Sequence[tuple]) -> list[str | None]:
        assert callable(self.feedback)
        texts: list[str | None] = []
        for question in questions:
            texts.append(self.feedback(*question))
            if not isinstance(texts[-1], str):
                raise TypeError(f"feedback returned {texts[-1]!r} for agent {question[1]!r}. Return text.")
        return texts

    def _report(self, agent: Agent, problem: Mapping[str, Any], reply: str, job: Job, verdict: Verdict) -> list[str]:
        """Lines of feedback for one agent, in the modes `"passed"`, `"level_passed"` and `"level_feedback"`."""
        passed = all(result.status == "passed" for _, result in shown_tests(verdict, self.visible_tests))
        if self.feedback == "passed" and self.visible_tests == 0:
            return []
        if self.feedback == "passed" and verdict.status == "infrastructure":
            return ["The tests could not be run."]
        if self.feedback == "passed":
            return ["The solution passes the tests." if passed else "The solution does not pass the tests."]
        levels = self._levels(agent, problem, reply)
        if self.feedback == "level_passed":
            tests = "could not be run" if verdict.status == "infrastructure" else "passed" if passed else "failed"
            lines = [f"{level.name}: {'passed' if level.passed else 'failed'}" for level in levels]
            return lines if self.visible_tests == 0 else [*lines, f"Tests: {tests}"]
        results = visible_results(job, verdict, self.visible_tests)
        return [*(f"{level.name}: {level.finding}" for level in levels), results]

    def _open(self, agent: Agent, problem: Mapping[str, Any], *texts: str) -> Prompt:
        """First prompt of an agent, with texts that follow the problem."""
        return ask(self._task(agent, problem), problem["prompt"], *texts)

    def _task(self, agent: Agent, problem: Mapping[str, Any]) -> str:
        """Instruction for an agent about a problem."""
        return fill(agent.role, problem)

    def _tell(self, agent: Agent, problem: Mapping[str, Any], chat: Prompt, text: str) -> Prompt:
        """Adds a text to the last message of an agent's chat, before what the agent is asked for."""
        if chat == self._open(agent, problem):
            return self._open(agent, problem, text)
        *before, last = messages_of(chat)
        return [*before, {**last, "content": f"{text}\n\n{last['content']}"}]

    def _request(self, agent: Agent, problem: Mapping[str, Any]) -> str:
        """The request to an agent in a later turn, after the feedback."""
        target = self._target(agent, problem)
        what = f"{CODE.removesuffix('.')} that defines {target}." if target else CODE
        return "Revise your answer." + ("" if target is None else f" {what}")

    def _turn(self, problem: Mapping[str, Any], chats: dict[str, Prompt]) -> Generator[dict[str, Prompt], Any, dict]:
        """One round, in which all agents speak at the same moment. Subclasses may extend `chats`, the agents' histories."""
        return (yield dict(chats))

    def _target(self, agent: Agent, problem: Mapping[str, Any]) -> str | None:
        """Name that an agent has to define; `""` if it writes code without a name, `None` if it writes no code."""
        return problem.get("entry_point")

    def _levels(self, agent: Agent, problem: Mapping[str, Any], reply: str) -> list[Level]:
        """Levels of feedback about the reply of an agent."""
        target = self._target(agent, problem)
        if target is None:
            return []
        found, error = code_in(problem, reply, target), error_in(problem, reply, target)
        syntax = Level("Syntax", error or "no error", error is None)
        if not target:  # a script
            return [Level("Code", "found" if found else "missing", bool(found)), syntax]
        state = "found" if returns_value(found, target) else "found, but returns nothing"
        state = state if defines(found, target) else "missing"
        return [Level(f"Definition of {target}", state, state == "found"), syntax]


class Single(FeedbackWorkflow):
    """
    One agent, whose reply is the solution. Problems in plain text become a chat message with the role text. Chat messages are
    sent unchanged, and so is plain text if the role text is empty, as in TRL's trainers.

    Args:
        num_turns (`int`, *optional*, defaults to `1`): Number of replies, with feedback between them.
        feedback, visible_tests, roles, expert: See [`FeedbackWorkflow`]. With `roles={"solver": ""}`, the model continues plain text.
    """

    def __init__(
        self,
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
        expert: Advisor | None = None,
    ):
        super().__init__((Agent("solver", SOLVER),), num_turns, feedback, visible_tests, roles, expert)

    def _open(self, agent: Agent, problem: Mapping[str, Any], *texts: str) -> Prompt:
        prompt = problem["prompt"]
        return super()._open(agent, problem, *texts) if isinstance(prompt, str) and agent.role else prompt

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        return replies["solver"]
