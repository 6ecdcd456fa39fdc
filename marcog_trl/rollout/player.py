"""Plays one episode of a workflow."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast

from marcog_trl.agents import Consult, EpisodeFailed, Execute, Prompt, Slot, Workflow
from marcog_trl.execution import Job, Verdict
from marcog_trl.problems.schema import fault_of_prompt
from marcog_trl.rollout.records import AsGiven, Episode, Request, Response, Row, Turn
from marcog_trl.rollout.tree import Level
from marcog_trl.tracebacks import own_frames


MOST_LINES = 10  # of the user's own code that an error shows


class WorkflowError(RuntimeError):
    """Raised if the code of a workflow raises an exception. Its notes are the lines of that code."""


class EpisodePlayer:
    """
    Plays one episode: runs the generator of the workflow, and keeps its pending request and the record of the episode.

    Args:
        workflow ([`Workflow`]): The workflow.
        problem (`Mapping`): One dataset row.
        index (`int`): Number of the episode in its batch.
        on_error (`Callable`, *optional*): Told of a [`WorkflowError`], after which the episode is masked and ends. By default, it
            is raised. It is always raised if no agent has spoken.
    """

    def __init__(
        self,
        workflow: Workflow,
        problem: Mapping[str, Any],
        index: int,
        on_error: Callable[[WorkflowError], None] | None = None,
    ):
        self.workflow = workflow
        self.on_error = on_error
        self.title = type(workflow).__name__
        self.index = index
        self.problem = problem
        # A deep copy, so that a workflow that changes it does not affect other episodes
        self.episode = Episode(MappingProxyType(copy.deepcopy(dict(problem))))
        self.turn = 0
        self._returned: str | None = None  # what `play` returned: the solution of the last turn
        self._replies: dict[str, str] = {}
        self._verdicts: list[tuple[Job, Verdict]] = []
        self._slots = {
            agent.name: [slot for slot in workflow.slots if slot.agent == agent.name] for agent in workflow.agents
        }
        self._used = dict.fromkeys(self._slots, 0)  # agent -> number of its slots that are filled or skipped
        self._last_turn = 0  # turn of the last reply
        self._asked: dict[Slot, Prompt] = {}
        if inspect.iscoroutinefunction(workflow.play) or inspect.isasyncgenfunction(workflow.play):
            raise TypeError(
                f"{self.title}.play is asynchronous. Write 'def play', without 'async', and 'yield' in place of 'await'."
            )
        with self._explaining("play"):
            play = workflow.play(self.episode.problem)
        if not isinstance(play, Generator):
            raise TypeError(
                f"{self.title}.play returned {play!r}, since it has no `yield`. Let it yield {{agent name: prompt}}."
            )
        self._play = cast(Generator[Request, Response, str | None], play)
        self.request: Request | None = self._advance(None)
        if self.request is None:
            raise ValueError(f"{self.title}.play asked no agent. Let it yield {{agent name: prompt}}.")

    def _advance(self, response: Response | None) -> Request | None:
        try:
            with self._explaining("play"):
                request = next(self._play) if response is None else self._play.send(response)
        except StopIteration as end:
            self._returned = end.value
            return None
        except EpisodeFailed as failure:
            self._returned = ""
            self.episode.failure, self.episode.masked = str(failure), self.episode.masked | failure.masks
            return None
        except WorkflowError as error:
            self._mask(error)
            return None
        if isinstance(request, Execute):
            if not request.jobs:
                raise ValueError(f"{self.title}.play yielded Execute without jobs. Give it at least one.")
        elif isinstance(request, dict) and request:
            self._asked = self._slots_of(request)
        elif not isinstance(request, Consult):
            raise TypeError(
                f"{self.title}.play yielded {request!r}. Yield a non-empty dict of agent name -> prompt, "
                "Execute([job, ...]) or Consult(advisor, [question, ...])."
            )
        return request

    @contextmanager
    def _explaining(self, method: str) -> Iterator[None]:
        """Replaces an exception in the user's code by one that says for which problem and reply it was raised, and where."""
        try:
            yield
        except (StopIteration, EpisodeFailed):
            raise
        except Exception as error:
            frames = own_frames(error)
            if not frames:  # ours, which says what to do
                raise
            text = f"{self.title}.{method} raised {type(error).__name__}: {' '.join(str(error).split())}"
            text += f" (problem {self.problem['task_id']!r})" if self.problem.get("task_id") else ""
            for row in self.episode.rows[-1:]:
                text += f" after agent {row.slot.agent!r} replied {row.text.strip()!r:.200}"
            explained = WorkflowError(f"{text}.")
            for frame in frames[-MOST_LINES:]:
                explained.add_note(f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}")
            raise explained from error

    def _mask(self, error: WorkflowError) -> None:
        """Ends the episode without a reward, or raises the error."""
        if self.on_error is None or not self.episode.rows:
            raise error
        self.on_error(error)
        self.episode.failure, self.episode.masked = str(error), True
        self._returned = ""

    def _slots_of(self, request: dict[str | Slot, Prompt]) -> dict[Slot, Prompt]:
        """The slots that a request for replies fills: those that it names, else the next slot of the agent."""
        asked: dict[Slot, Prompt] = {}
        for key, prompt in request.items():
            agent = key.agent if isinstance(key, Slot) else key
            if agent not in self._slots:
                raise ValueError(
                    f"{self.title}.play asked agent {agent!r}, which is not in its agents {list(self._slots)}."
                )
            slots, used = self._slots[agent], self._used[agent]
            if not isinstance(key, Slot):
                # Slots of earlier turns stay empty
                found = next((slot for slot in slots[used:] if slot.turn >= self._last_turn), None)
                if found is None:
                    raise ValueError(
                        f"{self.title}.play asked agent {agent!r} for one more reply than its slots {slots} hold. Declare "
                        "one Slot per reply."
                    )
            elif key in slots[used:] and key.turn >= self._last_turn:
                found = key
            else:
                why = "was filled or skipped before" if key in slots else f"is not in its slots {slots}"
                raise ValueError(f"{self.title}.play asked for {key}, which {why}.")
            # Prompts of datasets are checked before. An environment may observe nothing, so that its prompt is blank
            fault = None if prompt == self.problem.get("prompt") else fault_of_prompt(prompt)
            if fault is not None:
                raise ValueError(f"{self.title}.play asked agent {agent!r} with an invalid prompt: {fault}.")
            if any(slot.agent == agent for slot in asked) and not (isinstance(key, Slot) and agent not in request):
                raise ValueError(f"{self.title}.play asked agent {agent!r} twice in one request. Name the slots.")
            asked[found] = prompt
        if len({slot.turn for slot in asked}) > 1:
            raise ValueError(
                f"{self.title}.play asked for replies of different turns in one request: {list(asked)}. If a turn leaves a "
                "slot empty, name the slot in the next request: {Slot('main', turn=1): prompt}."
            )
        return asked

    def respond(self, response: Response) -> None:
        """Answer the pending request, and run the workflow until its next one."""
        self.episode.responses.append(response)
        if isinstance(self.request, Execute):
            self._verdicts += zip(self.request.jobs, response, strict=True)  # type: ignore[arg-type]
        elif isinstance(self.request, Consult):
            self.episode.advice += response  # type: ignore[arg-type]
        elif isinstance(self.request, dict):
            for slot in self._asked:
                self._used[slot.agent] = self._slots[slot.agent].index(slot) + 1
                self._last_turn = slot.turn
            for key, text in cast(Mapping[str | Slot, str], response).items():
                self._replies[key.agent if isinstance(key, Slot) else key] = text
        self.request = self._advance(response)

    def answer_rows(self, rows: list[Row]) -> None:
        """Answer the pending request for replies."""
        self.episode.rows += rows
        self.episode.masked |= self.episode.unanswered
        agents = [row.slot.agent for row in rows]
        several = {agent for agent in agents if agents.count(agent) > 1}
        self.respond({row.slot if row.slot.agent in several else row.slot.agent: row.text for row in rows})

    def goes_on(self, turn: int) -> bool:
        """Whether the episode played this turn and may play another one."""
        return len(self.episode.turns) == turn + 1 and self.request is not None

    def next_slots(self) -> list[Slot]:
        """The slots that the pending request for replies fills."""
        assert isinstance(self.request, dict)
        return list(self._asked)

    def prompt_for(self, slot: Slot) -> Prompt:
        """Prompt of a slot in the pending request. An unchanged prompt of the dataset is [`AsGiven`]."""
        prompt = self._asked[slot]
        return AsGiven(prompt) if isinstance(prompt, str) and prompt == self.problem.get("prompt") else prompt

    def fork(self, index: int) -> EpisodePlayer:
        """Copy the episode as number `index`. The copies share the rows and turns so far."""
        fork = EpisodePlayer(self.workflow, self.problem, index, self.on_error)
        fork.episode.rows, fork.episode.turns = list(self.episode.rows), list(self.episode.turns)
        for response in self.episode.responses:
            fork.respond(response)
        if self.request is None:
            fork.stop()
        fork.turn, fork._verdicts = self.turn, list(self._verdicts)
        fork._replies = dict(self._replies)
        fork.episode.masked = self.episode.masked
        return fork

    def stop(self) -> None:
        """End the episode now."""
        self._play.close()
        self.request = None

    def speaks_in(self, level: Level) -> bool:
        """Whether the episode waits for replies of this level."""
        return isinstance(self.request, dict) and self.next_slots()[0] in level.slots

    def end_turn(self) -> None:
        """Close the current turn. If no agent spoke in it, the episode is over."""
        if self._replies or (self.episode.failure is not None and not self.turn):
            with self._explaining("parts"):
                parts = self.workflow.parts(self.episode.problem, self._replies)
            if not isinstance(parts, Mapping):
                raise TypeError(f"{self.title}.parts returned {parts!r:.80}. Return a dict of name -> text.")
            solution, method = self._returned, "play"
            if solution is None:
                method = "solution"
                try:
                    with self._explaining(method):
                        solution = self.workflow.solution(self.episode.problem, parts)
                except WorkflowError as error:
                    self._mask(error)
                    self.stop()
                    solution = ""
            if not isinstance(solution, str):
                raise TypeError(f"{self.title}.{method} returned {solution!r:.80}. Return the solution as text.")
            self.episode.turns.append(Turn(parts, solution, self._verdicts))
        elif not self.turn:
            raise ValueError(
                f"{self.title}.play asked no agent in the first turn. Let it yield {{agent name: prompt}}."
            )
        elif isinstance(self.request, dict) and self.next_slots()[0].turn > self.turn:
            raise ValueError(
                f"{self.title}.play asked no agent in turn {self.turn}, but asks for {self.next_slots()} next. Turns "
                "must be consecutive."
            )
        self._replies, self._verdicts = {}, []
        self.turn += 1
