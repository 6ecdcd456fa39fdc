"""Plays programs of one's own without a model."""

import json
import random
import urllib.error
import urllib.request
from pathlib import Path

import teams
import torch
from players import written

from marcog_trl import MultiAgentGRPOTrainer, Program
from marcog_trl.rollout.engine import play


EXAMPLES = Path(__file__).parents[2] / "recipes" / "examples" / "programs"
PROBLEM = {"prompt": "Write f."}


def ask(client, model, text, **options):
    """A call as an argument of which a test knows the answer: text of the reply."""
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **options)


def text_of(response):
    return response.choices[0].message.content


def answer(rows):
    """Each reply is the name of the agent, and the last message that it read in brackets."""
    return [f"{row.slot.agent}({row.prompt[-1]['content']})" for row in rows]


def play_programs(program, agents=("a",), count=1, answer=answer, end_tokens=(), **options):
    """Episodes of a program whose agents write `answer(rows)`, and the rows of each stage."""
    workflow = program if isinstance(program, Program) else Program(program, list(agents), **options)
    stages = []

    def write(rows):
        stages.append(rows)
        return answer(rows)

    problems = [{**PROBLEM, "number": i} for i in range(count)]
    return play(workflow, problems, *written(write), end_tokens=end_tokens), stages


def post(url, key, body, path="/chat/completions"):
    """A request without the package openai: status, and what the server says (JSON, or text of a stream)."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, {"Authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            text, status = response.read().decode(), response.status
    except urllib.error.HTTPError as error:
        text, status = error.read().decode(), error.code
    return status, json.loads(text) if text.startswith("{") else text


def script_by_episode(trainer):
    """Makes the replies random tokens that depend on the episode and the prompt, and not on the stage in which they are written."""

    def reply(row):
        dice = random.Random(f"{row.episode} {row.prompt_ids}")
        return [dice.randrange(5, teams.VOCABULARY) for _ in range(dice.randint(2, 6))]

    trainer.team.generate = lambda rows: ([reply(row) for row in rows], None)


def same_training(model, path, workflow, program, trainer_class=MultiAgentGRPOTrainer, **options):
    """
    Asserts that a program trains as the same team does that is written as a workflow, given the same replies.

    Samples would differ where calls that a program makes at the same moment arrive apart, since they are then two stages.
    """
    trained = []
    for each in (workflow, program):
        trainer = teams.make(model, path, trainer_class, workflow=each, **options)
        script_by_episode(trainer)
        start = teams.trainable(trainer)
        trainer.train()
        trained.append(
            (teams.trainable(trainer), teams.logged(trainer, "reward"), teams.logged(trainer, "num_tokens"))
        )
    assert teams.logged(trainer, "program/failed") == [0]
    (weights, *figures), (other, *other_figures) = trained
    assert figures == other_figures
    assert all(torch.equal(weights[name], other[name]) for name in weights)
    assert not all(torch.equal(weights[name], start[name]) for name in weights)


# The beginning of a script that a command runs: `ask(model, text)` without a package
ASK = """
import json, os, sys, urllib.request

problem = json.load(sys.stdin)

def ask(model, text):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
