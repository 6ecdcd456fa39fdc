"""Pairs made by hand, with the schema of `collect_preferences`."""

import json
import random

from transformers import AutoTokenizer

from marcog_trl.preferences.pairs import as_dataset
from marcog_trl.preferences.transcript import tokenizer_digest


def reply(agent, completion_ids, turn=0):
    return {
        "agent": agent,
        "turn": turn,
        "act": 0,
        "prompt_ids": [7, 8],
        "completion_ids": completion_ids,
        "latent": [],
    }


def pair(task, chosen, rejected, history=(), scores=(1.0, 0.0), prompt=None, model=None):
    return {
        "task_id": task,
        "prompt": f"def {task}(x):" if prompt is None else prompt,
        "turn": 0,
        "history": list(history),
        "chosen": chosen,
        "rejected": rejected,
        "chosen_score": scores[0],
        "chosen_agent_scores": [scores[0]] * 2,
        "rejected_score": scores[1],
        "rejected_agent_scores": [scores[1]] * 2,
        "team": json.dumps({"tokenizer": model and tokenizer_digest(AutoTokenizer.from_pretrained(model))}),
    }


def dataset(model, num_problems=8, per_problem=4, shuffled=False, seed=0):
    """
    Pairs of two agents whose better side has more of the token 40; with `shuffled`, whose better side has nothing of its own.
    They have the tokenizer of `model`, if there is one.
    """
    rng = random.Random(seed)
    rows = []
    team = pair("", [], [], model=model)["team"]
    for i in range(num_problems):
        for _ in range(per_problem):
            good, bad = ([40 if rng.random() < p else rng.randrange(41, 200) for _ in range(6)] for p in (0.8, 0.1))
            good, bad = ([*good, 1], [*bad, 1])
            if shuffled and rng.random() < 0.5:
                good, bad = bad, good
            sides = [[reply("a", ids[:3]), reply("b", ids[3:])] for ids in (good, bad)]
            scores = rng.uniform(0.6, 1), rng.uniform(0, 0.4)
            rows.append(pair(f"f{i}", *sides, scores=scores) | {"team": team})
    return as_dataset(rows)
