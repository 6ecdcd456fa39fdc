"""Optimizers whose groups have options of their own, such as GaLore's and APOLLO's rank."""

import pytest
import teams
import torch

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer


class LowRank(torch.optim.AdamW):
    """A stand-in for GaLore: groups of its own making, frozen parameters included, one of which has a rank."""


def low_rank(args, model=None):
    named = dict(model.named_parameters())
    chosen = [p for name, p in named.items() if "q_proj" in name]
    rest = [p for name, p in named.items() if "q_proj" not in name]
    return LowRank, {"params": [{"params": rest}, {"params": chosen, "rank": 2}], "lr": args.learning_rate}


@pytest.mark.parametrize(
    ("trainer_class", "options"),
    [
        (MultiAgentPPOTrainer, {}),
        (MultiAgentPPOTrainer, {"full_finetuning": True, "peft_config": None}),
        (SHPPOTrainer, {}),
    ],
)
def test_groups_keep_their_own_options(tiny_model, tmp_path, monkeypatch, trainer_class, options):
    monkeypatch.setattr(trainer_class, "get_optimizer_cls_and_kwargs", staticmethod(low_rank))
    rates = {"critic_learning_rate": 0.5}
    trainer = teams.make(tiny_model, tmp_path, trainer_class, workflow=teams.Pair(), **rates, **options)
    optimizer = trainer.create_optimizer()
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert ("rank" in group) == ("q_proj" in names[id(p)])
            assert (group["group"] == "critic") == ("value_head" in names[id(p)])
    [critic] = [group for group in optimizer.param_groups if group["group"] == "critic"]
    assert critic["lr"] == 0.5
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_updates_in_the_backward_pass_are_refused_beside_networks_of_the_team(tiny_model, tmp_path, optim):
    with pytest.raises(
        ValueError, match=rf"^optim='{optim}' updates weights in the backward pass.* Set another optim"
    ):
        teams.make(tiny_model, tmp_path, MultiAgentPPOTrainer, optim=optim)
    teams.make(tiny_model, tmp_path, MultiAgentPPOTrainer, optim=optim, critic="none")
    teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, optim=optim)
