"""MADPO's loss on numbers worked out by hand, and runs of a few steps."""

import json
import math
import warnings

import pytest
import teams
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from trl import DPOConfig, DPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from marcog_trl import MADPOConfig, MADPOTrainer, Team, collect_preferences, save_untrained_team
from marcog_trl.preferences.madpo_config import LOSS_TYPES
from marcog_trl.team.settings import TeamSettings


SHARINGS = ("shared", "latent", "separate")
SGD = {"optim": "sgd", "learning_rate": 0.1}  # Adam would enlarge what rounding makes


def lengths(completions, replies, **kwargs):
    return [sum(map(len, of_episode.values())) / 10 for of_episode in replies]


def batch_of(trainer, count=2):
    return trainer._prepare_inputs(trainer.data_collator(list(trainer.train_dataset.select(range(count)))))


def own_pair(chosen, rejected, pairs, scores=((1.0, 1.0), (0.0, 0.0)), turns=(0, 0)):
    """A pair with replies of one token, of agents a and b."""
    row = {"act": 0, "prompt_ids": [20], "latent": []}
    sides = [
        [{**row, "agent": a, "turn": k, "completion_ids": [t]} for a, k, t in zip("ab", turns, side, strict=True)]
        for side in (chosen, rejected)
    ]
    changed = {
        "chosen": sides[0], "rejected": sides[1], "chosen_agent_scores": scores[0], "rejected_agent_scores": scores[1],
    }  # fmt: skip
    return Dataset.from_list([{**pairs[0], **changed}], features=pairs.features)


class Scripted:
    """In place of the model: the next rows have these log-probabilities."""

    def __init__(self, *logps):
        self.logps = torch.tensor(logps, requires_grad=True)

    def __call__(self, shift_labels, **options):
        assert shift_labels.shape == (1, len(self.logps))  # replies of one token
        logps = self.logps[None]
        zeros = torch.zeros_like(logps).detach()
        return FusedCausalLMOutput(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


class TestLoss:
    def test_joint_margin_sums_over_agents(self, make_trainer, make_pairs):
        trainer = make_trainer(pairs=own_pair((5, 6), (7, 8), make_pairs()), reference="none")
        model = Scripted(2.0, -0.5, -1.0, 0.5)  # of the rows: both of the chosen side, both of the rejected one
        loss = trainer._compute_loss(model, batch_of(trainer, 1), False)
        assert loss.item() == pytest.approx(0.598139, abs=1e-6)
        loss.backward()
        # 0.0450166 is beta times the weight that the pair has in the gradient
        assert model.logps.grad.tolist() == pytest.approx([-0.0450166, -0.0450166, 0.0450166, 0.0450166], abs=1e-7)
        trainer.log({})
        logged = trainer.state.log_history[-1]
        assert logged["agents/a/margin"] == pytest.approx(0.3) and logged["agents/b/margin"] == pytest.approx(-0.1)
        assert logged["rewards/margins"] == pytest.approx(0.2) and logged["rewards/accuracies"] == 1

    def test_later_turns_count_less(self, make_trainer, make_pairs):
        pairs = own_pair((5, 6), (7, 8), make_pairs(), turns=(0, 1))
        trainer = make_trainer(pairs=pairs, reference="none", gamma_turn=0.5)
        loss = trainer._compute_loss(Scripted(2.0, -0.5, -1.0, 0.5), batch_of(trainer, 1), False)
        assert loss.item() == pytest.approx(-math.log(1 / (1 + math.exp(-0.1 * (3 - 0.5 * 1)))), abs=1e-6)

    def test_each_agent_can_have_a_loss_of_its_own(self, make_trainer, make_pairs):
        """In which it prefers the side on which it earned more."""
        pairs = own_pair((5, 6), (7, 8), make_pairs(), scores=((1.0, 0.0), (0.0, 0.5)))
        trainer = make_trainer(pairs=pairs, reference="none", margin="agent")
        assert [example["chosen_rows"][0]["ids"] for example in trainer.train_dataset] == [[20, 5], [20, 8]]
        losses = []
        for example, logps in zip(trainer.train_dataset, ((2.0, -1.0), (-0.5, 0.5)), strict=True):
            inputs = trainer._prepare_inputs(trainer.data_collator([example]))
            losses.append(trainer._compute_loss(Scripted(*logps), inputs, False).item())
        assert losses == pytest.approx([0.554355, 0.744397], abs=1e-6)

    @pytest.mark.parametrize("sharing", SHARINGS)
    def test_begins_at_the_reference(self, make_trainer, sharing):
        trainer = make_trainer(sharing, num_turns=2, max_steps=1)
        trainer.train()
        assert teams.logged(trainer, "loss") == [pytest.approx(math.log(2), abs=1e-6)]
        assert teams.logged(trainer, "rewards/margins") == [0.0]

    @pytest.mark.parametrize("sharing", SHARINGS)
    def test_gradient_is_the_sum_of_the_agents_gradients(self, make_trainer, sharing):
        """Every agent minimises the joint loss with the other agents' log-probabilities held fixed, as in CoMLRL."""
        trainer = make_trainer(sharing, reference="none", loss_type=["sigmoid"])
        pair = trainer.train_dataset[0]

        def logp(row):
            ids = torch.tensor([row["ids"]])
            with trainer._as_rows(torch.tensor([row["agent"]]), torch.tensor([row["latent"]])):
                logits = trainer.model(input_ids=ids).logits[:, :-1]
            logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            return logps[:, row["prompt_length"] - 1 :].sum()

        margins = dict.fromkeys(range(2), 0.0)
        for side, sign in (("chosen_rows", 1), ("rejected_rows", -1)):
            for row in pair[side]:
                margins[row["agent"]] = margins[row["agent"]] + sign * logp(row)
        losses = [-F.logsigmoid(0.1 * (margins[i] + margins[1 - i].detach())) for i in range(2)]
        sum(losses).backward()
        expected = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, batch_of(trainer, 1), False)
        loss.backward()
        assert loss.item() == pytest.approx(losses[0].item(), rel=1e-5)
        found = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys() and len(found) >= 28
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, atol=1e-6), name

    def test_replies_that_both_sides_have_are_left_out(self, make_trainer, make_pairs):
        """Where they cancel, as in a loss of margins."""
        sizes = []
        for loss_type in (["sigmoid"], ["sigmoid", "sft"]):
            trainer = make_trainer(pairs=own_pair((5, 6), (5, 8), make_pairs()), loss_type=loss_type)
            sizes.append(len(trainer.train_dataset[0]["chosen_rows"]))
        assert sizes == [1, 2]

    def test_a_row_does_not_see_the_rows_before_it(self, make_trainer, make_pairs):
        logps = []
        for first in (5, 90):
            trainer = make_trainer(pairs=own_pair((first, 6), (7, 8), make_pairs()))
            logps.append(trainer.train_dataset[0]["ref_chosen_row_logps"])
        assert logps[0][1] == logps[1][1] and logps[0][0] != logps[1][0]

    @pytest.mark.parametrize("loss_type", [["sigmoid"], ["sigmoid", "sft"], ["sft"]])
    def test_the_split_into_micro_batches_changes_nothing(self, make_trainer, make_pairs, loss_type):
        """Although sides have unlike numbers of tokens, one of them none, and some agents do not speak."""
        pairs = make_pairs(count=4).select(range(4))
        silent = Dataset.from_list(
            [
                {**pair, "chosen": [row for row in pair["chosen"] if row["agent"] == "b"][: 1 - i % 2]}
                for i, pair in enumerate(pairs)
            ],
            features=pairs.features,
        )
        runs = []
        for size in (4, 1):
            trainer = make_trainer(
                pairs=silent, loss_type=loss_type, max_steps=2, per_device_train_batch_size=size,
                gradient_accumulation_steps=4 // size, eval_dataset=silent, per_device_eval_batch_size=size,
            )  # fmt: skip
            trainer.train()
            first, last, *_ = trainer.state.log_history
            runs.append({**first, **{f"last {name}": value for name, value in last.items()}, **trainer.evaluate()})
        names = [name for name in runs[0] if not any(word in name for word in ("runtime", "per_second", "num_tokens"))]
        assert {"loss", "entropy", "mean_token_accuracy", "agents/a/margin", "eval_logits/chosen"} < {*names}
        for name in names:
            assert runs[1][name] == pytest.approx(runs[0][name], rel=1e-3, abs=1e-4), name

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_loss_types_of_trl_train_a_team(self, make_trainer, loss_type):
        trainer = make_trainer(loss_type=[loss_type], label_smoothing=0.1, max_steps=1)
        before = teams.trainable(trainer)
        trainer.train()
        assert math.isfinite(teams.logged(trainer, "loss")[0])
        assert all(not torch.equal(before[name], moved) for name, moved in teams.trainable(trainer).items())


class TokenDPOTrainer(DPOTrainer):
    """TRL's, on token ids."""

    def _prepare_dataset(self, dataset, *args):
        return dataset


def test_one_agent_with_one_turn_is_dpo(tiny_model, tmp_path):
    folder = tmp_path / "start"
    save_untrained_team(folder, tiny_model, TeamSettings(max_completion_length=8))
    team = Team.from_pretrained(folder)
    pairs = collect_preferences(
        team, teams.dataset(6), num_candidates=4, reward_funcs=teams.letters, pairs_per_problem=2
    )
    options = {
        "max_steps": 4, "per_device_train_batch_size": 3, **SGD, **teams.QUIET
    }  # fmt: skip
    ours = MADPOTrainer(folder, args=MADPOConfig(str(tmp_path / "ours"), **options), train_dataset=pairs)
    texts = Dataset.from_list(
        [
            {
                "prompt_ids": pair["chosen"][0]["prompt_ids"],
                "chosen_ids": pair["chosen"][0]["completion_ids"],
                "rejected_ids": pair["rejected"][0]["completion_ids"],
            }
            for pair in pairs
        ]
    )
    theirs = TokenDPOTrainer(
        tiny_model, args=DPOConfig(str(tmp_path / "theirs"), **options), train_dataset=texts,
        processing_class=team.tokenizer, peft_config=ours.model.peft_config["default"],
    )  # fmt: skip
    set_peft_model_state_dict(theirs.model, load_file(folder / "adapter_model.safetensors"))
    before = teams.trainable(ours)
    ours.train()
    theirs.train()
    assert teams.logged(ours, "loss") == pytest.approx(teams.logged(theirs, "loss"), abs=1e-6)
    assert teams.logged(ours, "rewards/margins") == pytest.approx(teams.logged(theirs, "rewards/margins"), abs=1e-5)
    for name, weight in teams.trainable(theirs).items():
        assert torch.allclose(teams.trainable(ours)[name], weight, atol=1e-6), name
        assert not torch.equal(before[name], weight)


class TestRuns:
    @pytest.mark.parametrize("sharing", SHARINGS)
    def test_every_weight_that_should_moves_and_the_team_loads_again(self, make_trainer, load_team, sharing):
        trainer = make_trainer(sharing, num_turns=2)
        start = load_team(sharing, 2)
        before = teams.trainable(trainer)
        assert any("core_decoder" in name for name in before) == (sharing == "latent")
        assert not any("latent_net" in name or "value_head" in name for name in before)
        trainer.train()
        assert all(not torch.equal(before[name], moved) for name, moved in teams.trainable(trainer).items())
        trainer.save_model()
        loaded = Team.from_pretrained(trainer.args.output_dir, workflow=teams.Pair(num_turns=2))
        assert loaded.description.trainer == "MADPOTrainer"
        weights = trainer.team.own_weights()
        assert weights.keys() == loaded.own_weights().keys()
        for name, weight in loaded.own_weights().items():
            assert torch.equal(weights[name], weight), name
        for agent in loaded.agents:
            live, saved, old = (teams.live_logits(t, agent) for t in (trainer, Holder(loaded), Holder(start)))
            assert torch.allclose(live, saved, atol=1e-5) and not torch.allclose(live, old, atol=1e-3)

    def test_margin_grows_on_the_pairs(self, make_trainer):
        trainer = make_trainer("latent", max_steps=24, per_device_train_batch_size=8)
        trainer.train()
        margins = teams.logged(trainer, "rewards/margins")
        assert margins[0] == 0 and margins[-1] > 0.4
        assert teams.logged(trainer, "rewards/accuracies")[-1] > 0.9

    def test_a_resumed_run_ends_with_the_same_weights(self, make_trainer):
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
        whole = make_trainer("latent", **options)
        whole.train()
        second = make_trainer("latent", **options)
        assert second.train_dataset["ref_chosen_logps"] == whole.train_dataset["ref_chosen_logps"]
        second.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
        for name, weight in teams.trainable(whole).items():
            assert torch.equal(teams.trainable(second)[name], weight), name
        assert teams.logged(second, "loss") == teams.logged(whole, "loss")

    def test_gradient_checkpointing_changes_nothing(self, make_trainer):
        plain, checkpointed = (make_trainer("latent", gradient_checkpointing=on, **SGD) for on in (False, True))
        for trainer in (plain, checkpointed):
            trainer.train()
        for name, weight in teams.trainable(plain).items():
            assert torch.allclose(teams.trainable(checkpointed)[name], weight, atol=1e-6), name

    def test_held_out_pairs_are_evaluated(self, make_trainer, make_pairs):
        trainer = make_trainer(eval_dataset=make_pairs(count=6).select(range(8, 12)))
        trainer.train()
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] > 0 and 0 <= metrics["eval_rewards/accuracies"] <= 1
        assert "eval_agents/a/margin" in metrics
        with pytest.raises(ValueError, match="The reference is gone"):
            trainer.evaluate(make_pairs())

    def test_other_pairs_may_have_more_rows(self, make_trainer, make_pairs):
        """And those of the constructor still fit."""
        pairs = make_pairs(num_turns=2)
        trainer = make_trainer(num_turns=2, pairs=own_pair((5, 6), (7, 8), pairs), max_steps=1)
        assert trainer.evaluate(pairs)["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
        trainer.train()
        assert teams.logged(trainer, "loss") == [pytest.approx(math.log(2), abs=1e-6)]

    def test_export_works_with_the_prompts_of_the_pairs(self, make_trainer, tmp_path):
        trainer = make_trainer("latent", max_steps=1)
        trainer.train()
        report = trainer.export_agents(tmp_path / "agents")
        assert set(report) == {"a", "b"} and (tmp_path / "agents" / "a" / "adapter_config.json").is_file()


class Holder:
    """A team where `teams.live_logits` wants a trainer."""

    def __init__(self, team):
        self.team, self.model = team, team.model


class TestReference:
    def test_another_team_can_be_the_reference(self, make_trainer, saved_team, tmp_path):
        trained = make_trainer("latent", max_steps=3)
        trained.train()
        trained.save_model(str(tmp_path / "later"))
        initial, workflow = saved_team("latent"), teams.Pair()
        first, later = make_trainer("latent"), make_trainer("latent", folder=tmp_path / "later")
        mixed = make_trainer("latent", folder=tmp_path / "later", ref_model=initial)
        assert mixed.train_dataset["ref_chosen_logps"] == first.train_dataset["ref_chosen_logps"]
        assert mixed.train_dataset["ref_chosen_logps"] != later.train_dataset["ref_chosen_logps"]
        start = Team.from_pretrained(tmp_path / "later", workflow=workflow).own_weights()
        for name, weight in mixed.team.own_weights().items():
            assert torch.equal(weight, start[name]), name  # and the run begins where it should
        mixed.train()
        assert teams.logged(mixed, "rewards/margins")[0] > 0

    def test_without_a_reference_ratios_are_log_probabilities(self, make_trainer, make_pairs):
        trainer = make_trainer(reference="none", max_steps=1)
        trainer.train()
        [chosen], [reward] = teams.logged(trainer, "logps/chosen"), teams.logged(trainer, "rewards/chosen")
        assert reward == pytest.approx(0.1 * chosen, rel=1e-5) and chosen < -1
        later = trainer.evaluate(make_pairs())  # after training, where a reference would be gone
        assert later["eval_rewards/chosen"] == pytest.approx(0.1 * later["eval_logps/chosen"], rel=1e-5)


class TestBadInput:
    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"workflow": "Chain"}, "workflow is 'Chain', but 'Pair' in this team"),
            ({"agents": ["a", "c"]}, r"agents is \['a', 'c'\], but \['a', 'b'\] in this team"),
            ({"num_turns": 2}, "num_turns is 2, but 1"),
            ({"tokenizer": "other"}, "tokenizer is 'other'"),
            ({"latents": "other"}, "latents is 'other', but None"),
        ],
    )
    def test_pairs_of_another_team(self, make_trainer, make_pairs, other, message):
        pairs = make_pairs()
        team = json.dumps(json.loads(pairs[0]["team"]) | other)
        pairs = pairs.remove_columns("team").add_column("team", [team] * len(pairs))
        with pytest.raises(ValueError, match=f"train_dataset has pairs of another team: {message}"):
            make_trainer(pairs=pairs)

    def test_long_pairs_are_counted(self, make_trainer, make_pairs):
        def longer(pair, index):
            rows = pair["rejected"]
            return pair if index else {"rejected": [rows[0], {**rows[1], "completion_ids": [5] * 30}]}

        pairs = make_pairs().map(longer, with_indices=True)
        with pytest.warns(UserWarning, match="1 of 8 pairs of train_dataset have a row of more than"):
            trainer = make_trainer(pairs=pairs, max_length=32)
        assert len(trainer.train_dataset) == 7
        with pytest.raises(ValueError, match=r"8 of 8 pairs .* Set a larger max_length"):
            make_trainer(max_length=3)

    def test_no_saved_team(self, make_trainer, tiny_model, tmp_path):
        whole = tmp_path / "whole"
        teams.make(tiny_model, whole, workflow=teams.Pair(), full_finetuning=True, peft_config=None).save_model()
        with pytest.raises(ValueError, match="has all weights of its model and no adapter, which this training"):
            make_trainer(folder=whole)
        with pytest.raises(ValueError, match=r"has no team\.json"):
            make_trainer(folder=tiny_model)

    def test_agents_whose_latents_are_alike(self, make_trainer, make_pairs):
        def alike(pair):
            return {side: [{**row, "latent": [1.0] * 8} for row in pair[side]] for side in ("chosen", "rejected")}

        with pytest.warns(UserWarning, match="The latents of 'a' and 'b' are alike"):
            make_trainer("latent", pairs=make_pairs("latent").map(alike))

        def apart(pair):
            return {
                side: [{**row, "latent": [1.0 if row["agent"] == "a" else -1.0] * 8} for row in pair[side]]
                for side in ("chosen", "rejected")
            }

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The latents of")
            make_trainer("latent", pairs=make_pairs("latent").map(apart))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"margin": "team"}, "margin='team' is unknown"),
            ({"reference": "base"}, "reference='base' is unknown"),
            ({"loss_type": ["aot"]}, "loss_type='aot' is unknown"),
            ({"loss_type": ["bco_pair"], "reference": "none"}, "loss_type='bco_pair' needs a reference"),
            ({"ld_alpha": 0.5}, "ld_alpha=0.5 is not supported"),
            ({"use_weighting": True}, "use_weighting=True is not supported"),
            ({"precompute_ref_log_probs": True}, "They are always computed in advance"),
            ({"sync_ref_model": True}, "Set reference='round'"),
            ({"gamma_turn": 1.5}, "gamma_turn=1.5 must be"),
            ({"beta": 0.0}, "beta=0.0 must be greater than 0"),
            ({"max_length": 0}, "max_length=0 must be at least 1"),
        ],
    )
    def test_settings(self, options, message):
        with pytest.raises(ValueError, match=message):
            MADPOConfig("out", report_to="none", **options)
