"""Saved teams of the tiny model, and pairs that they played."""

import pytest
import teams

from marcog_trl import MADPOConfig, MADPOTrainer, SHPPOTrainer, Team, collect_preferences


@pytest.fixture(scope="session")
def saved_team(tiny_model, tmp_path_factory):
    """`saved_team(sharing, num_turns)`: folder of a team of `teams.Pair` with a random adapter."""
    folders = {}

    def save(sharing="shared", num_turns=1, workflow=None):
        key = sharing, num_turns, type(workflow).__name__
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("team")
            trainer = teams.make(
                tiny_model, folders[key], SHPPOTrainer, workflow=workflow or teams.Pair(num_turns=num_turns),
                parameter_sharing=sharing, critic="none",
            )  # fmt: skip
            teams.randomize(trainer.model.get_base_model().marcog_team)
            trainer.save_model()
        return folders[key]

    return save


@pytest.fixture(scope="session")
def load_team(saved_team):
    """`load_team(sharing, num_turns)`: a team of its own."""

    def load(sharing="shared", num_turns=1, workflow=None):
        workflow = workflow or teams.Pair(num_turns=num_turns)
        return Team.from_pretrained(saved_team(sharing, num_turns, workflow), workflow=workflow)

    return load


@pytest.fixture(scope="session")
def make_pairs(load_team):
    """`make_pairs(sharing, num_turns, ...)`: pairs that the team of these played, collected once."""
    collected = {}

    def make(sharing="shared", num_turns=1, count=4, **options):
        key = sharing, num_turns, count, str(options)
        if key not in collected:
            options = {
                "num_candidates": 4,
                "pairs_per_problem": 2,
                "unit": "episode",
                "reward_funcs": by_agent,
            } | options
            collected[key] = collect_preferences(load_team(sharing, num_turns), teams.dataset(count), **options)
        return collected[key]

    return make


def by_agent(completions, replies, **kwargs):
    """The length of each agent's reply."""
    return [{agent: len(text) / 10 for agent, text in of_episode.items()} for of_episode in replies]


@pytest.fixture
def make_trainer(saved_team, make_pairs, tmp_path):
    """`make_trainer(sharing, num_turns, pairs, ...)`: a trainer of a few steps on these pairs."""

    def make(sharing="shared", num_turns=1, pairs=None, folder=None, **options):
        arguments = {name: options.pop(name) for name in ("ref_model", "eval_dataset", "callbacks") if name in options}
        workflow = teams.Pair(num_turns=num_turns)
        config = {
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            **teams.QUIET,
            **options,
        }
        return MADPOTrainer(
            folder or saved_team(sharing, num_turns, workflow),
            args=MADPOConfig(str(tmp_path / "madpo"), **config),
            train_dataset=make_pairs(sharing, num_turns) if pairs is None else pairs,
            workflow=workflow,
            **arguments,
        )

    return make
