"""Saved teams of the tiny model, and pairs that they played."""

import pytest
import teams

from marcog_trl import SHPPOTrainer, Team


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
