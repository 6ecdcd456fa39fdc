"""
Pairs of episodes, one preferred to the other: their schema, how they are chosen, and how a team's play gives them.

A pair keeps token ids and latents, so that training sees exactly what was played. It knows nothing about losses.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, Features, List, Value
from tqdm.auto import tqdm

from marcog_trl.agents import Workflow
from marcog_trl.checks import COUNT, NOT_NEGATIVE, UNIT, check_choice, check_number
from marcog_trl.evaluation.evaluate import make_scorer
from marcog_trl.files import write_whole
from marcog_trl.preferences.candidates import (
    PAIRINGS,
    Candidate,
    candidates_of_lines,
    candidates_of_tree,
    choose_pairs,
)
from marcog_trl.preferences.transcript import tokenizer_digest
from marcog_trl.processes import this_process
from marcog_trl.rewards.scoring import Scorer, is_over
from marcog_trl.rollout.records import Row
from marcog_trl.rollout.tree import Tree
from marcog_trl.team.data_checks import check_dataset
from marcog_trl.team.keyed_sampling import KeyedSampler
from marcog_trl.team.team import Team


UNITS = ("auto", "episode", "turn")
# One reply of a side. `latent` is empty where agents have none
ROW_FEATURES = {
    "agent": Value("string"),
    "turn": Value("int64"),
    "act": Value("int64"),
    "prompt_ids": List(Value("int64")),
    "completion_ids": List(Value("int64")),
    "latent": List(Value("float32")),
}


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


def identity(workflow: Workflow, tokenizer: Any, latent_net: Mapping[str, torch.Tensor] | None) -> str:
    """
    What pairs must have in common with the team that is trained on them, as JSON.

    Args:
        workflow ([`Workflow`]): The team's workflow.
        tokenizer (`PreTrainedTokenizerBase`): The team's tokenizer.
        latent_net (`Mapping[str, torch.Tensor]`, *optional*): Weights of the network that makes latents.

    Raises:
        ValueError: If an agent has tools: preferences would be trained on their results, too.
    """
    using = [agent.name for agent in workflow.agents if agent.tools]
    if using:
        raise ValueError(f"Preferences do not support tools, but agents {using} have some. Remove their tools.")
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


# Collection


def collect_preferences(
    team: Any,
    problems: Dataset,
    num_candidates: int = 8,
    pairing: str = "gap",
    pairs_per_problem: int = 4,
    min_gap: float = 0.0,
    unit: str = "auto",
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
        num_candidates (`int`, *optional*, defaults to `8`): Episodes per problem; in trees, children of every node.
        pairing, pairs_per_problem, min_gap: See [`choose_pairs`]. In trees, `pairs_per_problem` is the maximum at a node.
        unit (`str`, *optional*, defaults to `"auto"`): What is compared. `"episode"`: whole episodes. `"turn"`: a tree is
            played, in which every joint action has `num_candidates` children in the next turn; siblings are compared, with
            the replies of their turn and their tree returns. `"auto"` is `"turn"` where the workflow has several turns.
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
    check_collection(num_candidates, pairing, pairs_per_problem, min_gap, unit, gamma_turn)
    check_number("batch_size", batch_size, COUNT, whole=True, default=128)
    if not isinstance(team, Team):
        raise TypeError(f"team={team!r:.80} is not a team. Pass one, such as Team.from_pretrained(path).")
    if team.outside:
        raise ValueError(
            f"Agents {team.outside} speak through endpoints, but preferences need the tokens of all replies. Set endpoints={{}}, "
            "or use a workflow without endpoints."
        )
    if len(problems) == 0:
        raise ValueError("problems is empty. Pass at least one problem.")
    scorer, _ = make_scorer(team, None, reward_funcs)
    check_dataset("problems", problems, team.workflow, scorer.funcs)
    collector = Collector(team, scorer, num_candidates, unit, gamma_turn, seed)
    rows, of_team = [dict(row) for row in problems], identity_of(team)
    found: list[dict[str, Any]] = []
    for index, candidates in collector.candidates(rows, batch_size):
        pairs = choose_pairs(candidates, pairing, pairs_per_problem, min_gap, (seed, index))
        found += [describe_pair(of_team, rows[index], index, candidates[i], candidates[j]) for i, j in pairs]
    return as_dataset(found, rows[0]["prompt"])


def check_collection(
    num_candidates: int, pairing: str, pairs_per_problem: int, min_gap: float, unit: str, gamma_turn: float
) -> None:
    """
    Checks the arguments of [`collect_preferences`].

    Raises:
        ValueError: If one is out of range.
    """
    check_number("num_candidates", num_candidates, COUNT, whole=True, default=8)
    if num_candidates < 2:
        raise ValueError(f"num_candidates={num_candidates} makes no pair. Set num_candidates=8.")
    check_choice("pairing", pairing, PAIRINGS)
    check_number("pairs_per_problem", pairs_per_problem, COUNT, whole=True, default=4)
    check_number("min_gap", min_gap, NOT_NEGATIVE, default=0.0)
    check_choice("unit", unit, UNITS)
    check_number("gamma_turn", gamma_turn, UNIT, default=1.0)


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
        num_candidates, unit, gamma_turn, seed: See [`collect_preferences`].
    """

    team: Team
    scorer: Scorer
    num_candidates: int
    unit: str
    gamma_turn: float
    seed: int

    @property
    def is_tree(self) -> bool:
        """Whether trees are played."""
        several = self.team.workflow.num_turns > 1
        return several and self.unit != "episode"

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
        size = max(1, batch_size // self.num_candidates ** (self.team.workflow.num_turns if self.is_tree else 1))
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
        team, count, threshold = self.team, self.num_candidates, self.team.settings.early_termination_threshold
        sampler = None
        if team.other_generation is None:
            sampler = KeyedSampler(lambda row: self._key(row, indices), team.generation_config)

        ends = None if threshold is None else lambda episode: is_over(episode, threshold)
        if self.is_tree:
            tree = Tree.of_turns(team.workflow, [count] * team.workflow.num_turns)
            levels = team.play_tree(rows, tree, self.scorer.end_turn, ends, sampler=sampler)
            return candidates_of_tree(levels, team.agents, count, self.gamma_turn)
        episodes = team.play([row for row in rows for _ in range(count)], self.scorer.end_turn, ends, sampler=sampler)
        lines = candidates_of_lines(episodes, team.agents, self.gamma_turn)
        return [(p, lines[p * count : (p + 1) * count]) for p in range(len(rows))]

    def _key(self, row: Row, indices: Sequence[int]) -> str:
        """What the seed of a reply depends on, beside its agent and turn."""
        siblings = self.num_candidates ** (row.slot.turn + 1 if self.is_tree else 1)
        place, episode = divmod(row.episode, siblings)
        return repr((self.seed, indices[place], episode))
