"""
Pairs of episodes, one preferred to the other: their schema, how they are chosen, and how a team's play gives them.

A pair keeps token ids and latents, so that training sees exactly what was played. It knows nothing about losses.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate.utils import gather_object
from datasets import Dataset, Features, List, Value
from tqdm.auto import tqdm

from marcog_trl.agents import Workflow
from marcog_trl.checks import COUNT, UNIT, Count, NotNegative, Range, check_fields, check_number, documented
from marcog_trl.evaluation.evaluate import make_scorer
from marcog_trl.files import write_whole
from marcog_trl.preferences.transcript import tokenizer_digest
from marcog_trl.processes import this_process
from marcog_trl.rewards.scoring import Scorer, is_over
from marcog_trl.rollout.records import Episode, Row
from marcog_trl.rollout.tree import Tree
from marcog_trl.team.data_checks import check_dataset
from marcog_trl.team.team import Team
from marcog_trl.team.token_sampling import KeyedSampler
from marcog_trl.trainers.batch import rewards_and_returns


# One reply of a side. `latent` is empty where agents have none
ROW_FEATURES = {
    "agent": Value("string"),
    "turn": Value("int64"),
    "act": Value("int64"),
    "prompt_ids": List(Value("int64")),
    "completion_ids": List(Value("int64")),
    "latent": List(Value("float32")),
}

PairRow = dict[str, Any]
"""One reply of a side: `agent`, `turn`, `act`, `prompt_ids`, `completion_ids` and `latent` (empty without latents)."""


def features(prompt: Any) -> Features:
    """
    Features of a dataset of pairs.

    Args:
        prompt (`str` or `list[dict]`): A prompt of the problems, which is text or chat messages.
    """
    message = List({"role": Value("string"), "content": Value("string")})
    side = List(ROW_FEATURES)
    scores = {"score": Value("float64"), "agent_scores": List(Value("float64"))}
    return Features(
        {
            "task_id": Value("string"),
            "prompt": Value("string") if isinstance(prompt, str) else message,
            "turn": Value("int64"),
            "history": side,
            "chosen": side,
            "rejected": side,
            **{f"{name}_{key}": feature for name in ("chosen", "rejected") for key, feature in scores.items()},
            "team": Value("string"),
        }
    )


def check_workflow(workflow: Workflow) -> None:
    """
    Refuses workflows that cannot play pairs.

    Args:
        workflow ([`Workflow`]): The workflow.

    Raises:
        ValueError: If an agent has tools, or speaks through an endpoint.
    """
    _check_tools(workflow)
    outside = [agent.name for agent in workflow.agents if agent.endpoint is not None]
    if outside:
        raise ValueError(
            f"Agents {outside} speak through endpoints, but preferences need the tokens of all replies. Set endpoints={{}}, "
            "or use a workflow without endpoints."
        )


def _check_tools(workflow: Workflow) -> None:
    using = [agent.name for agent in workflow.agents if agent.tools]
    if using:
        raise ValueError(f"Preferences do not support tools, but agents {using} have some. Remove their tools.")


def identity(workflow: Workflow, tokenizer: Any, latent_net: Mapping[str, torch.Tensor] | None) -> str:
    """
    Features that pairs must share with the team that is trained on them, as JSON.

    Args:
        workflow ([`Workflow`]): The team's workflow.
        tokenizer (`PreTrainedTokenizerBase`): The team's tokenizer.
        latent_net (`Mapping[str, torch.Tensor]`, *optional*): Weights of the network that makes latents.

    Raises:
        ValueError: If an agent has tools: preferences would be trained on their results, too.
    """
    _check_tools(workflow)
    digest = hashlib.sha256()
    for _, weight in sorted((latent_net or {}).items()):
        digest.update(weight.float().cpu().contiguous().numpy().tobytes())
    return json.dumps(
        {
            "workflow": type(workflow).__name__,
            "num_turns": workflow.num_turns,
            "agents": [agent.name for agent in workflow.agents],
            "tokenizer": tokenizer_digest(tokenizer),
            "latents": digest.hexdigest()[:16] if latent_net else None,
        }
    )


def identity_of(team: Team) -> str:
    """The [`identity`] of a team."""
    latent_net = team.modules.latent_net if team.modules is not None else None
    return identity(team.workflow, team.tokenizer, None if latent_net is None else latent_net.state_dict())


def check_identity(name: str, pairs: Dataset, expected: str) -> None:
    """
    Checks that pairs are of the team that is to be trained on them.

    Args:
        name (`str`): Name of the dataset in errors.
        pairs (`Dataset`): The pairs.
        expected (`str`): The team's [`identity`].

    Raises:
        ValueError: If they are another team's.
    """
    ours = json.loads(expected)
    for found in sorted(set(pairs["team"])):
        for key, theirs in json.loads(found).items():
            if theirs != ours[key]:
                raise ValueError(
                    f"{name} has pairs of another team: {key} is {theirs!r}, but {ours[key]!r} in this team. Collect pairs "
                    "with this team."
                )


# Which candidates are paired


@dataclass(frozen=True)
class Candidate:
    """
    A possible side of a pair: an episode, or one turn of it.

    Args:
        rows (`list[PairRow]`): Its replies, in order.
        score (`float`, *optional*): Its return, averaged over agents, in reward units; `None` if it is masked.
        agent_scores (`tuple[float, ...]`, *optional*): Return of each agent, in the order of the team.
        history (`list[PairRow]`, *optional*): Replies of the turns before, which all candidates of a pair share.
    """

    rows: list[PairRow]
    score: float | None
    agent_scores: tuple[float, ...] = ()
    history: list[PairRow] = field(default_factory=list)

    @property
    def replies(self) -> tuple:
        """Tells candidates apart: who wrote which tokens."""
        return tuple((row["agent"], row["turn"], row["act"], tuple(row["completion_ids"])) for row in self.rows)


def choose_pairs(
    candidates: Sequence[Candidate],
    pairing: str = "gap",
    pairs_per_problem: int = 4,
    min_gap: float = 0.0,
    seed: Any = 0,
) -> list[tuple[int, int]]:
    """
    Chooses pairs of candidates, the better one first.

    Masked candidates, repetitions of the same replies, and pairs whose scores differ by `min_gap` or less are left out.

    Args:
        candidates (`Sequence[Candidate]` of length C): Candidates of one problem, or of one node of a tree.
        pairing (`str`, *optional*, defaults to `"gap"`): `"gap"`: the largest gaps first; among equal gaps the candidates
            that were used least so far, then the lowest indices. `"best_worst"`: one pair, of the lowest indices where
            several are best or worst. `"random"`: any. `"all"`: all of them, whatever `pairs_per_problem`.
        pairs_per_problem (`int`, *optional*, defaults to `4`): Maximum number of pairs.
        min_gap (`float`, *optional*, defaults to `0.0`): In reward units.
        seed (*optional*, defaults to `0`): Anything whose `repr` is the seed of `"random"`.

    Returns:
        `list[tuple[int, int]]`: Index of the preferred candidate, and of the other one.
    """
    seen: set[tuple] = set()
    scores: dict[int, float] = {}
    for i, candidate in enumerate(candidates):
        if candidate.score is not None and not math.isnan(candidate.score) and candidate.replies not in seen:
            seen.add(candidate.replies)
            scores[i] = candidate.score
    gaps: dict[tuple[int, int], float] = {}
    for i, j in itertools.permutations(scores, 2):
        # Rounded, because sums of the same rewards may differ in their last digits
        gap = round(scores[i] - scores[j], 9)
        if gap > min_gap:
            gaps[i, j] = gap
    if pairing == "all":
        return sorted(gaps)
    if pairing == "random":
        pairs = sorted(gaps)
        return sorted(random.Random(repr(seed)).sample(pairs, min(pairs_per_problem, len(pairs))))
    if pairing == "best_worst":
        return sorted(gaps, key=lambda pair: (-gaps[pair], pair))[:1]
    used = dict.fromkeys(scores, 0)
    chosen: list[tuple[int, int]] = []
    while gaps and len(chosen) < pairs_per_problem:
        i, j = min(gaps, key=lambda pair: (-gaps[pair], used[pair[0]] + used[pair[1]], pair))
        chosen.append((i, j))
        del gaps[i, j]
        used[i] += 1
        used[j] += 1
    return chosen


def _pair_row(row: Row) -> PairRow:
    return {
        "agent": row.slot.agent,
        "turn": row.slot.turn,
        "act": row.slot.act,
        "prompt_ids": row.prompt_ids,
        "completion_ids": row.completion_ids,
        "latent": [] if row.latent is None else row.latent.float().tolist(),
    }


def candidates_of(
    levels: Sequence[Sequence[Episode]],
    agents: Sequence[str],
    branches: Sequence[int],
    gamma_turn: float,
    by_turn: bool,
) -> list[tuple[int, list[Candidate]]]:
    """
    The candidates that scored episodes are, with their returns.

    Args:
        levels (`Sequence[Sequence[Episode]]` of length K): As [`~marcog_trl.rollout.engine.play_tree`] returns them.
        agents (`Sequence[str]` of length N): Names of the agents.
        branches (`Sequence[int]` of length K): Joint actions of each turn that follow the same history.
        gamma_turn (`float`): Discount per turn.
        by_turn (`bool`): Whether to compare the turns that follow a node, with their tree returns. Otherwise whole episodes
            are compared, which branch in the first turn alone.

    Returns:
        `list[tuple[int, list[Candidate]]]`: Index of the problem, and the candidates of a node at which a turn was played, turn
        by turn, or all of the problem.
    """
    _, returns, known = rewards_and_returns(levels, agents, branches, gamma_turn, torch.float64)
    nodes = []
    for k, episodes in enumerate(levels if by_turn else levels[-1:]):
        for start in range(0, len(episodes), branches[k]):
            played = list(enumerate(episodes))[start : start + branches[k]]
            if not any(len(episode.turns) > k for _, episode in played):
                continue
            siblings = []
            for e, episode in played:
                rows = [_pair_row(row) for row in episode.rows if row.slot.turn == k or not by_turn]
                history = [_pair_row(row) for row in episode.rows if row.slot.turn < k]
                own = returns[e, :, k]
                score = own.mean().item() if known[e, k] else None
                siblings.append(Candidate(rows, score, tuple(own.tolist()), history))
            nodes.append((start // math.prod(branches[: k + 1]), siblings))
    return nodes


# Collection


@documented
@dataclass
class PairSettings:
    """
    How episodes are played and paired.

    Args:
        num_candidates (`int`, *optional*, defaults to `8`): Episodes per problem; in trees, children of every node.
        pairing (`str`, *optional*, defaults to `"gap"`): Which candidates are paired, see [`choose_pairs`].
        pairs_per_problem (`int`, *optional*, defaults to `4`): Maximum number of pairs per problem; in trees, per node.
        min_gap (`float`, *optional*, defaults to `0.0`): Pairs whose returns differ by this or less are left out.
        unit (`str`, *optional*, defaults to `"auto"`): What is compared. `"episode"`: whole episodes. `"turn"`: a tree is
            played, in which every joint action has `num_candidates` children in the next turn; siblings are compared, with
            the replies of their turn and their tree returns. `"auto"` is `"turn"` where the workflow has several turns.

    Raises:
        ValueError: If a value is out of range.
    """

    num_candidates: Annotated[int, Range(2)] = 8
    pairing: Literal["gap", "best_worst", "random", "all"] = "gap"
    pairs_per_problem: Count = 4
    min_gap: NotNegative = 0.0
    unit: Literal["auto", "episode", "turn"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)


def collect_preferences(
    team: Any,
    problems: Dataset,
    num_candidates: int = 8,
    pairing: Any = "gap",
    pairs_per_problem: int = 4,
    min_gap: float = 0.0,
    unit: Any = "auto",
    reward_funcs: Any = None,
    gamma_turn: float = 1.0,
    seed: int = 0,
    batch_size: int = 128,
) -> Dataset:
    """
    Lets a team play problems several times, and pairs what went better with what went worse.

    The score of an episode is its return from the first turn, averaged over agents. With several processes it is a collective
    operation: they share the problems, and all return the same pairs. Every reply has a seed of its own, so that the pairs do
    not depend on the number of processes, up to rounding. Teams with latents use the means of the latents, which are kept
    with the replies.

    Example:

    ```python
    >>> pairs = collect_preferences(team, load_problems("builtin", "train"), reward_funcs="execution_reward")
    >>> pairs.save_to_disk("outputs/pairs")
    ```

    Args:
        team ([`Team`]): The team that plays.
        problems (`Dataset` of P rows): Problems.
        num_candidates, pairing, pairs_per_problem, min_gap, unit: See [`PairSettings`].
        reward_funcs (`str`, `Callable` or `list`, *optional*): Reward functions, or names of built-in ones. Defaults to those
            of the team's training.
        gamma_turn (`float`, *optional*, defaults to `1.0`): Discount per turn, in [0, 1].
        seed (`int`, *optional*, defaults to `0`): Seed of sampling.
        batch_size (`int`, *optional*, defaults to `128`): Episodes that a process plays at once, at least those of a problem.

    Returns:
        `Dataset`: One row per pair, in the order of the problems:

        - `task_id` (`str`) and `prompt` of the problem.
        - `chosen`, `rejected`: replies of each side, in order, as mappings with `agent`, `turn` and `act` (from 0),
          `prompt_ids`, `completion_ids` and `latent` (empty without latents).
        - `history`: replies of the turns before, which both sides share; `turn`: the turn that is compared.
        - `chosen_score`, `rejected_score`: returns, averaged over agents, in reward units; `chosen_agent_scores`,
          `rejected_agent_scores`: of each agent, in the team's order.
        - `team`: what the team must have in common with the one that is trained on the pairs, as JSON.

        It may be empty, if all returns are equal.

    Raises:
        ValueError: If an argument is out of range, or the problems lack what the workflow or the rewards need.

    Source: MADPO of CoMLRL, with preferences between trajectories as in DPO (https://huggingface.co/papers/2305.18290).
    """
    settings = PairSettings(num_candidates, pairing, pairs_per_problem, min_gap, unit)
    check_number("gamma_turn", gamma_turn, UNIT, default=1.0)
    check_number("batch_size", batch_size, COUNT, whole=True, default=128)
    if not isinstance(team, Team):
        raise TypeError(f"team={team!r:.80} is not a team. Pass one, such as Team.from_pretrained(path).")
    check_workflow(team.workflow)
    if len(problems) == 0:
        raise ValueError("problems is empty. Pass at least one problem.")
    scorer, _ = make_scorer(team, None, reward_funcs)
    check_dataset("problems", problems, team.workflow, scorer.funcs, team.settings.packages)
    collector = Collector(team, scorer, settings, gamma_turn, seed)
    rows, of_team = [dict(row) for row in problems], identity_of(team)
    found: list[dict[str, Any]] = []
    for index, candidates in collector.candidates(rows, batch_size):
        pairs = choose_pairs(candidates, pairing, pairs_per_problem, min_gap, (seed, index))
        found += [describe_pair(of_team, rows[index], index, candidates[i], candidates[j]) for i, j in pairs]
    return as_dataset(found, rows[0]["prompt"])


def describe_pair(
    team: str, problem: Mapping[str, Any], index: int, chosen: Candidate, rejected: Candidate
) -> dict[str, Any]:
    """One row of a dataset of pairs. `team` is its [`identity`]."""
    return {
        "task_id": str(problem.get("task_id", index)),
        "prompt": problem["prompt"],
        "turn": max((row["turn"] for row in chosen.history), default=-1) + 1,
        "history": chosen.history,
        "chosen": chosen.rows,
        "rejected": rejected.rows,
        "chosen_score": chosen.score,
        "chosen_agent_scores": list(chosen.agent_scores),
        "rejected_score": rejected.score,
        "rejected_agent_scores": list(rejected.agent_scores),
        "team": team,
    }


def as_dataset(pairs: list[dict[str, Any]], prompt: Any = "") -> Dataset:
    """Makes a dataset of pairs. `prompt` is one of the problems', for datasets without pairs."""
    schema = features(pairs[0]["prompt"] if pairs else prompt)
    return Dataset.from_dict({name: [pair[name] for pair in pairs] for name in schema}, features=schema)


def write_pairs(pairs: Dataset, path: Path) -> None:
    """Writes pairs as JSON lines, with all digits of their numbers. The file appears by renaming."""
    write_whole(path, "".join(json.dumps(pair) + "\n" for pair in pairs).encode())


def read_pairs(path: Path) -> Dataset:
    """
    Reads pairs that [`write_pairs`] wrote.

    Raises:
        ValueError: If the file is not valid.
    """
    try:
        return as_dataset([json.loads(line) for line in path.read_text().splitlines()])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} does not hold pairs: {error}. Use a file of a rounds folder.") from error


@dataclass
class Collector:
    """
    Plays and scores the candidates of problems.

    Args:
        team ([`Team`]): The team.
        scorer ([`Scorer`]): Scores episodes.
        settings ([`PairSettings`]): Numbers of candidates, and what is compared.
        gamma_turn, seed: See [`collect_preferences`].
    """

    team: Team
    scorer: Scorer
    settings: PairSettings
    gamma_turn: float
    seed: int

    def __post_init__(self) -> None:
        num_turns, count = self.team.workflow.num_turns, self.settings.num_candidates
        self.by_turn = num_turns > 1 and self.settings.unit != "episode"
        self.tree = Tree.of_turns(self.team.workflow, [count] + [count if self.by_turn else 1] * (num_turns - 1))

    def candidates(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int = 128
    ) -> list[tuple[int, list[Candidate]]]:
        """
        Plays all problems, on all processes together.

        Returns:
            `list[tuple[int, list[Candidate]]]`: Index of a problem, and candidates that can be paired: all of the problem, or
            those of a node.
        """
        state = this_process()
        world, rank = state.num_processes, state.process_index
        size = max(1, batch_size // self.tree.joint_actions[-1])
        found: list[tuple[int, list[Candidate]]] = []
        progress = tqdm(total=len(rows), desc="Collecting", unit="problem", disable=not state.is_main_process)
        with progress, self.team.evaluating(), torch.random.fork_rng():
            torch.manual_seed(self.seed + rank)  # of vLLM and continuous batching, which have no seed per reply
            for start in range(0, len(rows), size * world):
                here = range(start, min(start + size * world, len(rows)))
                width = math.ceil(len(here) / world)
                own = list(here[rank * width : (rank + 1) * width])
                # Playing is a collective operation: a process with fewer problems repeats one
                filled = [*own, *[start] * (width - len(own))]
                nodes = self._play([rows[i] for i in filled], filled)
                kept = [(filled[p], candidates) for p, candidates in nodes if p < len(own)]
                found += gather_object(kept) if world > 1 else kept
                progress.update(len(here))
        return sorted(found, key=lambda node: node[0])

    def _play(self, rows: list[Mapping[str, Any]], indices: list[int]) -> list[tuple[int, list[Candidate]]]:
        """Candidates of these problems, with the place of the problem in `rows`; `indices`: their seeds."""
        team, threshold = self.team, self.team.settings.early_termination_threshold
        sampler = None
        if team.other_generation is None:
            sampler = KeyedSampler(lambda row: self._key(row, indices), team.generation_config)

        ends = None if threshold is None else lambda episode: is_over(episode, threshold)
        levels = team.play_tree(rows, self.tree, self.scorer.end_turn, ends, sampler=sampler)
        return candidates_of(levels, team.agents, self.tree.branches, self.gamma_turn, self.by_turn)

    def _key(self, row: Row, indices: Sequence[int]) -> str:
        """The values that the seed of a reply depends on, beside its agent and turn."""
        place, episode = divmod(row.episode, self.tree.joint_actions[row.slot.turn])
        return repr((self.seed, indices[place], episode))
