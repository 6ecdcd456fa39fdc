"""
Plays workflows in batches.

The engine runs all episodes of a batch to their next request. It answers all requests to run code with one call of the
executor, and all requests for replies with one call of `generate`: one call per stage, whatever the number of problems,
agents and branches. The caller passes the functions that generate, encode, decode and score.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from marcog_trl.agents import LATER, Advisor, Consult, Execute, Prompt, Workflow
from marcog_trl.execution import CodeExecutor, shared_executor
from marcog_trl.parsing.prompts import ChatRequest
from marcog_trl.rollout.chats import as_text, render
from marcog_trl.rollout.player import EpisodePlayer, WorkflowError
from marcog_trl.rollout.records import AsGiven, Episode, Request, Response, Row
from marcog_trl.rollout.tree import Level, Tree


class Generate(Protocol):
    """Generates the replies of one stage: one completion per row, in order. `rows` is empty if only other processes have some."""

    def __call__(self, rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]: ...


def play(
    workflow: Workflow,
    problems: Sequence[Mapping[str, Any]],
    generate: Generate,
    encode: Any,
    decode: Any,
    **options: Any,
) -> list[Episode]:
    """
    Play one episode of a workflow per problem.

    Args:
        workflow (`Workflow`): The workflow.
        problems (`Sequence[Mapping]` of length E): Dataset rows. Repeat a row to play it several times.
        generate, encode, decode, **options: See [`play_tree`].

    Returns:
        `list[Episode]`: E episodes, in the order of `problems`.
    """
    tree = Tree.of_turns(workflow, [1] * workflow.num_turns)
    return play_tree(workflow, problems, generate, encode, decode, tree, **options)[-1]


def play_tree(
    workflow: Workflow,
    problems: Sequence[Mapping[str, Any]],
    generate: Generate,
    encode: Callable[[list[Prompt]], list[list[int]]],
    decode: Callable[[list[list[int]]], list[str]],
    tree: Tree,
    executor: Callable[[], CodeExecutor] = shared_executor,
    score: Callable[[list[Episode], int], object] | None = None,
    sum_over_processes: Callable[[int], int] = int,
    is_over: Callable[[Episode], bool] | None = None,
    on_error: Callable[[WorkflowError], None] | None = None,
    end_tokens: Collection[int] = (),
) -> list[list[Episode]]:
    """
    Play a tree of episodes per problem. All episodes are played together, level by level.

    Args:
        workflow (`Workflow`): The workflow.
        problems (`Sequence[Mapping]` of length P): Dataset rows, without repetition where episodes branch.
        generate (`Callable`): `generate(rows) -> (completion_ids, logprobs or None)`, called once per stage.
        encode (`Callable`): `encode(prompts) -> prompt_ids`.
        decode (`Callable`): `decode(completion_ids) -> texts`.
        tree ([`~marcog_trl.rollout.tree.Tree`]): Where episodes branch.
        executor (`Callable`, *optional*): `executor()` returns the `CodeExecutor` that runs the jobs of workflows, when there
            are some. Defaults to the shared executor.
        score (`Callable`, *optional*): `score(episodes, turn)`, called once at the end of each turn with all its episodes. It
            sets the `rewards` of that turn in those that played it. An episode that ended earlier has fewer turns, and occurs
            once per descendant that it could have had. Where the next turn branches, masked episodes end, too.
        sum_over_processes (`Callable`, *optional*): Sums an `int` over all processes (a collective operation), so that all processes
            make the same number of generate calls. By default there is one process.
        is_over (`Callable`, *optional*): `is_over(episode)`, called after the scoring of each turn except the last. Whether the
            episode ends here, even if its workflow would go on.
        on_error (`Callable`, *optional*): `on_error(error)`, called where the workflow raises an exception. The episode is then
            masked and ends. By default the exception ends the run.
        end_tokens (`Collection[int]`, *optional*): Tokens that end a reply. Programs are told that others were cut off.

    Returns:
        `list[list[Episode]]` of length K: For each turn, its episodes, sorted by problem, those with the same history next to
        each other. They share the rows and turns of their ancestors.

    Raises:
        TypeError: If `play`, `parts` or `solution` of the workflow yields or returns a value of a wrong type.
        WorkflowError: If one of them raises an exception, and there is no `on_error`.
        ValueError: If the workflow asks an agent that it does not have, asks for more replies than it has slots, or asks
            with an empty prompt; or if agents do not speak at the same moment in cross mode.
    """
    workflow.validate()
    engine = _Engine(generate, encode, decode, executor, sum_over_processes, end_tokens)
    players = [EpisodePlayer(workflow, problem, index, on_error) for index, problem in enumerate(problems)]
    if not workflow.replayable:  # even the first requests of siblings may differ
        players, tree = _forks(players, tree.branches[0]), tree.without_root
    turns: list[list[Episode]] = []
    for turn in range(workflow.num_turns):
        for level in tree.levels_of(turn):
            engine.advance(players, level)
            players = engine.play_cross(players, level) if level.cross else engine.play_level(players, level)
        for player in players:
            player.end_turn()
            if isinstance(player.request, dict) and player.next_slots()[0].turn <= turn:
                raise _out_of_order(player)
        turns.append([player.episode for player in players])
        for e, episode in reversed(list(enumerate(turns[-1]))):  # the first episode that contains a row names it
            for row in episode.rows:
                row.episode = e if row.slot.turn == turn else row.episode
        if score is not None:
            score(turns[-1], turn)
        if turn < workflow.num_turns - 1:
            branches = tree.branches[turn + 1] > 1
            for player in players:
                over = player.goes_on(turn) and is_over is not None and is_over(player.episode)
                if over or (branches and player.episode.masked):
                    player.stop()
    failed = [player.episode.failure for player in players if player.episode.failure is not None]
    if workflow.may_fail and sum_over_processes(len(players) - len(failed)) == 0 and players:
        raise ValueError(f"All episodes failed. The first one, because {failed[0] if failed else 'others did'}")
    for player in players:
        if isinstance(player.request, dict):
            raise ValueError(
                f"{player.title}.play asks for {player.next_slots()} after its last turn. Increase num_turns="
                f"{workflow.num_turns}, or ask in the order of the slots."
            )
    return turns


def _forks(players: list[EpisodePlayer], count: int) -> list[EpisodePlayer]:
    return [player.fork(player.index * count + i) for player in players for i in range(count)]


@dataclass
class _Engine:
    """Answers the requests of many episodes, one call per kind and stage."""

    generate: Generate
    encode: Callable[[list[Prompt]], list[list[int]]]
    decode: Callable[[list[list[int]]], list[str]]
    executor: Callable[[], CodeExecutor]
    sum_over_processes: Callable[[int], int]
    end_tokens: Collection[int]
    stage: int = 0

    def advance(self, players: list[EpisodePlayer], level: Level) -> None:
        """
        Run code and ask advisors until each episode waits for replies, is over, or has an advisor that answers later. Where
        episodes branch at every stage, they wait for such advisors.
        """
        late: set[EpisodePlayer] = set()
        while True:
            executing = [player for player in players if isinstance(player.request, Execute)]
            consulting = [p for p in players if isinstance(p.request, Consult) and p not in late]
            waits = level.is_stage or not any(isinstance(player.request, dict) for player in players)
            if late and waits and not executing and not consulting:
                consulting, late = list(late), set()
            if executing:
                # Joint actions that share replies run the same programs
                jobs = dict.fromkeys(job for player in executing for job in player.request.jobs)  # type: ignore[union-attr]
                verdicts = dict(zip(jobs, self.executor().run(list(jobs)), strict=True))
                for player in executing:
                    player.respond([verdicts[job] for job in player.request.jobs])  # type: ignore[union-attr]
            elif consulting:
                asked: dict[Advisor, list[EpisodePlayer]] = {}
                for player in consulting:
                    asked.setdefault(player.request.advisor, []).append(player)  # type: ignore[union-attr]
                for advisor, waiting in asked.items():
                    late |= self._consult(advisor, waiting)
            else:
                return

    @staticmethod
    def _consult(advisor: Advisor, players: list[EpisodePlayer]) -> set[EpisodePlayer]:
        """Asks an advisor for these episodes. Returns those that it answers later."""
        asked = [cast(Consult, player.request).questions for player in players]
        answers = advisor([question for questions in asked for question in questions])
        expected = sum(map(len, asked))
        if len(answers) != expected:
            raise ValueError(
                f"Advisor {advisor} returned {len(answers)} answers. Return one for each of the {expected} questions."
            )
        remaining, late = iter(answers), set()
        for player, questions in zip(players, asked, strict=True):
            own = list(itertools.islice(remaining, len(questions)))
            if LATER in own:
                late.add(player)
            else:
                player.respond(own)
        return late

    def play_level(self, players: list[EpisodePlayer], level: Level) -> list[EpisodePlayer]:
        """Play the slots of a level in all branches of the episodes, with one reply per request."""
        if level.replies > 1:
            players = _forks(players, level.replies)
        while True:
            speaking = [player for player in players if player.speaks_in(level)]
            if self.sum_over_processes(len(speaking)) == 0:
                return players
            for player in speaking if level.is_stage else ():
                if not set(player.next_slots()) <= set(level.slots):
                    raise _out_of_order(player)
            rows = iter(self._speak(speaking))
            for player in speaking:
                player.answer_rows([next(rows) for _ in player.request])  # type: ignore[union-attr]
            self.advance(players, level)
            if level.is_stage:
                return players

    def play_cross(self, players: list[EpisodePlayer], level: Level) -> list[EpisodePlayer]:
        """Play a level of one stage, with several replies per request. Returns the episodes of all combinations."""
        speaking = [player for player in players if player.speaks_in(level)]
        rows = iter(self._speak(speaking, level.replies) if self.sum_over_processes(len(speaking)) else [])
        forks: list[EpisodePlayer] = []
        for player in players:
            branches = _forks([player], level.branches)
            forks += branches
            if player.speaks_in(level):
                _check_simultaneous(player, level)
                replies = [[next(rows) for _ in range(level.replies)] for _ in level.slots]
                for branch, joint_action in zip(branches, itertools.product(*replies), strict=True):
                    branch.answer_rows(list(joint_action))
        self.advance(forks, level)
        for player in forks:
            if player.speaks_in(level):
                _check_simultaneous(player, level)
        return forks

    def _speak(self, speaking: list[EpisodePlayer], samples: int = 1) -> list[Row]:
        """Generate `samples` replies for each pending request of each player, in one call."""
        rows = [
            Row(player.index, slot, self.stage, player.prompt_for(slot), [])
            for player in speaking
            for slot in player.next_slots()
            for _ in range(samples)
        ]
        if rows:
            # The siblings of a group have the same prompts: tokenize each prompt once
            unique = {(type(row.prompt), repr(row.prompt)): row.prompt for row in rows}
            ids = dict(zip(unique, self.encode(list(unique.values())), strict=True))
            for row in rows:
                row.prompt_ids = list(ids[type(row.prompt), repr(row.prompt)])
        completion_ids, logprobs = self.generate(rows)
        texts = self.decode(completion_ids) if rows else []
        for i, row in enumerate(rows):
            row.completion_ids = completion_ids[i]
            row.text = texts[i] if row.completion is None else row.completion.text
            if row.messages is not None:
                row.text = row.last_message
            if isinstance(row.prompt, ChatRequest):
                row.text = row.reply_to_program(self.end_tokens)
            row.logprobs = None if logprobs is None else logprobs[i]
        self.stage += 1
        return rows


def _out_of_order(player: EpisodePlayer) -> ValueError:
    return ValueError(
        f"credit='counterfactual' needs agents that speak in the same order in every episode, but {player.title} asks "
        f"{player.next_slots()} where others speak in the first problems. Set credit='group'."
    )


def _check_simultaneous(player: EpisodePlayer, level: Level) -> None:
    asked = player.next_slots()
    if len(asked) != len(level.slots):
        raise ValueError(
            f"joint_mode='cross' needs all agents to speak at the same moment, but {player.title} asks "
            f"{[slot.agent for slot in asked]} alone. Set joint_mode='align'."
        )


def replay(workflow: Workflow, problem: Mapping[str, Any], responses: Sequence[Response]) -> list[Request]:
    """
    Replay an episode: send recorded responses to a new generator of the workflow.

    A workflow is deterministic given the responses, so the first responses of an episode bring a new generator to the same
    point.

    Args:
        workflow (`Workflow`): The workflow.
        problem (`Mapping`): The problem.
        responses (`Sequence`): `Episode.responses`, or the first of them.

    Returns:
        `list`: The requests of the workflow, including the pending one if it has not ended.

    Raises:
        ValueError: If the workflow ends before all responses are used.
    """
    player = EpisodePlayer(workflow, problem, 0)
    requests = [player.request]
    for response in responses:
        if player.request is None:
            raise ValueError(
                f"{len(responses)} responses are given, but {player.title}.play ended after {len(requests) - 1}. Pass the "
                "responses of an episode of this workflow and problem."
            )
        player.respond(response)
        requests.append(player.request)
    return [request for request in requests if request is not None]


_CUT = f"\ue000{uuid.uuid4().hex}\ue001"
"""Marks where a text is cut into pieces that are tokenized separately. Random, so that no text contains it."""


def encode_prompts(processing_class: Any, prompts: list[Prompt], **chat_template_kwargs: Any) -> list[list[int]]:
    """
    Tokenize prompts for generation.

    Chat messages go through the chat template ([`~marcog_trl.rollout.chats.render`]). If the tokenizer has none (base models),
    they become plain text that ends with `Answer:`. Plain text is tokenized as text.

    Problems, replies and feedback cannot inject special tokens: `<|im_end|>` inside a message is tokenized as text. Special
    tokens come from the chat template and the tokenizer only, and, as in TRL, from text prompts that the dataset gives
    ([`~marcog_trl.rollout.records.AsGiven`]). Prompts without such text have the token ids of `apply_chat_template`.

    Args:
        processing_class (`PreTrainedTokenizerBase`): The tokenizer.
        prompts (`list[str | list[dict]]`): B prompts.
        chat_template_kwargs: Passed to the chat template.

    Returns:
        `list[list[int]]`: B lists of token ids, without padding.

    Raises:
        ValueError: If the chat template refuses a prompt.
    """
    cut = _Cutter(processing_class, repr(prompts), chat_template_kwargs)
    ids: list[list[int]] = []
    for prompt in prompts:
        text = (
            prompt if isinstance(prompt, AsGiven) else prompt_text(processing_class, prompt, chat_template_kwargs, cut)
        )
        in_template = not isinstance(prompt, str) and bool(processing_class.chat_template)
        ids.append(_encode_pieces(processing_class, text.split(_CUT), add_special_tokens=not in_template))
    return ids


def prompt_text(
    processing_class: Any,
    prompt: Prompt,
    chat_template_kwargs: Mapping[str, Any],
    cut: Callable[[Any], Any] = lambda prompt: prompt,
) -> str:
    """
    The text that a model reads.

    Args:
        processing_class (`PreTrainedTokenizerBase`): The tokenizer.
        prompt (`str` or `list[dict]`): The prompt.
        chat_template_kwargs (`Mapping`): Arguments of the chat template.
        cut (`Callable`, *optional*): Changes the texts of the prompt before.

    Raises:
        ValueError: If the chat template refuses the prompt.
    """
    if isinstance(prompt, str):
        return cut(prompt)
    if not processing_class.chat_template:
        return as_text(cut(prompt))
    tools = prompt.tools if isinstance(prompt, ChatRequest) else None
    options = {"add_generation_prompt": True, **chat_template_kwargs} | ({"tools": tools} if tools else {})
    return render(processing_class, cut(prompt), **options)


def _encode_pieces(processing_class: Any, pieces: list[str], add_special_tokens: bool) -> list[int]:
    """Token ids of the pieces of a text, between the tokens that the tokenizer adds to a text."""
    ids = list(processing_class(text=pieces[0], add_special_tokens=add_special_tokens)["input_ids"])
    if len(pieces) == 1:
        return ids
    plain = [list(processing_class(text=piece, add_special_tokens=False)["input_ids"]) for piece in pieces]
    size = len(plain[0])
    start = next(i for i in range(len(ids) - size + 1) if ids[i : i + size] == plain[0])
    return [*ids[:start], *itertools.chain.from_iterable(plain), *ids[start + size :]]


class _Cutter:
    """
    Cuts a text after the first character of anything that would become a special token.

    These are the special tokens of the tokenizer, and the added tokens that the chat template puts around messages. Tokens
    that the template looks for in a reply, such as `</think>`, stay whole.
    """

    def __init__(self, processing_class: Any, said: str, chat_template_kwargs: Mapping[str, Any]):
        added = processing_class.added_tokens_decoder.values()
        tokens = [token.content for token in added if token.special]
        others = [token.content for token in added if not token.special and token.content in said]
        if others and processing_class.chat_template:

            def exchange(reply: str) -> str:
                turns = zip(("user", "assistant", "user"), ("a", reply, "c"), strict=True)
                messages = [{"role": role, "content": content} for role, content in turns]
                return processing_class.apply_chat_template(messages, tokenize=False, **chat_template_kwargs)

            around = exchange("b")
            tokens += [token for token in others if token in around and f"b{token}d" in exchange(f"b{token}d")]
        self._start = re.compile(f"(?=(?:{'|'.join(map(re.escape, tokens))})).", re.DOTALL) if tokens else None

    def __call__(self, prompt: Any) -> Any:
        """The text or the messages, with cuts. Roles come from the workflow and are not cut."""
        if isinstance(prompt, str):
            return prompt if self._start is None else self._start.sub(lambda found: found[0] + _CUT, prompt)
        if isinstance(prompt, Mapping):
            return {key: value if key == "role" else self(value) for key, value in prompt.items()}
        return [self(part) for part in prompt] if isinstance(prompt, list) else prompt
