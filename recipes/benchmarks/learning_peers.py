"""What learning.py compares the trainers with: rounds of MADPO, and CoMLRL."""

import functools
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import yaml
from comlrl import ENVIRONMENT  # the file beside this one
from common import RECIPE_FOLDER, measure_apart


# Rounds of MADPO


MADPO_CONFIG = RECIPE_FOLDER / "configs" / "builtin-madpo.yaml"


def madpo(seed, model, tokens, train_dataset, folder, points, **settings):
    """
    Trains a team with rounds of MADPO. A round generates its share of the tokens, with problems that follow those of the round
    before, and trains on the pairs.

    Args:
        seed (`int`): Seed of the run.
        model (`str`): Path of the model.
        tokens (`int`): Number of generated tokens.
        train_dataset (`Dataset`): Problems.
        folder (`str`): Where the teams are saved.
        points (`int`): Rounds.
        **settings: Fields of the configuration, beside those of `recipes/configs/builtin-madpo.yaml`.

    Returns:
        `tuple[list, dict]`: `(tokens, team)` of each round, where `team()` loads the team, and the ledger.
    """
    from datasets import concatenate_datasets

    from marcog_trl import MADPOTrainer, Team
    from marcog_trl.preferences import IterativeMADPOConfig, collect_preferences, save_untrained_team
    from marcog_trl.team.settings import TeamSettings

    known = {f.name for f in fields(IterativeMADPOConfig)}
    shipped = {name: value for name, value in yaml.safe_load(MADPO_CONFIG.read_text()).items() if name in known}
    args = IterativeMADPOConfig(**shipped | {"seed": seed, "output_dir": folder, "disable_tqdm": True} | settings)
    teams = [Path(folder, str(number)) for number in range(points + 1)]
    save_untrained_team(teams[0], model, TeamSettings.of(args), seed=seed)
    order = random.Random(seed).sample(range(len(train_dataset)), len(train_dataset))
    upcoming, used, steps, began, saved = itertools.cycle(order), 0, 0, time.perf_counter(), []
    for number, path in enumerate(teams[1:], 1):
        team, found = Team.from_pretrained(teams[number - 1], isolation=args.isolation), []
        play = team.play

        def counted(*args, play=play, **kwargs):
            nonlocal used
            episodes = play(*args, **kwargs)
            used += sum(len(row.completion_ids) for episode in episodes for row in episode.rows)
            return episodes

        team.play = counted
        while used < tokens * number / points:
            problems = train_dataset.select(list(itertools.islice(upcoming, 8)))
            drawn = args.num_candidates, args.pairing, args.pairs_per_problem, args.min_gap, args.unit
            found.append(collect_preferences(team, problems, *drawn, seed=10_007 * seed + 101 * number + len(found)))
        team.close()
        pairs = concatenate_datasets(found)
        trainer = MADPOTrainer(
            teams[number - 1], teams[0], args=replace(args, output_dir=str(path)), train_dataset=pairs
        )
        trainer.train()
        trainer.save_model()
        steps += trainer.state.global_step
        saved.append((used, functools.partial(Team.from_pretrained, path, isolation=args.isolation)))
    seconds = time.perf_counter() - began
    return saved, {"tokens": used, "optimizer_steps": steps, "training_seconds": seconds}


# CoMLRL


COMLRL_RATES = {"magrpo": 3e-4, "mareinforce": 3e-4, "maac": 3e-4}


def comlrl(
    algorithm, seed, model, tokens, train_dataset, folder, points, python, batch, num_generations, learning_rate=None
):
    """
    Trains a team with CoMLRL, with the settings of `recipes/configs/builtin.yaml` that it has, and replies of at most
    32 tokens.

    Args:
        algorithm (`str`): `"magrpo"`, `"mareinforce"` or `"maac"`.
        seed, model, tokens, train_dataset, folder, points: As in [`madpo`]. Models are saved after each part of the tokens.
        python (`str`): Interpreter of CoMLRL's environment.
        batch (`int`): Problems per update.
        num_generations (`int`): Replies of each agent to a problem.
        learning_rate (`float`, *optional*): Defaults to the best one on validation problems.

    Returns:
        `tuple[list, dict]`: As [`madpo`].
    """
    from transformers import AutoTokenizer

    from marcog_trl import Collaboration
    from marcog_trl.embedded import ROLES

    tokenizer, rows = AutoTokenizer.from_pretrained(model), []
    for index, problem in enumerate(train_dataset):
        asked = next(Collaboration(roles=ROLES).play(problem))
        texts = tokenizer.apply_chat_template([*asked.values()], add_generation_prompt=True, tokenize=False)
        rows.append({"index": index} | dict(zip(asked, texts, strict=True)))
    problems = Path(folder, "problems.json")
    problems.write_text(json.dumps(rows))
    setting = {
        "algorithm": algorithm,
        "model": model,
        "problems": str(problems),
        "tokens": tokens,
        "every": tokens / points,
        "folder": folder,
        "seed": seed,
        "learning_rate": learning_rate or COMLRL_RATES[algorithm],
        "batch": batch,
        "num_generations": num_generations,
        "new_tokens": 32,
        "python": sys.executable,
    }
    script = str(Path(__file__).with_name("comlrl_learning.py"))
    done = measure_apart(script, ["learn", setting], python, **ENVIRONMENT)
    saved = [(at, functools.partial(TwoModels, Path(folder, str(at)), setting["new_tokens"])) for at in done["saved"]]
    return saved, {
        "tokens": done["tokens"],
        "optimizer_steps": done["updates"],
        "training_seconds": done["seconds"],
    }


class TwoModels:
    """Two models that CoMLRL trained, as a team that can be measured."""

    agents = ("helper", "main")

    def __init__(self, folder, new_tokens):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        paths = [folder / f"agent_{i}" for i in range(len(self.agents))]
        self.tokenizer = AutoTokenizer.from_pretrained(paths[0])
        models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]
        self.models, self.new_tokens = dict(zip(self.agents, models, strict=True)), new_tokens

    def measure(self, problems, num_samples):
        """Held-out figures, one number per problem, as those of a team."""
        import torch

        from marcog_trl import Collaboration
        from marcog_trl.embedded import ROLES
        from marcog_trl.execution import CodeExecutor
        from marcog_trl.rewards.verdicts import run_tests
        from marcog_trl.rollout.engine import encode_prompts

        torch.manual_seed(0)
        rows, workflow = list(problems), Collaboration(roles=ROLES)
        asked = [next(workflow.play(row)) for row in rows]
        prompts = {
            agent: self.tokenizer.pad(
                {"input_ids": encode_prompts(self.tokenizer, [own[agent] for own in asked])},
                padding_side="left",
                return_tensors="pt",
            )
            for agent in self.agents
        }

        def solved(**decoding):
            texts = {}
            for agent, model in self.models.items():
                output = model.generate(**prompts[agent], max_new_tokens=self.new_tokens, **decoding)
                replies = output[:, prompts[agent]["input_ids"].shape[1] :]
                texts[agent] = self.tokenizer.batch_decode(replies, skip_special_tokens=True)
            pairs = [dict(zip(texts, pair, strict=True)) for pair in zip(*texts.values(), strict=True)]
            solutions = [workflow.solution(row, pair) for row, pair in zip(rows, pairs, strict=True)]
            with CodeExecutor(isolation="best_effort") as executor:
                return [float(verdict.status == "passed") for verdict in run_tests(rows, solutions, executor=executor)]

        samples = [solved(do_sample=True, temperature=1.0, top_k=0, top_p=1.0) for _ in range(num_samples)]
        return {
            "solved": [statistics.mean(of_problem) for of_problem in zip(*samples, strict=True)],
            "greedy": solved(do_sample=False),
        }
