"""
Calls reward functions, and stores what they return in the turns of episodes. Training and evaluation use it.

It knows nothing about rows of a batch, advantages or losses.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import get_callable_name, is_async_callable, start_event_loop_in_daemon

from marcog_trl.agents import Workflow
from marcog_trl.execution import CodeExecutor
from marcog_trl.problems import solution_job
from marcog_trl.processes import sum_over_processes, this_process
from marcog_trl.rewards.requirements import needs, unwrap, wants_executor
from marcog_trl.rewards.values import EpisodeMean, InfrastructureFailure
from marcog_trl.rollout.records import Episode, Score


_EXECUTION = "code execution"


def is_reward_model(reward_func: Any) -> bool:
    """Whether it is a reward model, or TRL loads one from it."""
    return isinstance(reward_func, torch.nn.Module | str)


# One call


@dataclass(repr=False)
class RewardCall:
    """
    The returned values of all reward functions for one turn.

    Args:
        turn (`int`): The turn, counted from 0.
        episodes (`list[Episode]` of length P): The episodes that have the turn.
        rewards (`list[list]` of shape `(F, P)`): What [`check_rewards`] returns for each function; `None` if it failed.
        columns (`dict[str, list]`): Values that functions passed to `log_extra`.
        metrics (`list[tuple[str, float]]`): Values that functions passed to `log_metric`.
        errors (`dict[str, Exception]`): Errors on this process, by what failed.
    """

    turn: int
    episodes: list[Episode]
    rewards: list[list[Any]]
    columns: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)

    @property
    def values(self) -> torch.Tensor:
        """Value of each function in reward units, averaged over agents, `(P, F)`. NaN if it gave none."""
        means = [[_mean(reward) for reward in of_function] for of_function in self.rewards]
        return torch.tensor(means).reshape(len(self.rewards), len(self.episodes)).T

    def lost(self, i: int) -> list[str]:
        """Reasons why the i-th episode could not be scored."""
        return [own[i].reason for own in self.rewards if isinstance(own[i], InfrastructureFailure)]

    def score(self, i: int, values: Sequence[float], agents: Sequence[str]) -> Score:
        """Returns the score of the i-th episode, whose row of `values` is given."""
        rewards = [
            own[i] if isinstance(own[i], dict) else dict.fromkeys(agents, value)
            for own, value in zip(self.rewards, values, strict=True)
        ]
        metrics = defaultdict(list)
        for name, value in self.metrics:
            # The value of the episode, or of the call if a function logs only one. Names omit the turn
            of_episode = value.values[i] if isinstance(value, EpisodeMean) else value
            if of_episode is not None:
                metrics[name.replace(f"/turn_{self.turn + 1}/", "/", 1)].append(of_episode)
        return Score(
            values=tuple(values),
            columns={column: logged[i] for column, logged in self.columns.items()},
            metrics={name: sum(found) / len(found) for name, found in metrics.items()},
            failed=bool(self.errors),
            by_agent={agent: tuple(own[agent] for own in rewards) for agent in agents},
        )


def _mean(reward: Any) -> float:
    if isinstance(reward, dict):
        return sum(reward.values()) / len(reward)
    return math.nan if reward is None else reward


def call_rewards(
    funcs: Sequence[Any],
    episodes: Sequence[Episode],
    turn: int,
    workflow: Workflow,
    executor: Callable[[], CodeExecutor],
    timeout: float | None = None,
    timed: Callable[[str], AbstractContextManager] = nullcontext,
    **given: Any,
) -> RewardCall:
    """
    Calls every reward function once, with the episodes that have a turn.

    An error of a function is in the result and is not raised, so that no process stops while others wait for it. Reward models
    are left out: they give `None`.

    Args:
        funcs (`list` of length F): Functions and coroutine functions with TRL's signature.
        episodes (`list[Episode]`): Episodes. Those that ended before the turn are skipped.
        turn (`int`): The turn, counted from 0.
        workflow ([`Workflow`]): The workflow, for functions that take it.
        executor (`Callable`): Returns the executor, for functions that take one.
        timeout (`float`, *optional*): Seconds after which a call of a coroutine function is cancelled, at its next `await`.
        timed (`Callable`, *optional*): Returns the context in which the function with a name is called.
        **given: Further keyword arguments of the functions, such as `trainer_state`.

    Returns:
        [`RewardCall`].
    """
    playing = [episode for episode in episodes if len(episode.turns) > turn]
    count = len(playing)
    call = RewardCall(turn, playing, [[None] * count for _ in funcs])
    if not playing:
        return call

    columns, prompts, completions, completion_ids = reward_inputs(playing, turn)
    agents = [agent.name for agent in workflow.agents]
    given = {
        "workflow": workflow,
        **{key: [row[key] for row in columns] for key in columns[0] if key != "prompt"},
        **{"prompts": prompts, "completions": completions, "completion_ids": completion_ids},
        **given,
    }
    logged: list[tuple[dict[str, list], list[tuple[str, float]]]] = [({}, []) for _ in funcs]

    def arguments(f: int) -> dict[str, Any]:
        def log_extra(column: str, values: list) -> None:
            if len(values) != count:
                raise ValueError(
                    f"a reward function logged {len(values)} values as {column!r} for {count} episodes. Log one value for each "
                    "of its completions."
                )
            logged[f][0][column] = list(values)

        def log_metric(name: str, value: float) -> None:
            of_episodes = isinstance(value, EpisodeMean) and len(value.values) == count
            logged[f][1].append((name, value if of_episodes else float(value)))

        own = {**given, "log_extra": log_extra, "log_metric": log_metric}
        if wants_executor(funcs[f]):
            own["executor"] = executor()
        accepted = _parameters(funcs[f])
        return own if accepted is None else {key: own[key] for key in accepted & own.keys()}

    def settle(f: int, output: Callable[[], Any]) -> None:
        name = get_callable_name(funcs[f])
        try:
            with timed(name):
                call.rewards[f] = check_rewards(name, output(), count, agents)
                call.columns |= logged[f][0]  # what a call that fails has logged is dropped
                call.metrics += logged[f][1]
        except SystemExit as error:  # the other processes would wait for this one
            call.errors[_said(name)] = _of_exit(name, error)
        except Exception as error:
            if isinstance(error, AttributeError | TypeError) and isinstance(completions[0], list):
                error.add_note("Prompts are chats, so completions are messages: read completion[-1]['content'].")
            call.errors[_said(name)] = error

    functions = [(f, func) for f, func in enumerate(funcs) if not is_reward_model(func)]
    for f, func in functions:
        if not is_async_callable(func):
            settle(f, lambda f=f, func=func: func(**arguments(f)))  # type: ignore[misc]
    running = [
        (f, asyncio.run_coroutine_threadsafe(_limited(func, functools.partial(arguments, f), timeout), _event_loop()))
        for f, func in functions
        if is_async_callable(func)
    ]
    for f, future in running:
        settle(f, future.result)
    return call


def _said(name: str) -> str:
    return f"reward function {name!r}"


def _of_exit(name: str, error: SystemExit) -> RuntimeError:
    return RuntimeError(f"{_said(name)} called exit: {error!r}").with_traceback(error.__traceback__)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all coroutine functions: clients that they keep belong to it."""
    _, loop, ready = start_event_loop_in_daemon(name="marcog-trl-rewards")
    ready.wait()
    return loop


async def _limited(func: Callable, arguments: Callable[[], dict[str, Any]], timeout: float | None) -> Any:
    limit, name = asyncio.timeout(timeout), get_callable_name(func)
    try:
        async with limit:
            return await func(**arguments())
    except TimeoutError:
        if not limit.expired():
            raise  # raised by the function itself
        raise TimeoutError(
            f"{_said(name)} took longer than reward_timeout={timeout} seconds. Set a longer reward_timeout, or "
            "on_reward_error='mask' to exclude such episodes."
        ) from None
    except SystemExit as error:  # would end the loop
        raise _of_exit(name, error) from None


def _parameters(reward_func: Callable) -> set[str] | None:
    """Returns the names of a reward function's arguments, or `None` if it has `**kwargs`."""
    parameters = inspect.signature(reward_func).parameters.values()
    takes_all = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_all else {parameter.name for parameter in parameters}


def reward_inputs(
    episodes: Sequence[Episode], turn: int
) -> tuple[list[dict[str, Any]], list[Any], list[Any], list[list[int]]]:
    """
    Returns the inputs of reward functions, in TRL's format.

    Args:
        episodes (`list[Episode]` of length E): The episodes.
        turn (`int`): Their turn, counted from 0. The last one of episodes that ended before.

    Returns:
        `tuple` of four lists of length E: the columns of the problem and of the turn; prompts; completions, which are texts, or
        chat messages if the prompt is a list of messages (with calls and results of tools, if the solution is the reply of an
        agent with tools); token ids of the turn's replies.
    """
    columns, completion_ids = list[dict[str, Any]](), list[list[int]]()
    completions: list[Any] = []
    for episode in episodes:
        k = min(turn, len(episode.turns) - 1)
        this, before = episode.turns[k], episode.turns[k - 1] if k else None
        columns.append(
            {
                "replies": this.replies,
                "turn": k,
                "verdicts": this.verdicts,
                "advice": episode.advice,
                "rows": [row for row in episode.rows if row.slot.turn <= k],
                "previous_solution": None if before is None else before.solution,
                "previous_verdicts": [] if before is None else before.verdicts,
                **episode.problem,  # has such columns only where they are meant (see `check_dataset`)
            }
        )
        rows = [row for row in episode.rows if row.slot.turn == k]
        completion_ids.append([token for row in rows for token in row.completion_ids])
        if isinstance(episode.problem["prompt"], str):
            completions.append(this.solution)
        else:
            used = [row.messages for row in rows if row.text == this.solution and row.messages]
            completions.append(used[-1] if used else [{"role": "assistant", "content": this.solution}])
    return columns, [row["prompt"] for row in columns], completions, completion_ids


def check_rewards(name: str, output: Any, expected: int, agents: list[str]) -> list[float | dict[str, float] | None]:
    """
    Checks a reward function's output: per episode a float, a dict (agent -> float), an [`InfrastructureFailure`] or `None`. NaN is
    `None`, as in TRL: the reward does not apply.

    Raises:
        ValueError: If the output is something else, has another length, or contains infinity, or NaN for one of the agents.
    """
    if not isinstance(output, Iterable):
        raise ValueError(f"reward function {name!r} returned {output!r}. It must return a list of {expected} rewards.")
    rewards = list(output)
    if len(rewards) != expected:
        raise ValueError(
            f"reward function {name!r} returned {len(rewards)} rewards for {expected} episodes. It must return one per "
            "episode."
        )
    checked: list[float | dict[str, float] | None] = []
    for i, reward in enumerate(rewards):
        if reward is None or isinstance(reward, InfrastructureFailure):
            checked.append(reward)
            continue
        try:
            if isinstance(reward, str):
                raise TypeError
            numbers = {agent: float(reward[agent]) for agent in agents} if isinstance(reward, dict) else float(reward)
        except (KeyError, TypeError, ValueError):
            numbers = None
        if numbers is None or (isinstance(reward, dict) and len(reward) != len(agents)):
            raise ValueError(
                f"reward function {name!r} returned {reward!r} for episode {i}. Return a float, None, or a dict with a float "
                f"for each of {agents}."
            )
        if isinstance(numbers, float) and math.isnan(numbers):
            numbers = None
        for number in numbers.values() if isinstance(numbers, dict) else [numbers or 0.0]:
            if not math.isfinite(number):
                shown = "NaN" if math.isnan(number) else number
                raise ValueError(
                    f"reward function {name!r} returned {shown} for episode {i}. Return None if the reward does not apply."
                )
        checked.append(numbers)
    return checked


# The rewards of a team


@dataclass
class ScoringSettings:
    """The fields of [`MultiAgentConfig`] that a [`Scorer`] reads, with their defaults."""

    on_reward_error: str = "raise"
    reward_timeout: float | None = None
    reward_shift: float = 0.0


class Scorer:
    """
    The reward functions of a team.

    Args:
        funcs (`list` of length F): Functions, coroutine functions and reward models, as TRL accepts them.
        workflow ([`Workflow`]): The team's workflow.
        executor (`Callable`): Returns the executor. Called when it is first needed.
        settings ([`ScoringSettings`] or [`MultiAgentConfig`], *optional*): Limits, and how to handle failures.
        weights (`Callable`, *optional*): Returns the weight of each function, `(F,)`. Defaults to 1 for all.
        score_models (`Callable`, *optional*): Maps what [`reward_inputs`] returns to the scores of the reward models,
            `(E, number of models)`. A collective operation.
        given (`Callable`, *optional*): Returns further keyword arguments of the functions.
        timed (`Callable`, *optional*): See [`call_rewards`].

    Raises:
        ValueError: If `reward_timeout` is set, but no function is a coroutine function.
    """

    def __init__(
        self,
        funcs: list,
        workflow: Workflow,
        executor: Callable[[], CodeExecutor],
        settings: Any = None,
        weights: Callable[[], torch.Tensor] | None = None,
        score_models: Callable[..., torch.Tensor] | None = None,
        given: Callable[[], Mapping[str, Any]] = dict,
        timed: Callable[[str], AbstractContextManager] = nullcontext,
    ):
        self.funcs = funcs
        self.settings = settings or ScoringSettings()
        self._weights = weights or (lambda: torch.ones(len(self.funcs)))
        self._score_models = score_models
        self._given = given
        self._timed = timed
        self._workflow = workflow
        self._agents = [agent.name for agent in workflow.agents]
        self._executor = executor
        self._warned: set[str] = set()
        timeout = self.settings.reward_timeout
        if timeout is not None and not any(not is_reward_model(func) and is_async_callable(func) for func in funcs):
            raise ValueError(
                f"reward_timeout={timeout} limits only coroutine functions, and there is none. Write the reward as `async def`, "
                "or limit its time inside the function. Rewards that run tests have execution_timeout."
            )

    @property
    def runs_tests(self) -> bool:
        """Whether a function needs the verdict on the solution."""
        return any(needs(func, "tests") for func in self.funcs)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuses reward functions that read token ids of another tokenizer."""
        for func in self.funcs:
            if needs(func, "tokenizer"):
                unwrap(func).check_tokenizer(tokenizer)  # type: ignore[attr-defined]

    def execute(self, episodes: Sequence[Episode], turns: Iterable[int]) -> Callable[[], None]:
        """
        Starts to execute the solutions of these turns with all tests of their problems. Does not repeat what the workflow has
        executed, unless the executor failed.

        Returns:
            `Callable[[], None]`: Waits for the verdicts, and sets `tested` on every turn.
        """
        played = [(episode, episode.turns[k]) for k in turns for episode in episodes if len(episode.turns) > k]
        jobs = [solution_job(episode.problem, turn.solution) for episode, turn in played]
        known = {
            job: verdict for _, turn in played for job, verdict in turn.verdicts if verdict.status != "infrastructure"
        }
        missing = list(dict.fromkeys(job for job in jobs if job not in known))
        future = self._executor().submit(missing)

        def finish() -> None:
            verdicts = known | dict(zip(missing, future.result(), strict=True))
            for (_, turn), job in zip(played, jobs, strict=True):
                turn.tested = job, verdicts[job]
                turn.verdicts = [pair for pair in turn.verdicts if pair[0] != job] + [turn.tested]

        return finish

    def end_turn(self, episodes: list[Episode], turn: int) -> list[tuple[str, float]]:
        """Executes the solutions of a turn if a function needs that, and scores it. See [`Scorer.score`]."""
        return self.score(episodes, turn, self.execute(episodes, [turn]) if self.runs_tests else None)

    def score(
        self, episodes: list[Episode], turn: int, wait: Callable[[], None] | None = None
    ) -> list[tuple[str, float]]:
        """
        Scores one turn of the episodes of this process: sets `rewards` and `score` on the turn, and `masked` on episodes.

        A collective operation: all processes must pass the same number of episodes.

        Args:
            episodes (`list[Episode]` of length E): The episodes. Those that ended before the turn are skipped.
            turn (`int`): The turn, counted from 0.
            wait (`Callable`, *optional*): Waits for the verdicts (see [`Scorer.execute`]).

        Returns:
            `list[tuple[str, float]]`: Names and values that functions passed to `log_metric`.

        Raises:
            Exception: On all processes, the error of the executor, or of a reward function with `on_reward_error="raise"`.
        """
        errors: dict[str, Exception] = {}
        try:
            if wait is not None:
                wait()
        except Exception as error:  # raised below on all processes, so that none waits for this one
            errors[_EXECUTION] = error
        timeout = self.settings.reward_timeout
        call = call_rewards(
            self.funcs, episodes, turn, self._workflow, self._executor, timeout, self._timed, **self._given()
        )
        call.errors = errors | call.errors
        models = [f for f, func in enumerate(self.funcs) if is_reward_model(func)]
        if models and self._score_models is not None:  # of all episodes, because TRL gathers as many from each process
            playing = torch.tensor([len(episode.turns) > turn for episode in episodes])
            scores = self._score_models(*reward_inputs(episodes, turn)).float().cpu()[playing]
            for f, of_model in zip(models, scores.T.tolist(), strict=True):
                call.rewards[f] = of_model
        self._raise_or_warn(call.errors)
        if call.errors:
            call.rewards = [[None] * len(call.episodes) for _ in self.funcs]
        values, weights = call.values, self._weights().tolist()
        lost = [self._note(call, i, values[i], weights) for i in range(len(call.episodes))]
        if this_process().is_main_process:
            self._warn(call, values, [reasons for reasons in lost if reasons])
        return call.metrics

    def _note(self, call: RewardCall, i: int, values: torch.Tensor, weights: Sequence[float]) -> list[str]:
        """
        Stores the rewards of the i-th episode of the call in the episode, and returns why it could not be scored, if there are
        reasons. `values` and `weights` of the functions: `(F,)`.
        """
        episode = call.episodes[i]
        turn = episode.turns[call.turn]
        turn.score = call.score(i, values.tolist(), self._agents)
        lost = call.lost(i)
        if self.runs_tests and turn.tested is not None and turn.tested[1].status == "infrastructure":
            lost.append(turn.tested[1].message)
        if lost or values.isnan().all():
            episode.masked = True
            return lost
        turn.rewards = {
            agent: self.settings.reward_shift
            + sum(weight * value for weight, value in zip(weights, own, strict=True) if not math.isnan(value))
            for agent, own in turn.score.by_agent.items()
        }
        return lost

    def _raise_or_warn(self, errors: Mapping[str, Exception]) -> None:
        """Raises an error on all processes, or warns of it on this one."""
        masks = self.settings.on_reward_error == "mask"
        fatal = {what: error for what, error in errors.items() if not masks or what == _EXECUTION}
        state = this_process()
        if sum_over_processes(torch.tensor(len(fatal), device=state.device)).item():
            index = state.process_index
            messages = gather_object([f"{what} failed on process {index}: {error!r}" for what, error in fatal.items()])
            raise next(iter(fatal.values()), RuntimeError("; ".join(messages)))
        for what, error in errors.items():
            self._warn_once(
                what,
                f"{what} failed, and on_reward_error='mask' excludes the episodes of this call from training. Later failures "
                f"are counted as rewards/failed in the log: {' '.join([repr(error), *getattr(error, '__notes__', [])])}",
            )

    def _warn(self, call: RewardCall, values: torch.Tensor, lost: list[list[str]]) -> None:
        """Warns once of failed infrastructure, and of functions that return only `None`."""
        if lost:
            reason = next((reason for reasons in lost for reason in reasons if reason), "no reason given")
            self._warn_once(
                _EXECUTION,
                f"{len(lost)} of {len(call.episodes)} episodes could not be scored because the infrastructure failed: "
                f"{reason}. Such episodes are excluded from training, and counted as episodes/masked in the log.",
            )
        elif call.episodes and not call.errors and values.isnan().all():
            names = ", ".join(repr(get_callable_name(func)) for func in self.funcs)
            self._warn_once(
                "silence",
                f"The reward functions ({names}) have returned only None for {len(call.episodes)} episodes, which means that "
                "none applies. These episodes are not trained on.",
            )

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, stacklevel=2)


def is_over(episode: Episode, threshold: float) -> bool:
    """Whether the last turn's reward, averaged over agents, exceeds the threshold, or the episode is masked."""
    rewards = episode.turns[-1].rewards
    return sum(rewards.values()) / len(rewards) > threshold if rewards else episode.masked
