"""
Agents, the workflows they play, and the two requests of a workflow.

A workflow is a Python generator per episode: it yields `{agent name: prompt}` to let agents speak and [`Execute`] to run
code. It knows nothing of tokens, batches, models or losses; `rollout.py` plays it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from marcog_trl import code
from marcog_trl.execution import Job, TestResult, Verdict
from marcog_trl.problems import make_job


Prompt = str | list[dict[str, str]]
"""Plain text, or chat messages with the keys `role` and `content`."""


@dataclass(frozen=True)
class Agent:
    """
    A named role with its own prompts; not a model.

    Args:
        name (`str`): Name, unique in the team; a path part of metrics (`agents/helper/reward`).
        role (`str`): What the agent is told to do. Shipped team workflows put it before the problem, and SHPPO's latents
            are computed from it.
    """

    name: str
    role: str


@dataclass(frozen=True)
class Slot:
    """
    One reply of one agent in an episode.

    Args:
        agent (`str`): Name of the agent.
        turn (`int`, *optional*, defaults to `0`): Turn, counted from 0.
        act (`int`, *optional*, defaults to `0`): Which of the agent's replies within the turn, counted from 0.
    """

    agent: str
    turn: int = 0
    act: int = 0


@dataclass(frozen=True)
class Execute:
    """
    A workflow's request to run code; the generator receives one verdict per job, in order.

    Args:
        jobs (`tuple[Job, ...]`): What to run. A list is accepted and kept as a tuple.
    """

    jobs: tuple[Job, ...]

    def __post_init__(self):
        object.__setattr__(self, "jobs", tuple(self.jobs))


Play = Generator[dict[str, Prompt] | Execute, Any, None]
"""What `Workflow.play` returns: yields requests, receives `{agent name: text}` or a list of verdicts."""


VisibleTests = int | Literal["all"] | None


class Workflow:
    """
    Who speaks when and who sees what.

    Subclasses set `agents` and write `play` and `solution`. Given the same replies and verdicts, `play` must yield the
    same requests: episodes are forked by replaying their recorded prefix.

    Attributes:
        agents (`tuple[Agent, ...]`): The team, in order.
        num_turns (`int`, defaults to `1`): The most turns of an episode.
        slots (`tuple[Slot, ...]`): The most replies that an episode can use, in order. By default every agent speaks once
            per turn.
        needs_tests (`bool`, defaults to `False`): Whether `play` reads the tests of a problem.
        needs_entry_point (`bool`, defaults to `False`): Whether a problem must name the function that it asks for.
    """

    agents: tuple[Agent, ...] = ()
    num_turns: int = 1
    needs_tests: bool = False
    needs_entry_point: bool = False

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(agent.name, turn) for turn in range(self.num_turns) for agent in self.agents)

    def play(self, problem: Mapping[str, Any]) -> Play:
        """
        Play one episode.

        Args:
            problem (`Mapping`): One dataset row.

        Yields:
            `dict[str, str | list[dict[str, str]]]` (agent name → prompt: these agents speak at the same moment; receives
            agent name → text) or [`Execute`] (receives a list of verdicts). A request whose slots belong to a later turn,
            or the return, ends the turn.
        """
        raise NotImplementedError

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        """
        The code that a turn's replies amount to: what is executed and scored.

        Args:
            problem (`Mapping`): One dataset row.
            replies (`Mapping[str, str]`): Each agent's last reply of the turn.

        Returns:
            `str`: The solution's text.
        """
        raise NotImplementedError

    def validate(self) -> None:
        """
        Check the declaration of the workflow before any work starts.

        Raises:
            ValueError: If there are no agents, two agents share a name, `num_turns` is below 1, a slot names an unknown
                agent or a turn that does not exist, or stands twice.
        """
        names = [agent.name for agent in self.agents]
        title = type(self).__name__
        if not names:
            raise ValueError(f"{title}.agents=() has no agent; (Agent('solver', 'Write the function.'),) works")
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(
                f"{title}.agents={names} has {names.count(repeated[0])} agents named {repeated[0]!r}; "
                f"{[f'{name}{names[:i].count(name) + 1}' if name in repeated else name for i, name in enumerate(names)]}"
                " works"
            )
        if self.num_turns < 1:
            raise ValueError(f"{title}.num_turns={self.num_turns} has no turn; 1 works")
        if not self.slots:
            raise ValueError(f"{title}.slots=() lets no agent speak; ({Slot(names[0])},) works")
        for slot in self.slots:
            if slot.agent not in names:
                raise ValueError(
                    f"{title}.slots names agent={slot.agent!r}, which is not in {names}; {names[0]!r} works"
                )
            if not 0 <= slot.turn < self.num_turns:
                raise ValueError(
                    f"{title}.slots has turn={slot.turn} of agent {slot.agent!r}, but num_turns={self.num_turns}; "
                    f"turn={self.num_turns - 1} works"
                )
            if self.slots.count(slot) > 1:
                raise ValueError(
                    f"{title}.slots has {slot} {self.slots.count(slot)} times; {replace(slot, act=slot.act + 1)} for "
                    "another reply in the same turn works"
                )


# Prompts


def ask(role: str, prompt: Prompt) -> list[dict[str, str]]:
    """
    The opening messages of an agent: role text, blank line, problem, in one user message.

    Args:
        role (`str`): Role text.
        prompt (`str` or `list[dict[str, str]]`): The problem's `prompt`. Of chat messages, the last one takes the role
            text.

    Returns:
        `list[dict[str, str]]`: Chat messages.
    """
    *before, last = _messages(prompt)
    return [*before, {**last, "content": f"{role}\n\n{last['content']}"}]


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _with(chat: Prompt, text: str) -> list[dict[str, str]]:
    """The chat with a text added to its last message."""
    *before, last = _messages(chat)
    return [*before, {**last, "content": f"{last['content'].rstrip()}\n\n{text}"}]


# Code


def context_of(problem: Mapping[str, Any]) -> str:
    """
    The text of a problem that may hold code which solutions continue or rely on.

    Args:
        problem (`Mapping`): One dataset row.

    Returns:
        `str`: Its `starter_code`, else the text of its prompt.
    """
    return problem.get("starter_code") or _messages(problem["prompt"])[-1]["content"]


def solution_job(problem: Mapping[str, Any], solution: str) -> Job:
    """
    The job that all of a problem's tests make of a solution. Workflows and rewards both ask here, so that what a workflow
    has executed need not be executed again for the reward. Limits are the executor's.

    Args:
        problem (`Mapping`): One dataset row.
        solution (`str`): What `Workflow.solution` returned, or a completion.

    Returns:
        `Job`: Its code is what [`~marcog_trl.code.extract_code`] finds.
    """
    return make_job(problem, code.extract_code(solution, problem.get("entry_point"), context_of(problem)))


def visible_results(job: Job, verdict: Verdict, visible_tests: VisibleTests = 1) -> str:
    """
    The results of the tests that feedback may show.

    Args:
        job (`Job`): What was executed.
        verdict (`Verdict`): What came out.
        visible_tests (`int`, `"all"` or `None`, *optional*, defaults to `1`): How many tests are shown; a negative number
            counts from the end; `0`, `None` and `"all"` show all.

    Returns:
        `str`: "Tests: k of n passed", counted over the shown tests, and a line for each of them that failed.
    """
    if verdict.status == "infrastructure":
        return "Tests: could not be run"
    results = _shown(verdict, visible_tests)
    failed = [(i, result) for i, result in results if result.status != "passed"]
    lines = [f"Tests: {len(results) - len(failed)} of {len(results)} passed"]
    for i, result in failed:
        test = ""
        if job.test_format == "asserts":
            test = f"{str(job.tests[i]).strip()}: "
        elif job.test_format == "stdio":
            test = f"input {job.tests[i][0]!r}, output {job.tests[i][1]!r}: "
        lines.append(f"{test}{result.message or result.status}")
    return "\n".join(dict.fromkeys(lines))


def _shown(verdict: Verdict, visible_tests: VisibleTests) -> list[tuple[int, TestResult]]:
    """The tests that feedback may show, with their numbers."""
    results = list(enumerate(verdict.tests))
    if isinstance(visible_tests, int):
        results = results[:visible_tests] if visible_tests > 0 else results[visible_tests:]
    return results


class Level(NamedTuple):
    """One thing that feedback looks at: its name, what was found, and whether that is as it should be."""

    name: str
    finding: str
    passed: bool


Feedback = Callable[[Mapping[str, Any], str, str, str], str]
"""A user's feedback: `(problem, agent's name, its reply, results of the visible tests) -> what the agent is told`."""

FEEDBACK_MODES = ("level_feedback", "level_passed", "passed", "plain")


# Workflows


class _Rounds(Workflow):
    """
    Turns of the same kind, with feedback between them. Every agent reads its own history only.

    Args:
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback (`str` or `Callable`, *optional*, defaults to `"level_feedback"`): What an agent is told before the next
            turn. `"plain"`: to revise its previous answer. `"passed"`: also whether the team's solution passes the visible
            tests. `"level_passed"`: of each level (definition, syntax, tests) whether it passed. `"level_feedback"`: what
            was found at each level, and which of the visible tests failed and how. A callable
            `(problem, agent, reply, results) -> str` says it in its own words.
        visible_tests (`int`, `"all"` or `None`, *optional*, defaults to `1`): How many tests feedback may show; a negative
            number counts from the end; `0`, `None` and `"all"` show all.
        roles (`Mapping[str, str]`, *optional*): Role texts that replace an agent's own, by agent name.

    Raises:
        ValueError: If an argument has a value that is not known.
    """

    def __init__(
        self,
        agents: tuple[Agent, ...],
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
    ):
        if not callable(feedback) and feedback not in FEEDBACK_MODES:
            works = f"{', '.join(map(repr, FEEDBACK_MODES))} or a function works"
            raise ValueError(f"feedback={feedback!r} is unknown; {works}")
        if visible_tests not in (None, "all") and not isinstance(visible_tests, int):
            raise ValueError(f"visible_tests={visible_tests!r} is not a number of tests; 1 or 'all' works")
        names = [agent.name for agent in agents]
        for name in roles or {}:
            if name not in names:
                raise ValueError(f"roles has a text for {name!r}, who is not in the team {names}; {names[0]!r} works")
        self.agents = tuple(replace(agent, role=(roles or {}).get(agent.name, agent.role)) for agent in agents)
        self.num_turns = num_turns
        self.feedback = feedback
        self.visible_tests = visible_tests
        self.needs_tests = num_turns > 1 and feedback != "plain"

    def play(self, problem: Mapping[str, Any]) -> Play:
        chats = {agent.name: self._open(agent, problem) for agent in self.agents}
        for turn in range(self.num_turns):
            replies = yield from self._turn(problem, chats)
            if turn == self.num_turns - 1:
                return
            executed = None
            if self.feedback != "plain":
                job = solution_job(problem, self.solution(problem, replies))
                [verdict] = yield Execute((job,))
                executed = job, verdict
            for agent in self.agents:
                request = "Revise your answer." + (" Code only." if self._target(agent, problem) else "")
                report = [] if executed is None else self._report(agent, problem, replies[agent.name], *executed)
                chats[agent.name] = [
                    *_messages(chats[agent.name]),
                    {"role": "assistant", "content": replies[agent.name]},
                    {"role": "user", "content": "\n".join([*report, request])},
                ]

    def _report(self, agent: Agent, problem: Mapping[str, Any], reply: str, job: Job, verdict: Verdict) -> list[str]:
        """What an agent is told of its reply and of the team's solution."""
        results = visible_results(job, verdict, self.visible_tests)
        if callable(self.feedback):
            text = self.feedback(problem, agent.name, reply, results)
            if not isinstance(text, str):
                raise TypeError(f"feedback returned {text!r} for agent {agent.name!r}; a str works")
            return [text]
        passed = all(result.status == "passed" for _, result in _shown(verdict, self.visible_tests))
        if self.feedback == "passed" and verdict.status == "infrastructure":
            return ["The tests could not be run."]
        if self.feedback == "passed":
            return ["The solution passes the tests." if passed else "The solution does not pass the tests."]
        levels = self._levels(agent, problem, reply)
        if self.feedback == "level_passed":
            tests = "could not be run" if verdict.status == "infrastructure" else "passed" if passed else "failed"
            lines = [f"{level.name}: {'passed' if level.passed else 'failed'}" for level in levels]
            return [*lines, f"Tests: {tests}"]
        return [*(f"{level.name}: {level.finding}" for level in levels), results]

    def _open(self, agent: Agent, problem: Mapping[str, Any]) -> Prompt:
        """What an agent is asked first."""
        return ask(agent.role, problem["prompt"])

    def _turn(self, problem: Mapping[str, Any], chats: dict[str, Prompt]) -> Generator[dict[str, Prompt], Any, dict]:
        """One round; all agents speak at the same moment. What it adds to `chats` becomes part of the agents' history."""
        return (yield dict(chats))

    def _target(self, agent: Agent, problem: Mapping[str, Any]) -> str | None:
        """The name of what an agent must define; `None` if it need not write code."""
        return problem.get("entry_point")

    def _levels(self, agent: Agent, problem: Mapping[str, Any], reply: str) -> list[Level]:
        """What feedback looks at in an agent's own reply."""
        target = self._target(agent, problem)
        if target is None:
            return []
        found = code.extract_code(reply, target, context_of(problem))
        error = code.syntax_error(reply, target, context_of(problem))
        state = "found" if code.returns_value(found, target) else "found, but returns nothing"
        state = state if code.defines(found, target) else "missing"
        return [
            Level(f"Definition of {target}", state, state == "found"),
            Level("Syntax", error or "no error", error is None),
        ]


class Single(_Rounds):
    """
    One agent that is asked the problem's prompt as it is, and whose reply is the solution: the baseline, and what TRL's own
    trainers do.

    Args:
        num_turns (`int`, *optional*, defaults to `1`): Number of replies, with feedback between them.
        feedback, visible_tests: See [`Collaboration`].
    """

    def __init__(
        self,
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
    ):
        super().__init__((Agent("solver", "Solve the problem."),), num_turns, feedback, visible_tests)

    def _open(self, agent: Agent, problem: Mapping[str, Any]) -> Prompt:
        return problem["prompt"]

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        return replies["solver"]


class Collaboration(_Rounds):
    """
    Helpers and a main agent that write at the same moment: a helper the function `aux` (a second one `aux2`, and so on),
    the main agent the entry point, which may call it. Neither sees the other's reply.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): Size of the team: one main agent, the others helpers.
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback (`str`, *optional*, defaults to `"level_feedback"`): What an agent is told before the next turn: with
            `"plain"` to revise its previous answer; with `"level_feedback"` also whether its definition was found, whether
            it is Python, which tests the team's solution passes, and, the main agent, how it uses the helpers.
        visible_tests (`int`, `"all"` or `None`, *optional*, defaults to `1`): How many tests feedback may show; a negative
            number counts from the end; `0`, `None` and `"all"` show all.
        roles (`Mapping[str, str]`, *optional*): Role texts that replace an agent's own, by agent name.

    Raises:
        ValueError: If an argument has a value that is not known.
    """

    needs_entry_point = True

    def __init__(
        self,
        num_agents: int = 2,
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
    ):
        if num_agents < 2:
            raise ValueError(f"num_agents={num_agents} leaves no helper; 2 works")
        self.functions = {numbered("helper", i): numbered("aux", i) for i in range(1, num_agents)}
        agents = [
            Agent(
                helper,
                f"Write only a Python function named {function} that returns useful data for the problem below. Another "
                "agent writes the solution. Code only.",
            )
            for helper, function in self.functions.items()
        ]
        *first, last = (f"{function}(...)" for function in self.functions.values())
        if first:
            use = f"You may call {', '.join(first)} and {last}, which other agents write. Do not define them."
        else:
            use = f"You may call {last}, which another agent writes. Do not define aux."
        main = Agent("main", f"Write the Python function asked for below. {use} Code only.")
        super().__init__((*agents, main), num_turns, feedback, visible_tests, roles)

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        return code.combine(
            *(
                code.extract_code(replies[agent.name], self._target(agent, problem), context_of(problem))
                for agent in self.agents
            )
        )

    def _target(self, agent: Agent, problem: Mapping[str, Any]) -> str | None:
        return self.functions.get(agent.name, problem["entry_point"])

    def _levels(self, agent: Agent, problem: Mapping[str, Any], reply: str) -> list[Level]:
        levels = super()._levels(agent, problem, reply)
        if agent.name != "main":
            return levels
        entry_point = problem["entry_point"]
        found = code.extract_code(reply, entry_point, context_of(problem))
        for function in self.functions.values():
            if code.defines(found, function):
                state = "defined by you, which is not allowed"
            elif not code.calls(found, entry_point, function):
                state = "not called"
            elif code.ignores_result(found, entry_point, function):
                state = "called, but its result is not used"
            elif code.is_thin_wrapper(found, entry_point, function):
                state = f"called, but {entry_point} does nothing else"
            else:
                state = "called"
            levels.append(Level(f"Helper {function}", state, state == "called"))
        return levels


class Pipeline(_Rounds):
    """
    Planner, coder and debugger, one after the other. The coder reads the plan; the debugger reads the code and its test
    results, and the last agent's code is the solution.

    Args:
        num_agents (`int`, *optional*, defaults to `3`): 1: the coder alone; 2: planner and coder; more: further debuggers,
            each of which reads the code of the one before.
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback, visible_tests, roles: See [`Collaboration`]. `visible_tests` holds for the debuggers too.

    Raises:
        ValueError: If an argument has a value that is not known.
    """

    def __init__(
        self,
        num_agents: int = 3,
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
    ):
        if num_agents < 1:
            raise ValueError(f"num_agents={num_agents} has no agent; 3 works")
        planner = Agent(
            "planner",
            "Write a plan in a few short steps for the Python function asked for below. Another agent writes the code. No "
            "code.",
        )
        coder = Agent(
            "coder",
            "Write the Python function asked for below. If there is a plan, follow it where it is right. Code only.",
        )
        debugger = "Below are a problem, code for it and its test results. Correct the code. Write the whole function. Code only."
        debuggers = [Agent(numbered("debugger", i), debugger) for i in range(1, num_agents - 1)]
        agents = (coder,) if num_agents == 1 else (planner, coder, *debuggers)
        super().__init__(agents, num_turns, feedback, visible_tests, roles)
        self.needs_tests = self.needs_tests or num_agents > 2

    def _turn(self, problem: Mapping[str, Any], chats: dict[str, Prompt]) -> Generator[Any, Any, dict]:
        replies: dict[str, str] = {}
        before: Agent | None = None
        for agent in self.agents:
            if before is not None:
                text = replies[before.name]
                if before.name == "planner":
                    text = f"Plan:\n{text}"
                else:
                    job = solution_job(problem, text)
                    [verdict] = yield Execute((job,))
                    results = visible_results(job, verdict, self.visible_tests)
                    levels = (f"{level.name}: {level.finding}" for level in self._levels(before, problem, text))
                    report = "\n".join([*levels, results])
                    # Code that was cut to what parses would hide the error that is to be corrected
                    entry_point, context = problem.get("entry_point"), context_of(problem)
                    is_cut = code.syntax_error(text, entry_point, context) is not None
                    shown = text if is_cut else code.extract_code(text, entry_point, context) or text
                    text = f"Code:\n{shown}\n\n{report}"
                chats[agent.name] = _with(chats[agent.name], text)
            replies |= yield {agent.name: chats[agent.name]}
            before = agent
        return replies

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        return code.extract_code(replies[self.agents[-1].name], problem.get("entry_point"), context_of(problem))

    def _target(self, agent: Agent, problem: Mapping[str, Any]) -> str | None:
        return None if agent.name == "planner" else problem.get("entry_point")


def numbered(name: str, i: int) -> str:
    """`aux`, `aux2`, `aux3`, … for i = 1, 2, 3, …"""
    return name if i == 1 else f"{name}{i}"


_WORKFLOWS: dict[str, type[Workflow]] = {"single": Single, "collaboration": Collaboration, "pipeline": Pipeline}


def make_workflow(name: str, **options: Any) -> Workflow:
    """
    A shipped workflow by its name.

    Args:
        name (`str`): `"single"`, `"collaboration"` or `"pipeline"`.
        **options: Arguments of [`Single`], [`Collaboration`] or [`Pipeline`].

    Returns:
        `Workflow`: The workflow.

    Raises:
        ValueError: If the name, an option or its value is not known.
    """
    if name not in _WORKFLOWS:
        raise ValueError(f"workflow={name!r} is unknown; one of {', '.join(map(repr, _WORKFLOWS))} works")
    known = list(inspect.signature(_WORKFLOWS[name]).parameters)
    for option in options:
        if option not in known:
            raise ValueError(f"{option}={options[option]!r} is no option of workflow {name!r}; it takes {known}")
    return _WORKFLOWS[name](**options)
