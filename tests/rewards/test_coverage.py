"""What an agent adds to the team: by hand, and as the exact policy gradient of what the team earns."""

import itertools
from functools import partial

import pytest
import torch
from players import finished, written
from trl.trainer.utils import get_callable_name

from marcog_trl.execution import TestResult, Verdict
from marcog_trl.problems import solution_job
from marcog_trl.rewards import InfrastructureFailure, coverage_reward
from marcog_trl.rewards.scoring import Scorer
from marcog_trl.rollout.engine import play_tree
from marcog_trl.rollout.tree import Tree
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.credit import over_siblings
from marcog_trl.workflows import Coverage, Single


PROBLEM = {
    "prompt": "Write f.",
    "entry_point": "f",
    "test": ["assert f() == 1", "assert f() == 2", "assert f() == 3"],
    "test_format": "asserts",
}
# A program -> whether it passes each test. The first test is visible
PROGRAMS = {
    "def f():\n    return 0": (False, False, False),
    "def f():\n    return 1": (True, False, True),
    "def f():\n    return 2": (True, True, True),
    "def f():\n    return 3": (False, True, True),
}
NONE, HALF, ALL, HIDDEN = PROGRAMS


def verdict_on(code, status=None):
    passes = PROGRAMS[code]
    results = tuple(TestResult("passed" if passed else "failed") for passed in passes)
    return Verdict(status or ("passed" if all(passes) else "failed"), sum(passes), len(passes), results)


class Executor:
    """Knows the verdicts, and how many programs it was given."""

    def __init__(self):
        self.count = 0

    def run(self, jobs):
        self.count += len(jobs)
        return [verdict_on(job.code) for job in jobs]

    def submit(self, jobs):
        return finished(self.run(jobs))


def rewards_of(*codes, status=None, log=None, problem=PROBLEM, **options):
    workflow = options.pop("workflow", None) or Coverage(len(codes))
    replies = dict(zip([agent.name for agent in workflow.agents], codes, strict=False))
    verdicts = [(solution_job(problem, code), verdict_on(code, status)) for code in codes]
    columns = {name: [problem[name]] for name in ("entry_point", "test", "test_format")}
    given = {**columns, "verdicts": [verdicts], "executor": None, "log_metric": log}
    return coverage_reward(["Write f."], [codes[0]], replies=[replies], workflow=workflow, **given, **options)[0]


@pytest.mark.parametrize(
    ("codes", "options", "expected"),
    [
        ((ALL, NONE, NONE), {}, (1.0, 0.0, 0.0)),
        ((ALL, ALL, NONE), {}, (0.0, 0.0, 0.0)),  # either would do
        ((HALF, HIDDEN, HIDDEN), {}, (-0.5, 0.0, 0.0)),  # chosen, and worse than the others
        ((HALF, HIDDEN, NONE), {"of": "any"}, (0.0, 0.5, 0.0)),
        ((HALF, HALF, HIDDEN), {"of": "any", "all_or_nothing": True}, (0.0, 0.0, 1.0)),
        ((HALF, NONE, NONE), {"all_or_nothing": True}, (0.0, 0.0, 0.0)),
    ],
)
def test_contributions_by_hand(codes, options, expected):
    assert tuple(rewards_of(*codes, **options).values()) == expected


def test_what_is_logged():
    logged = {}
    rewards_of(HALF, HALF, HIDDEN, log=lambda name, value: logged.__setitem__(name, float(value)))
    assert logged == {
        "coverage_reward/selected": 0.5,
        "coverage_reward/any": 1.0,
        "coverage_reward/mean": pytest.approx(2 / 3),
        "coverage_reward/alike": pytest.approx(1 / 3),
    }


def test_a_failure_of_the_executor_is_no_reward():
    assert isinstance(rewards_of(ALL, NONE, status="infrastructure"), InfrastructureFailure)


def test_errors():
    with pytest.raises(ValueError, match="Set workflow='coverage'"):
        rewards_of(ALL, workflow=Single())
    with pytest.raises(ValueError, match="visible_tests=3 shows all 3"):
        rewards_of(ALL, NONE, workflow=Coverage(2, visible_tests=3))
    with pytest.raises(ValueError, match="of='best'"):
        rewards_of(ALL, NONE, of="best")
    assert get_callable_name(partial(coverage_reward, of="any")) == "coverage_reward"


# The policy gradient


def selected(codes):
    """What the chosen program earns, in words of its own: visible test first, then the hash."""
    import hashlib

    order = sorted(codes, key=lambda code: (not PROGRAMS[code][0], hashlib.sha256(code.encode()).hexdigest()))
    return sum(PROGRAMS[order[0]][1:]) / 2


def best(codes):
    return max(sum(PROGRAMS[code][1:]) / 2 for code in codes)


def estimates(joint_replies, cross, kind, of, num_agents, generations):
    """Advantages `(samples, agents, generations)` of replies `joint_replies[sample][agent][generation]`, and programs run."""
    workflow, executor = Coverage(num_agents), Executor()
    tree = Tree.of_turns(workflow, [generations], cross)
    scripts = list(joint_replies)

    def answer(rows):
        if cross:  # by problem, agent and generation
            return [text for of_agents in scripts for own in of_agents for text in own]
        return [own[g] for of_agents in scripts for g in range(generations) for own in of_agents]

    generate, encode, decode = written(answer)
    problems = [{**PROBLEM, "task_id": i} for i in range(len(scripts))]
    turns = play_tree(workflow, problems, generate, encode, decode, tree, executor=lambda: executor)
    played = executor.count
    scorer = Scorer([partial(coverage_reward, of=of)], workflow, lambda: executor)
    scorer.end_turn(turns[-1], 0)
    assert executor.count == played  # rewards run nothing more
    names = [agent.name for agent in workflow.agents]
    batch = TeamBatch(tree, turns, names, workflow.slots, names, torch.device("cpu"))
    batch.close()
    return over_siblings(batch, kind=kind).view(len(scripts), num_agents, generations), played


@pytest.mark.parametrize("of", ["selected", "any"])
@pytest.mark.parametrize(
    ("cross", "kind", "num_agents", "generations"),
    [(False, "none", 3, 1), (False, "rloo", 2, 2), (True, "none", 2, 2), (True, "rloo", 2, 2)],
)
def test_the_expected_estimate_is_the_policy_gradient(of, cross, kind, num_agents, generations):
    codes = [NONE, HALF, HIDDEN]
    logits = torch.tensor([[0.3, -0.2, 0.1], [-0.5, 0.4, 0.2], [0.0, 0.6, -0.3]][:num_agents], dtype=torch.float64)
    logits.requires_grad_()
    log_probs = logits.log_softmax(-1)
    earns = {"selected": selected, "any": best}[of]
    actions = list(itertools.product(range(len(codes)), repeat=num_agents))
    agents = torch.arange(num_agents)
    objective = sum(
        log_probs[agents, list(action)].sum().exp() * earns([codes[a] for a in action]) for action in actions
    )
    (exact,) = torch.autograd.grad(objective, logits, retain_graph=True)

    samples = list(itertools.product(range(len(codes)), repeat=num_agents * generations))
    index = torch.tensor(samples).view(len(samples), num_agents, generations)
    texts = [[[codes[a] for a in own] for own in sample] for sample in index.tolist()]
    advantages, played = estimates(texts, cross, kind, of, num_agents, generations)
    assert played <= len(samples) * num_agents * generations  # at most k programs an episode
    chosen = log_probs[agents[:, None].expand(-1, generations), index]  # (samples, agents, generations)
    probability = chosen.sum((1, 2)).exp().detach()
    surrogate = (chosen * advantages.double()).sum((1, 2)) / generations
    (estimated,) = torch.autograd.grad((probability * surrogate).sum(), logits)
    torch.testing.assert_close(estimated, exact, rtol=1e-5, atol=1e-7)
    assert exact.abs().max() > 0.01
