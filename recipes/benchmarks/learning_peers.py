"""CoMLRL as a condition of learning.py, from our side; comlrl_learning.py has its own."""

import functools
import json
import statistics
import sys
from pathlib import Path

from common import COMLRL_ENVIRONMENT, measure_apart


COMLRL_RATES = {"magrpo": 3e-4, "mareinforce": 3e-4, "maac": 3e-4}


def comlrl(
    algorithm, seed, model, tokens, train_dataset, folder, points, python, batch, num_generations, learning_rate=None
):
    """
    Trains a team with CoMLRL, with the settings of `recipes/configs/builtin.yaml` that it has, and replies of at most
    32 tokens.

    Args:
        algorithm (`str`): `"magrpo"`, `"mareinforce"` or `"maac"`.
        seed (`int`): Seed of the run.
        model (`str`): Path of the model.
        tokens (`int`): Number of generated tokens.
        train_dataset (`Dataset`): Problems.
        folder (`str`): Where the models are saved, after each part of the tokens.
        points (`int`): Parts.
        python (`str`): Interpreter of CoMLRL's environment.
        batch (`int`): Problems per update.
        num_generations (`int`): Replies of each agent to a problem.
        learning_rate (`float`, *optional*): Defaults to the best one on validation problems.

    Returns:
        `tuple[list, dict]`: `(tokens, team)` of each part, where `team()` loads the team, and the ledger.
    """
    from marcog_trl import Collaboration
    from marcog_trl.embedded import ROLES

    setting = {
        "algorithm": algorithm,
        "model": model,
        "problems": write_prompts(folder, model, train_dataset, Collaboration(roles=ROLES)),
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
    done = measure_apart(script, ["learn", setting], python, **COMLRL_ENVIRONMENT)
    saved = [(n, functools.partial(TwoModels, Path(folder, str(n)), setting["new_tokens"])) for n, _ in done["saved"]]
    return saved, {
        "tokens": done["tokens"],
        "optimizer_steps": done["updates"],
        "training_seconds": done["seconds"],
    }


def write_prompts(folder, model, problems, workflow):
    """Writes the prompts of each agent, and returns the path of the file."""
    from transformers import AutoTokenizer

    tokenizer, rows = AutoTokenizer.from_pretrained(model), []
    for index, problem in enumerate(problems):
        asked = next(workflow.play(problem))
        texts = tokenizer.apply_chat_template([*asked.values()], add_generation_prompt=True, tokenize=False)
        rows.append({"index": index} | dict(zip(asked, texts, strict=True)))
    path = Path(folder, "problems.json")
    path.write_text(json.dumps(rows))
    return str(path)


class TwoModels:
    """Two models that CoMLRL trained, as a team that can be measured."""

    agents = ("helper", "main")

    def __init__(self, folder, new_tokens, roles=None):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from marcog_trl import Collaboration
        from marcog_trl.embedded import ROLES

        self.workflow = Collaboration(roles=roles or ROLES)
        paths = [folder / f"agent_{i}" for i in range(len(self.agents))]
        self.tokenizer = AutoTokenizer.from_pretrained(paths[0])
        models = [AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval() for path in paths]
        self.models, self.new_tokens = dict(zip(self.agents, models, strict=True)), new_tokens

    def measure(self, problems, num_samples):
        """Held-out figures, one number per problem, as those of a team."""
        import torch

        from marcog_trl.execution import CodeExecutor
        from marcog_trl.problems import solution_job
        from marcog_trl.rollout.engine import encode_prompts

        torch.manual_seed(0)
        rows, workflow = list(problems), self.workflow
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
            jobs = [solution_job(row, workflow.solution(row, pair)) for row, pair in zip(rows, pairs, strict=True)]
            with CodeExecutor(isolation="best_effort") as executor:
                return [float(verdict.status == "passed") for verdict in executor.run(jobs)]

        samples = [solved(do_sample=True, temperature=1.0, top_k=0, top_p=1.0) for _ in range(num_samples)]
        return {
            "solved": [statistics.mean(of_problem) for of_problem in zip(*samples, strict=True)],
            "greedy": solved(do_sample=False),
        }
