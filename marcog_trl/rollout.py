"""
Plays workflows in batches.

The engine advances every episode of a batch to its next request, answers all code-execution requests in one call to
the executor and all requests to speak in one call to `generate`, so that the number of generate calls is the number of
stages, whatever the number of problems and agents. It knows nothing about losses, models or trl: training, evaluation
and tests hand it the functions that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from marcog_trl.agents import Execute, Prompt, Slot, Workflow
from marcog_trl.execution import CodeExecutor, Job, Verdict, shared_executor


Request = dict[str, Prompt] | Execute
Answer = dict[str, str] | list[Verdict]


@dataclass
class Row:
    """
    One reply of one agent: the unit of the batch and of the loss.

    Args:
        episode (`int`): Index of the episode in its batch.
        slot (`Slot`): Agent, turn and act of the reply.
        stage (`int`): Number of the generate call, within the episode's batch, that produced the reply.
        prompt (`str` or `list[dict]`): What the agent was asked, before tokenization.
        prompt_ids (`list[int]`): The prompt's token ids.
        completion_ids (`list[int]`): The reply's token ids, the terminal EOS included.
        logprobs (`list[float]`, *optional*): Log-probability of each completion token, where the backend gives it.
        text (`str`): The decoded reply.
        node (`int`): Id of the history node that the reply belongs to: one per episode and turn.
        parent (`int`): Id of the node of the turn before, -1 in the first turn.
    """

    episode: int
    slot: Slot
    stage: int
    prompt: Prompt
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    text: str = ""
    node: int = -1
    parent: int = -1


@dataclass
class Turn:
    """
    What one turn of an episode came to.

    Args:
        replies (`dict[str, str]`): The last reply of each agent that spoke in this turn.
        solution (`str`): The code (or, for a single agent, the reply) that is scored.
        verdicts (`list[tuple[Job, Verdict]]`): What the workflow executed during the turn.
        rewards (`dict[str, float]`, *optional*): Reward of each agent, in reward units; `None` if the episode is
            masked, and before scoring.
    """

    replies: dict[str, str]
    solution: str
    verdicts: list[tuple[Job, Verdict]]
    rewards: dict[str, float] | None = None


@dataclass
class Episode:
    """
    One play of a workflow on one problem.

    Args:
        problem (`Mapping`): The dataset row.
        rows (`list[Row]`): Replies in the order in which they were given.
        turns (`list[Turn]`): One entry per turn played.
        answers (`list`): Every answer that the workflow received, in order: what [`replay`] needs.
        masked (`bool`): Whether a reward function returned `None`, which takes the episode out of every loss.
    """

    problem: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    masked: bool = False


class Generate(Protocol):
    """Answers one stage: one completion per row, in order. Called with no rows where only other processes have some."""

    def __call__(self, rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]: ...


class _Player:
    """An episode in flight: the workflow's generator, the request that it waits on, and its record."""

    def __init__(self, workflow: Workflow, problem: Mapping[str, Any], index: int):
        self.workflow = workflow
        self.index = index
        self.episode = Episode(problem)
        self.turn = 0
        self._replies: dict[str, str] = {}
        self._verdicts: list[tuple[Job, Verdict]] = []
        self._slots = {
            agent.name: [slot for slot in workflow.slots if slot.agent == agent.name] for agent in workflow.agents
        }
        self._spoken = dict.fromkeys(self._slots, 0)
        self._play: Generator[Request, Answer, None] = workflow.play(problem)
        self.request: Request | None = self._advance(None)

    def _advance(self, answer: Answer | None) -> Request | None:
        try:
            request = next(self._play) if answer is None else self._play.send(answer)
        except StopIteration:
            return None
        if isinstance(request, Execute):
            if not request.jobs:
                raise ValueError(
                    f"{type(self.workflow).__name__}.play yielded Execute without jobs; give at least one"
                )
        elif not (isinstance(request, dict) and request):
            raise TypeError(
                f"{type(self.workflow).__name__}.play yielded {request!r}; yield a non-empty dict of agent -> prompt, or "
                "Execute([job, ...])"
            )
        return request

    def answer(self, answer: Answer) -> None:
        self.episode.answers.append(answer)
        if isinstance(self.request, Execute):
            self._verdicts += zip(self.request.jobs, answer, strict=True)  # type: ignore[arg-type]
        elif isinstance(self.request, dict):
            for agent in self.request:
                self._spoken[agent] += 1
            self._replies.update(answer)  # type: ignore[arg-type]
        self.request = self._advance(answer)

    def next_slots(self) -> list[Slot]:
        """The slots that the pending request to speak fills."""
        assert isinstance(self.request, dict)
        slots = []
        for agent in self.request:
            if agent not in self._slots:
                raise ValueError(
                    f"{type(self.workflow).__name__} asked agent {agent!r}, which is not in its agents {list(self._slots)}"
                )
            if self._spoken[agent] == len(self._slots[agent]):
                raise ValueError(
                    f"{type(self.workflow).__name__} asked agent {agent!r} for reply {self._spoken[agent] + 1}, but its "
                    f"slots hold {self._spoken[agent]}; declare one Slot per reply"
                )
            slots.append(self._slots[agent][self._spoken[agent]])
        if len({slot.turn for slot in slots}) > 1:
            raise ValueError(f"{type(self.workflow).__name__} asked for replies of different turns at once: {slots}")
        return slots

    def stop(self) -> None:
        """Ends the episode here."""
        self._play.close()
        self.request = None

    def speaks_now(self) -> bool:
        """Whether the episode waits for replies of the current turn."""
        return isinstance(self.request, dict) and self.next_slots()[0].turn == self.turn

    def end_turn(self) -> None:
        """Closes the current turn. Turns are consecutive: where nobody speaks, the episode is over."""
        if self._replies:
            solution = self.workflow.solution(self.episode.problem, self._replies)
            self.episode.turns.append(Turn(self._replies, solution, self._verdicts))
        elif not self.turn:
            raise ValueError(f"{type(self.workflow).__name__}.play let nobody speak in the first turn")
        elif isinstance(self.request, dict) and self.next_slots()[0].turn > self.turn:
            raise ValueError(
                f"{type(self.workflow).__name__}.play let nobody speak in turn {self.turn}, but asks "
                f"{list(self.request)} for turn {self.next_slots()[0].turn}; slots of consecutive turns work"
            )
        self._replies, self._verdicts = {}, []
        self.turn += 1


def play(
    workflow: Workflow,
    problems: Sequence[Mapping[str, Any]],
    generate: Generate,
    encode: Callable[[list[Prompt]], list[list[int]]],
    decode: Callable[[list[list[int]]], list[str]],
    executor: CodeExecutor | None = None,
    score: Callable[[list[Episode], int], None] | None = None,
    total: Callable[[int], int] = int,
    ends: Callable[[Episode], bool] | None = None,
) -> list[Episode]:
    """
    Plays one episode of a workflow per problem.

    Args:
        workflow (`Workflow`): Who speaks when, and who sees what.
        problems (`Sequence[Mapping]` of length E): Dataset rows; repeat a row to play it several times.
        generate (`Callable`): `generate(rows) -> (completion_ids, logprobs or None)`, called once per stage.
        encode (`Callable`): `encode(prompts) -> prompt_ids`.
        decode (`Callable`): `decode(completion_ids) -> texts`.
        executor (`CodeExecutor`, *optional*): Runs what workflows ask to execute. Defaults to the shared one.
        score (`Callable`, *optional*): `score(episodes, turn)`, called once at the end of every turn; it sets the
            `rewards` of that turn of the episodes that have it.
        total (`Callable`, *optional*): Sums an `int` over all processes, so that every process makes the same number
            of generate calls; with several processes it is a collective operation.
        ends (`Callable`, *optional*): `ends(episode)`, asked after the scoring of each turn but the last: whether the
            episode is over, whatever its workflow would still ask.

    Returns:
        `list[Episode]`: E episodes, in the order of `problems`.

    Raises:
        ValueError: If a workflow asks an agent that it does not have, or for more replies than its slots.
    """
    players = [_Player(workflow, problem, index) for index, problem in enumerate(problems)]
    stage = 0
    for turn in range(workflow.num_turns):
        while True:
            _execute(players, executor)
            speaking = [player for player in players if player.speaks_now()]
            if total(len(speaking)) == 0:
                break
            rows = _rows(speaking, stage, turn, encode)
            completion_ids, logprobs = generate(rows)
            texts = decode(completion_ids) if rows else []
            for i, row in enumerate(rows):
                row.completion_ids, row.text = completion_ids[i], texts[i]
                row.logprobs = None if logprobs is None else logprobs[i]
            _answer(speaking, rows)
            stage += 1
        for player in players:
            player.end_turn()
        if score is not None:
            score([player.episode for player in players], turn)
        for player in players:
            if ends is not None and turn < workflow.num_turns - 1 and player.request is not None:
                if ends(player.episode):
                    player.stop()
    for player in players:
        if isinstance(player.request, dict):
            raise ValueError(
                f"{type(workflow).__name__}.play asks {list(player.request)} for turn {player.next_slots()[0].turn} after "
                f"its last turn; num_turns={workflow.num_turns} is too small, or replies come in another order than slots"
            )
    return [player.episode for player in players]


def _execute(players: list[_Player], executor: CodeExecutor | None) -> None:
    while waiting := [player for player in players if isinstance(player.request, Execute)]:
        jobs = [job for player in waiting for job in player.request.jobs]  # type: ignore[union-attr]
        verdicts = iter((executor or shared_executor()).run(jobs))
        for player in waiting:
            player.answer([next(verdicts) for _ in player.request.jobs])  # type: ignore[union-attr]


def _rows(speaking: list[_Player], stage: int, turn: int, encode: Callable) -> list[Row]:
    rows = []
    for player in speaking:
        num_turns = player.workflow.num_turns
        node = player.index * num_turns + turn
        parent = node - 1 if turn else -1
        for slot in player.next_slots():
            prompt = player.request[slot.agent]  # type: ignore[index]
            rows.append(Row(player.index, slot, stage, prompt, [], node=node, parent=parent))
    if rows:
        # The siblings of a group ask the same thing in the first stage: tokenize each prompt once
        unique = {repr(row.prompt): row.prompt for row in rows}
        ids = dict(zip(unique, encode(list(unique.values())), strict=True))
        for row in rows:
            row.prompt_ids = list(ids[repr(row.prompt)])
    return rows


def _answer(speaking: list[_Player], rows: list[Row]) -> None:
    pending = iter(rows)
    for player in speaking:
        spoken = [next(pending) for _ in player.request]  # type: ignore[union-attr]
        player.episode.rows += spoken
        player.answer({row.slot.agent: row.text for row in spoken})


def replay(workflow: Workflow, problem: Mapping[str, Any], answers: Sequence[Answer]) -> list[Request]:
    """
    Feeds recorded answers to a fresh play of a workflow.

    A workflow is deterministic given the answers, so a prefix of an episode's record brings a fresh generator to the
    same point: this is how an episode is forked or looked at again.

    Args:
        workflow (`Workflow`): The workflow that was played.
        problem (`Mapping`): The problem that was played.
        answers (`Sequence`): [`Episode.answers`], or a prefix of it.

    Returns:
        `list`: The requests that the workflow made, the one that it waits on included if it has not ended.

    Raises:
        ValueError: If the workflow ends before all answers are used.
    """
    player = _Player(workflow, problem, 0)
    requests = [player.request]
    for answer in answers:
        if player.request is None:
            raise ValueError(
                f"the record has {len(answers)} answers, but the workflow ended after {len(requests) - 1}"
            )
        player.answer(answer)
        requests.append(player.request)
    return [request for request in requests if request is not None]


def encode_prompts(processing_class: Any, prompts: list[Prompt], **chat_template_kwargs: Any) -> list[list[int]]:
    """
    Tokenizes prompts for generation.

    Chat messages go through the tokenizer's chat template; where it has none (base models), their contents are joined
    by blank lines. Plain text is tokenized as it is.

    Args:
        processing_class (`PreTrainedTokenizerBase`): The tokenizer.
        prompts (`list[str | list[dict]]`): B prompts.
        chat_template_kwargs: Passed to the chat template.

    Returns:
        `list[list[int]]`: B lists of token ids, of their own lengths, without padding.
    """
    texts = []
    for prompt in prompts:
        if isinstance(prompt, str):
            texts.append((prompt, True))
        elif processing_class.chat_template:
            text = processing_class.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False, **chat_template_kwargs
            )
            texts.append((text, False))
        else:
            texts.append(("\n\n".join(message["content"] for message in prompt) + "\n", True))
    ids: list[list[int]] = []
    for text, add_special_tokens in texts:
        ids.append(processing_class(text=text, add_special_tokens=add_special_tokens)["input_ids"])
    return ids
