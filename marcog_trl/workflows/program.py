"""Trains the program that a user already has: its requests to an OpenAI-compatible server are the replies of agents."""

from __future__ import annotations

import inspect
import shlex
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from marcog_trl.agents import Agent, Consult, EpisodeFailed, RequestGenerator, Slot, Workflow
from marcog_trl.checks import COUNT, POSITIVE, check_choice, check_number
from marcog_trl.parsing.prompts import ChatRequest, Prompt


if TYPE_CHECKING:
    from marcog_trl.workflows.program_server import Result, Run


OPTIONS = ("agents", "max_calls", "program_timeout", "stage_timeout", "on_program_error", "replayable")
"""Arguments of [`Program`] that are settings of a team, too."""


class Program(Workflow):
    """
    A program of one's own, whose agents are the models that it asks.

    A function or coroutine function receives the problem and a client of the package `openai`, and returns the solution. A
    command, such as `"node my_agent.mjs"`, receives the problem as JSON on standard input, finds the server in the
    environment variables `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and writes the solution to standard output. In place of
    the solution, both may give `{"solution": ..., "rewards": ...}`, which [`program_reward`] reads.

    Args:
        program (`Callable` or `str`): The function, or the command.
        agents (`Sequence[str | Agent]`): The names that the program uses as `model`.
        max_calls (`int` or `dict[str, int]`, *optional*, defaults to `4`): How often an episode may ask each agent, or each of
            them by name. Replies that are not used have rows in a batch, too.
        program_timeout (`float`, *optional*, defaults to `300.0`): Seconds that the program may compute between two calls.
        stage_timeout (`float`, *optional*, defaults to `10.0`): Seconds after which programs that wait for replies no longer
            wait for those that compute.
        on_program_error (`str`, *optional*, defaults to `"mask"`): What happens to an episode whose program fails: `"mask"`
            leaves it out of training, `"zero"` lets it have an empty solution, and `"raise"` ends the run.
        replayable (`bool`, *optional*, defaults to `False`): Whether the program asks the same, given the same problem and
            replies. Turn trees and counterfactual credit need it, and check it.

    Raises:
        ImportError: If a function needs the package `openai`, which is not installed.
        ValueError: If the command is not found, or another argument cannot be used.
    """

    may_fail = True
    # Set by the team
    knows_tools = False
    holds: Mapping[str, Any] = {}  # values of the team's settings, by field of requests
    check_prompt: Callable[[Prompt], object] = staticmethod(
        lambda prompt: None
    )  # raises an error if a prompt cannot be read

    def __init__(
        self,
        program: Callable | str,
        agents: Sequence[str | Agent],
        max_calls: int | Mapping[str, int] = 4,
        program_timeout: float = 300.0,
        stage_timeout: float = 10.0,
        on_program_error: str = "mask",
        replayable: bool = False,
    ):
        if isinstance(agents, str) or not agents:
            raise ValueError(
                f"agents={agents!r} is not a list of names. Set agents=['planner', 'coder'], for example."
            )
        self.agents = tuple(agent if isinstance(agent, Agent) else Agent(str(agent), str(agent)) for agent in agents)
        for agent in self.agents:
            if agent.tools:
                raise ValueError(
                    f"Agent {agent.name!r} of a program has tools, which it would not get. Let the program send tools with its "
                    "requests, and run them."
                )
        names = [agent.name for agent in self.agents]
        calls = dict(max_calls) if isinstance(max_calls, Mapping) else dict.fromkeys(names, max_calls)
        if set(calls) != set(names):
            raise ValueError(f"max_calls={calls} does not have one number for each of the agents {names}.")
        for number in calls.values():
            check_number("max_calls", number, COUNT, whole=True, default=4)
        check_number("program_timeout", program_timeout, POSITIVE, default=300.0)
        check_number("stage_timeout", stage_timeout, POSITIVE, default=10.0)
        check_choice("on_program_error", on_program_error, ("mask", "zero", "raise"))
        self.max_calls = max_calls if isinstance(max_calls, int) else calls
        self.slots = tuple(Slot(name, act=act) for name in names for act in range(calls[name]))  # type: ignore[misc]
        self.program_timeout = program_timeout
        self.stage_timeout = stage_timeout
        self.on_program_error = on_program_error
        self.replayable = replayable
        self.program = program
        self._warned: set[str] = set()
        if isinstance(program, str):
            self._check_command(program)
        elif not callable(program):
            raise ValueError(f"program={program!r:.80} is neither a function nor a command.")
        else:
            self._check_function(program)

    def _check_command(self, command: str) -> None:
        try:
            first = shlex.split(command)[0]
        except (ValueError, IndexError) as error:
            raise ValueError(f"program={command!r} is not a command: {error}.") from None
        if shutil.which(first) is None:
            raise ValueError(f"program={command!r}: {first!r} is not installed, or not in PATH.")

    def _check_function(self, function: Callable) -> None:
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "Programs in Python need the package openai. Run `pip install marcog-trl[expert]`."
            ) from error
        name = getattr(function, "__name__", type(function).__name__)
        try:
            inspect.signature(function).bind("problem", "client")
        except TypeError:
            raise ValueError(
                f"program={name} has other arguments than a problem and a client. Write 'def {name}(problem, client):'."
            ) from None

    def play(self, problem: Mapping[str, Any]) -> RequestGenerator:
        from marcog_trl.workflows.program_server import Result, Run

        calls_left = dict(Counter(slot.agent for slot in self.slots))
        used = dict.fromkeys(calls_left, 0)
        its = deepcopy(dict(problem))  # programs append to chats
        run = Run(self.program, its, calls_left, self.program_timeout, self._check_request, self.holds)
        try:
            while True:
                (event,) = yield Consult(self._advance, (run,))
                if event is None:  # replies that nobody wrote measure the prompts
                    (event,) = self._advance((run,))
                if isinstance(event, Result):
                    return self._end(event, asked=any(used.values()))
                asked = []
                for call in event:
                    asked.append(Slot(call.agent, act=used[call.agent]))
                    used[call.agent] += 1
                replies = yield {slot: call.prompt for slot, call in zip(asked, event, strict=True)}
                run.answer(event, [replies[slot] if slot in replies else replies[slot.agent] for slot in asked])
        finally:
            run.close()

    def _check_request(self, agent: str, request: ChatRequest) -> None:
        """Raises a `ValueError` if an agent cannot answer a request."""
        endpoint = next(each.endpoint for each in self.agents if each.name == agent)
        if endpoint is not None and request.tools:
            raise ValueError(f"Agent {agent!r} speaks through an endpoint, which gets no tools. Leave tools out.")
        if endpoint is not None and request.max_tokens is not None and request.max_tokens < endpoint.max_tokens:
            raise ValueError(
                f"max_tokens={request.max_tokens} is not sent to the endpoint of agent {agent!r}. Leave it out, and set max_tokens "
                "of the Endpoint."
            )
        if request.tools and not self.knows_tools:
            raise ValueError(
                "tools need a model whose chat template describes tools, and whose calls TRL can read, such as Qwen2.5, "
                "Qwen3 or Llama 3.1. Leave tools out, or use such a model."
            )
        if endpoint is None:
            self.check_prompt(request)

    def _advance(self, runs: Sequence[Run]) -> list[Any]:
        from marcog_trl.workflows.program_server import server

        events = server().advance(runs, self.stage_timeout)
        ignored = set[str]().union(*(run.ignored for run in runs)) - self._warned
        if ignored:
            self._warned |= ignored
            warnings.warn(
                f"The program's requests have {', '.join(sorted(ignored))}, which has no effect. How replies are sampled is a setting "
                "of the team: set temperature, top_p, top_k, min_p, repetition_penalty or max_completion_length there.",
                stacklevel=2,
            )
        return events

    def _end(self, result: Result, asked: bool) -> str:
        failure = result.failure
        if failure is None and not asked:
            failure = f"it asked no agent. Let it ask some of {[agent.name for agent in self.agents]}, as `model`."
        if failure is None:
            return result.solution
        if result.refusal is not None and result.refusal not in failure:
            failure = f"{failure}\nThe server refused a request of the program: {result.refusal}"
        if result.differs or self.on_program_error == "raise":
            raise ValueError(f"A program failed: {failure}")
        kind = failure.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            then = "are left out of training" if self.on_program_error == "mask" else "have an empty solution"
            warnings.warn(
                f"A program failed. Such episodes {then}, and are counted as program/failed in the log; "
                f"on_program_error='raise' stops at the first one. {failure}",
                stacklevel=2,
            )
        raise EpisodeFailed(failure, masks=self.on_program_error == "mask")
