"""
CoMLRL's side of learning.py: trains a team on the built-in problems, and saves its models on the way. CoMLRL's environment, which has no
marcog_trl, runs this file. A process of our environment, which runs the same file, computes the rewards.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path


sys.path.append(str(Path(__file__).parent))  # last, since a file beside this one has the name of a package

from common import Work, task_command


def comlrl_args(algorithm, **kwargs):
    from comlrl.trainers.actor_critic.maac import MAACConfig
    from comlrl.trainers.reinforce.magrpo import MAGRPOConfig

    return {"magrpo": MAGRPOConfig, "maac": MAACConfig}[algorithm](
        agent_devices="cpu",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        early_termination_threshold=None,
        eval_interval=0,
        **kwargs,
    )


def learn(setting):
    """
    Trains a team with CoMLRL.

    Args:
        setting (`dict`): `algorithm` ("magrpo", "mareinforce" or "maac"), `model`, `problems` (file with the prompts of each agent), `tokens` to
            generate, `every` (tokens between two saves of the models), `folder`, `seed`, `learning_rate` (also of the critic),
            `batch` (problems per update), `num_generations`, `new_tokens`, `python`, the interpreter of ours, and, if they are
            not the embedded default's, `judge` (`roles` and `reward`), `dtype` and `lora` (settings of an adapter for each agent).

    Returns:
        `dict`: `seconds`, `tokens`, `updates` and so on of the training, and `saved`, the tokens and seconds after which it was saved.
    """
    import torch
    from comlrl.trainers.actor_critic.maac import MAACTrainer
    from comlrl.trainers.reinforce.magrpo import MAGRPOTrainer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    work, saved = Work(tokenizer.eos_token_id), []
    rng = random.Random(setting["seed"])
    random.seed(setting["seed"])  # CoMLRL shuffles with it
    torch.manual_seed(setting["seed"])
    problems = json.loads(Path(setting["problems"]).read_text())

    def agent():
        if "lora" not in setting:
            return setting["model"]
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(setting["model"], dtype=setting["dtype"])
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **setting["lora"]))

    def save():
        trainer.save_model(str(Path(setting["folder"], str(work.tokens))))
        saved.append((work.tokens, time.perf_counter() - started))

    class UntilSpent(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                for problem in rng.sample(problems, len(problems)):
                    if work.tokens >= setting["tokens"]:
                        return
                    if work.tokens >= (len(saved) + 1) * setting["every"]:
                        save()
                    yield problem

        def __len__(self):  # of the progress bar
            return len(problems)

    judge_process = subprocess.Popen(
        task_command(__file__, ["judge", setting.get("judge", {})], setting["python"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def reward(helper, main, *, batch_items):
        question = {"index": batch_items[0]["index"], "replies": [*zip(helper, main, strict=True)]}
        print(json.dumps(question), file=judge_process.stdin, flush=True)
        return json.loads(judge_process.stdout.readline())

    is_maac, generations = setting["algorithm"] == "maac", setting["num_generations"]
    own_args = {
        "maac": {"critic_learning_rate": setting["learning_rate"]},
        # With normalisation, its default, CoMLRL subtracts the mean after all, and MAREINFORCE is MAGRPO
        "mareinforce": {"advantage_mode": "raw", "advantage_normalization": False},
    }
    args = comlrl_args(
        "maac" if is_maac else "magrpo",
        num_agents=2,
        num_train_epochs=1,
        num_turns=1,
        num_generations=generations,
        max_new_tokens=setting["new_tokens"],
        rollout_buffer_size=setting["batch"] * (generations if is_maac else 1),  # MAAC counts replies
        agent_learning_rate=setting["learning_rate"],
        **own_args.get(setting["algorithm"], {}),
    )
    own = {"critics": [setting["model"]]} if is_maac else {"num_agents": 2}
    trainer = (MAACTrainer if is_maac else MAGRPOTrainer)(
        agents=[agent() for _ in range(2)],
        tokenizer=tokenizer,
        train_dataset=UntilSpent(),
        reward_func=reward,
        formatters=[lambda problem: problem["helper"], lambda problem: problem["main"]],
        args=args,
        **own,
    )
    started = time.perf_counter()
    figures = work.of(trainer.train)
    judge_process.communicate()
    save()
    return figures | {"saved": saved}


def judge(setting):
    """Answers every line of standard input, a problem and the replies of some teams to it, with their rewards."""
    from marcog_trl import Collaboration, load_problems
    from marcog_trl.embedded import ROLES
    from marcog_trl.execution import CodeExecutor
    from marcog_trl.rewards import make_reward

    problems, workflow = list(load_problems("builtin", "train")), Collaboration(roles=setting.get("roles", ROLES))
    reward = make_reward(setting.get("reward", "execution_reward"))
    with CodeExecutor(isolation="best_effort") as executor:
        for line in sys.stdin:
            question = json.loads(line)
            problem = problems[question["index"]]
            replies = [dict(zip(("helper", "main"), pair, strict=True)) for pair in question["replies"]]
            solutions = [workflow.solution(problem, of_team) for of_team in replies]
            count = len(solutions)
            columns = {name: [value] * count for name, value in problem.items() if name != "prompt"}
            columns |= {"replies": replies, "executor": executor}
            rewards = reward(prompts=[problem["prompt"]] * count, completions=solutions, **columns)
            print(json.dumps(rewards), flush=True)


if __name__ == "__main__":
    task, setting = json.loads(sys.argv[2])  # as `task_command` writes it
    figures = {"learn": learn, "judge": judge}[task](setting)
    if figures is not None:
        print(json.dumps(figures))
