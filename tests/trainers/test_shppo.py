"""The heterogeneity layer in training: what each loss reaches, what stays fixed, and what equals plain PPO."""

import pytest
import teams
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer, Slot
from marcog_trl.team import modules
from marcog_trl.team.modules import ForwardContext


MODES = {
    "observation": {},
    "agent": {"latent_scope": "agent"},
    "gradient": {"policy_gradient_to_latent": True},
    "minmax": {"latent_distance": "minmax"},
    "shared": {"parameter_sharing": "shared"},
}


def distances(trainer, inputs, row):
    """What a row's agent does compared with what it would do with the other latent, token by token."""
    own = slice(row, row + 1)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)[own]
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)[own]
    reply = inputs["completion_ids"][row]
    shares = []
    for z in (inputs["z"][own], inputs["other_z"][own]):
        with torch.no_grad(), trainer.modules.rows(ForwardContext(z=z)):
            logits = trainer.model(input_ids=ids, attention_mask=attention).logits[0, -len(reply) - 1 : -1]
        shares.append(logits.softmax(-1)[torch.arange(len(reply)), reply])
    return (1 - shares[1] / shares[0]).clamp(min=0)


class SameAsked(teams.Pair):
    """Agents that are asked the same: only their role texts differ, which no prompt shows."""

    def play(self, problem):
        yield {agent.name: problem["prompt"] for agent in self.agents}


class TestGradients:
    @pytest.mark.parametrize(
        ("loss", "options", "reached"),
        [
            ("ppo", {}, {"lora", "core_decoder"}),
            ("ppo", {"policy_gradient_to_latent": True}, {"lora", "core_decoder", "latent_net"}),
            (
                "ppo",
                {"policy_gradient_to_latent": True, "latent_scope": "agent"},
                {"lora", "core_decoder", "latent_net"},
            ),
            ("latent", {}, {"latent_net"}),
            ("latent", {"policy_gradient_to_latent": True}, {"latent_net"}),
            ("inference", {}, {"inference_net"}),
            ("value", {"policy_gradient_to_latent": True}, {"value_head"}),
            ("value", {"critic_backprop": True}, {"value_head", "lora", "core_decoder"}),
            ("behaviour", {}, {"lora", "core_decoder"}),
            ("behaviour", {"policy_gradient_to_latent": True}, {"lora", "core_decoder", "latent_net"}),
        ],
    )
    def test_each_loss_reaches_what_it_should(self, tiny_model, tmp_path, monkeypatch, loss, options, reached):
        def nothing(value, *args, **kwargs):
            return torch.zeros_like(value).detach()

        for other in ("latent", "inference"):
            if loss != other:
                monkeypatch.setattr(modules, f"{other}_loss", nothing)
        watch = teams.Watch()
        trainer = teams.make(
            tiny_model,
            tmp_path,
            SHPPOTrainer,
            workflow=SameAsked() if loss == "behaviour" else teams.Pair(),
            callbacks=[watch],
            vf_coef=1.0 if loss == "value" else 0.0,
            behaviour_distance_coef=1.0 if loss == "behaviour" else 0.0,
            **options,
        )
        teams.randomize(trainer.modules)
        if loss != "ppo":
            teams.change_credit(trainer, teams.without_advantages)
        trainer.train()
        parts = ("lora", "core_decoder", "latent_net", "inference_net", "value_head")
        found = {
            part: [gradient.any().item() for name, gradient in watch.gradients[0].items() if part in name]
            for part in parts
        }
        assert {part for part in parts if any(found[part])} == reached
        assert all(all(found[part]) for part in reached)


class TestEquality:
    OPTIONS = {"beta": 0.05, "max_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 4}
    APART = {"behaviour_distance_coef": 0.0}  # no rows are compared with others, which makes batches larger

    def run(self, model, path, trainer_class, prepare=lambda trainer: None, **options):
        trainer = teams.make(model, path, trainer_class, workflow=teams.Chain(num_turns=2), **self.OPTIONS | options)
        prepare(trainer)
        trainer.train()
        return trainer

    @pytest.fixture(scope="class")
    def ppo(self, tiny_model, tmp_path_factory):
        return self.run(tiny_model, tmp_path_factory.mktemp("ppo"), MultiAgentPPOTrainer)

    @pytest.mark.parametrize("mode", ["observation", "agent", "gradient", "shared"])
    def test_with_cores_fixed_at_zero_it_is_ppo_bit_for_bit(self, tiny_model, tmp_path, ppo, mode):
        """Samples included: several steps from the model's own replies, latent losses present."""

        def freeze(trainer):
            if mode != "shared":
                trainer.modules.core_decoder.requires_grad_(False)

        trainer = self.run(tiny_model, tmp_path, SHPPOTrainer, freeze, **MODES[mode], **self.APART)
        expected, weights = teams.trainable(ppo), teams.trainable(trainer)
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name
        for name in ("reward", "kl", "entropy", "critic/value_loss", "grad_norm", "grad_norm/critic", "num_tokens"):
            assert teams.logged(trainer, name) == teams.logged(ppo, name), name
        if mode == "shared":
            assert teams.logged(trainer, "loss") == teams.logged(ppo, "loss")
            assert weights.keys() == expected.keys()
        else:
            assert all(loss != 0 for loss in teams.logged(trainer, "latent/loss"))
            assert set(teams.logged(trainer, "latent/core_norm")) == {0}

    @pytest.mark.parametrize(("initial", "scale"), [(True, 1.0), ("gaussian", 1.0), (True, 0.0), (False, 0.0)])
    def test_cores_start_where_they_change_nothing(self, tiny_model, tmp_path, initial, scale):
        """At random where LoRA's B is 0, else at 0; the policy before the first update is that of the base model or adapter."""
        options = {"init_core_scale": 0.0} if scale == 0.0 and initial is True else {}
        trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, lora={"init_lora_weights": initial}, **options)
        weight = trainer.modules.core_decoder.cores.weight
        assert weight.any() == (scale > 0)
        ids = torch.arange(20, 32)[None]
        with torch.no_grad():
            expected = trainer.model(ids).logits
            with trainer.modules.rows(ForwardContext(z=torch.ones(1, trainer.args.latent_size))):
                assert torch.equal(trainer.model(ids).logits, expected)

    def test_with_free_cores_it_is_not(self, tiny_model, tmp_path, ppo):
        trainer = self.run(tiny_model, tmp_path, SHPPOTrainer)
        assert teams.logged(trainer, "critic/value_loss") != teams.logged(ppo, "critic/value_loss")
        assert teams.logged(trainer, "latent/core_norm")[-1] > 0

    @pytest.mark.parametrize(
        ("mode", "workflow"),
        [("observation", teams.Pair), ("agent", SameAsked), ("gradient", SameAsked), ("minmax", teams.Pair)],
    )
    def test_permuting_the_agents_permutes_everything(self, tiny_model, tmp_path, mode, workflow):
        """With three agents, their replies by prompt, and no noise, which belongs to places and not to agents."""

        def run(names):
            watch = teams.Watch()

            def reward(replies, **kwargs):
                return [
                    {name: teams.letters([text])[0] + "abc".index(name) for name, text in reply.items()}
                    for reply in replies
                ]

            trainer = teams.make(
                tiny_model,
                tmp_path,
                SHPPOTrainer,
                workflow=workflow(names),
                reward=reward,
                callbacks=[watch],
                per_device_train_batch_size=12,
                **MODES[mode],
                **self.APART,
            )
            teams.randomize(trainer.modules)
            begin = trainer.algorithm.begin_rollout
            trainer.algorithm.begin_rollout = lambda *args, begin=begin: begin(*args) | {"noise": None}
            teams.script(trainer)
            if workflow is SameAsked:  # the prompt does not tell whose reply it is
                lengths = iter([[[20 + "abc".index(name), 30 + g] for g in (0, 1) for name in names] * 2])
                trainer._generate_single_turn = lambda prompt_ids, *rest: (next(lengths), None)
            trainer.train()
            return trainer, watch.gradients[0]

        (one, expected), (two, gradients) = run("abc"), run("cab")
        for name in ("loss", "latent/loss", "latent/inference_loss", "latent/distance", "critic/value_loss"):
            # The latent loss is a difference of terms of about 0.1, which may be much smaller than they are
            assert teams.logged(two, name) == pytest.approx(teams.logged(one, name), rel=1e-4, abs=1e-6), name
        for agent in "abc":
            name = f"agents/{agent}/gradient_share"
            assert teams.logged(two, name) == pytest.approx(teams.logged(one, name), rel=1e-3)
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


def watched_latents(trainer):
    """Lists of the latents that the decoder was given, in generation and in updates, one row each."""
    seen = {"rollout": [], "update": []}

    def keep(module, args):
        kind = "update" if torch.is_grad_enabled() else "rollout"
        seen[kind].append(args[0].detach().clone())

    trainer.modules.core_decoder.register_forward_pre_hook(keep)
    return seen


class TestLatents:
    @pytest.mark.parametrize("scope", ["observation", "agent"])
    def test_depend_on_the_role_and_in_observation_scope_on_the_prompt(self, tiny_model, tmp_path, scope):
        trainer = teams.make(
            tiny_model, tmp_path, SHPPOTrainer, workflow=SameAsked(), latent_scope=scope, per_device_train_batch_size=8
        )
        output = teams.generation_batch(trainer)
        mu, sigma = trainer.modules.latent_net(output["team_obs"])
        # Rows: problem, agent, generation. Agents are asked the same, and differ
        assert (mu[:, 0] - mu[:, 1]).abs().amax(-1).min() > 1e-2
        different_problems = (mu[0, 0] - mu[4, 0]).abs().max()
        assert (different_problems > 1e-3) == (scope == "observation")
        own = torch.arange(8) // 2 % 2
        expected = (mu + sigma * output["team_eps"])[torch.arange(8), own]
        torch.testing.assert_close(output["z"], expected)
        noise = output["team_eps"][torch.arange(8), own]
        if scope == "agent":  # one draw per agent
            assert len({tuple(row) for row in output["z"].tolist()}) == 2
            assert torch.equal(noise, noise[own * 2])
        else:
            assert len({tuple(row) for row in noise.tolist()}) == 8

    def test_a_long_prompt_does_not_drown_the_role(self, tiny_model, tmp_path):
        data = teams.Dataset.from_dict({"prompt": ["def f(x):", "def f(x):" + " x = x + 1;" * 20]})
        trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, workflow=SameAsked(), data=data)
        observations = teams.generation_batch(trainer)["team_obs"]
        size = observations.size(-1) // 2
        difference = observations[:, 0, :size] - observations[:, 1, :size]
        assert difference.abs().amax(-1).min() > 1e-3
        torch.testing.assert_close(difference, difference[:1].expand_as(difference))

    def test_are_drawn_anew_for_every_generation_batch_and_are_the_mean_in_evaluation(self, tiny_model, tmp_path):
        for scope in ("observation", "agent"):
            trainer = teams.make(
                tiny_model,
                tmp_path,
                SHPPOTrainer,
                workflow=teams.Pair(),
                latent_scope=scope,
                max_steps=3,
                latent_learning_rate=0.0,
                data=teams.dataset(2),
                per_device_train_batch_size=8,
                eval_dataset=teams.dataset(2),
            )
            stored = []
            generate = trainer._generate_and_score_completions
            trainer._generate_and_score_completions = lambda rows, s=stored, g=generate: s.append(g(rows)) or s[-1]
            trainer.train()
            eps = [batch["team_eps"] for batch in stored]
            assert not any(torch.equal(eps[i], eps[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
            trainer.evaluate()
            batch = stored[-1]
            assert not batch["team_eps"].any()
            mu, _ = trainer.modules.latent_net(batch["team_obs"])
            torch.testing.assert_close(batch["z"], mu[torch.arange(len(mu)), batch["agent"]])

    def test_latent_losses_weigh_every_team_turn_the_same(self, tiny_model, tmp_path, monkeypatch):
        """However many rows carry it, and over micro-batches."""
        monkeypatch.setattr(modules, "latent_loss", lambda value, *args: torch.zeros_like(value))
        for size, steps in ((10, 1), (1, 10)):
            trainer = teams.make(
                tiny_model,
                tmp_path,
                SHPPOTrainer,
                reward=lambda completions, **kwargs: [2.0 if "more" in p else 0.0 for p in kwargs["prompts"]],
                workflow=teams.Short(),
                data=teams.Dataset.from_dict({"prompt": ["def f(x):", "more f(x):"]}),
                num_generations=1,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
                vf_coef=0.0,
            )
            for parameter in trainer.modules.inference_net.parameters():
                torch.nn.init.zeros_(parameter)
            teams.hold_critic(trainer)
            teams.change_credit(trainer, teams.without_advantages)
            trainer.train()
            # Returns of the three team-turns: 0, 4 (two rewards of 2) and 2
            assert teams.logged(trainer, "loss") == pytest.approx([(0 + 16 + 4) / 3], rel=1e-5)

    def test_the_loss_of_the_network_that_judges_them_does_not_depend_on_the_size_of_rewards(
        self, tiny_model, tmp_path
    ):
        def losses(scale, shift):
            def reward(completions, **kwargs):
                return [scale * value + shift for value in teams.letters(completions)]

            trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, reward, workflow=teams.Pair(), max_steps=3)
            teams.script(trainer)
            trainer.train()
            returns = trainer.modules.inference_net.returns
            assert returns.batches == 3 and returns.mean / scale == pytest.approx(shift / scale, abs=1)
            return teams.logged(trainer, "latent/inference_loss")

        small = losses(1.0, 0.0)
        assert 0.5 < small[0] < 2  # it begins at the mean return
        assert losses(40.0, 35.0) == pytest.approx(small, rel=0.1)


class TestTeam:
    def test_how_differently_agents_behave_is_logged(self, tiny_model, tmp_path):
        trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, workflow=SameAsked(), max_steps=2)
        trainer.train()
        names = ("latent/mu_norm", "latent/sigma", "latent/distance", "latent/entropy", "latent/inference_loss")
        for name in (*names, "latent/core_norm", "latent/behaviour_distance"):
            assert len(teams.logged(trainer, name)) == 2, name
        assert teams.logged(trainer, "latent/core_norm")[0] == 0 < teams.logged(trainer, "latent/core_norm")[1]

    @pytest.mark.parametrize("others", [(), (Slot("b"),)])
    def test_latents_are_compared_in_turns_with_several_agents(self, tiny_model, tmp_path, others):
        """And no distance is logged where each agent has a turn of its own."""

        class ByTurns(teams.Pair):
            slots = (Slot("a"), *others, Slot("b", turn=1))

            def play(self, problem):
                yield {slot.agent: f"{problem['prompt']} {slot.agent}" for slot in self.slots if slot.turn == 0}
                yield {"b": f"{problem['prompt']} again"}

            def solution(self, problem, replies):
                return "".join(replies.values())

        trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, workflow=ByTurns(num_turns=2))
        teams.randomize(trainer.modules, scale=0.5)
        trainer.train()
        assert len(teams.logged(trainer, "latent/core_norm")) == 1
        distances = teams.logged(trainer, "latent/distance")
        assert len(distances) == bool(others) and all(distance > 0.01 for distance in distances)

    @pytest.mark.parametrize("masked", [{0}, {0, 1, 2, 3}])
    def test_agents_are_compared_on_rows_that_count(self, tiny_model, tmp_path, masked):
        """And nothing is logged where no row does."""

        def reward(completions, **kwargs):
            return [None if e in masked else float(e) for e in range(len(completions))]

        trainer = teams.make(
            tiny_model, tmp_path, SHPPOTrainer, reward=reward, workflow=SameAsked(), init_core_scale=3.0
        )
        teams.randomize(trainer.modules, scale=0.5)
        trainer.train()
        diversity = teams.logged(trainer, "latent/behaviour_distance")
        assert diversity == [] if len(masked) == 4 else diversity[0] > 0.01

    def test_a_row_is_compared_with_all_other_agents_of_its_turn_that_read_its_prompt(self, tiny_model, tmp_path):
        trainer = teams.make(
            tiny_model, tmp_path, SHPPOTrainer, workflow=SameAsked("abc"), per_device_train_batch_size=24
        )
        output = teams.generation_batch(trainer)
        z, other = output["z"].tolist(), output["other_z"].tolist()
        # Rows: problem, agent, generation
        found = {}
        for row, latent in enumerate(other):
            found.setdefault(row // 2 % 3, set()).add(z.index(latent) // 2 % 3)
            assert (z.index(latent) // 6, z.index(latent) % 2) == (row // 6, row % 2)
        assert found == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}

    @pytest.mark.parametrize("steps", [1, 2, 16])
    def test_one_of_eight_rows_is_compared_whatever_the_micro_batch(self, tiny_model, tmp_path, steps):
        """
        Here two: the first ones, or the first of both halves. The distance is that of the log-probabilities of their replies with
        both latents, in which tokens count equally: one of the replies is longer than the other.
        """
        losses = []
        for coefficient in (0.0, 1.0):
            trainer = teams.make(
                tiny_model,
                tmp_path / str(coefficient),
                SHPPOTrainer,
                workflow=SameAsked(),
                per_device_train_batch_size=16 // steps,
                gradient_accumulation_steps=steps,
                behaviour_distance_coef=coefficient,
            )
            teams.script(trainer)
            for module in (trainer.modules.latent_net, trainer.modules.core_decoder):
                teams.randomize(module, scale=0.5)
            update, micro_batches, expected, lengths = trainer._compute_loss, [], [], []

            def compute_loss(model, inputs):
                compared = 2 // steps if steps < 16 else int(len(micro_batches) % 8 == 0)  # noqa: B023
                micro_batches.append(inputs)  # noqa: B023
                for row in range(compared):
                    mask = inputs["completion_mask"][row].bool()
                    expected.extend(distances(trainer, inputs, row)[mask].tolist())  # noqa: B023
                    lengths.append(int(mask.sum()))  # noqa: B023
                return update(model, inputs)  # noqa: B023

            trainer._compute_loss = compute_loss
            trainer.train()
            losses += teams.logged(trainer, "loss")
        mean = sum(expected) / len(expected)
        assert teams.logged(trainer, "latent/behaviour_distance") == [pytest.approx(mean, rel=1e-3)]
        assert mean > 0.01 and lengths[0] != lengths[1]
        tokens = float(micro_batches[0]["num_items_in_batch"]) / 8  # as many are compared on average
        assert losses[0] - losses[1] == pytest.approx(sum(expected) / tokens, rel=1e-2)

    def test_agents_with_prompts_of_their_own_are_not_compared(self, tiny_model, tmp_path):
        trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, workflow=teams.Pair())
        seen = watched_latents(trainer)
        trainer.train()
        assert [len(z) for z in seen["update"]] == [8]
        assert not teams.logged(trainer, "latent/behaviour_distance")


class TestSeparate:
    @pytest.fixture(scope="class")
    def trained(self, tiny_model, tmp_path_factory):
        path = tmp_path_factory.mktemp("separate")
        trainer = teams.make(
            tiny_model, path, SHPPOTrainer, workflow=teams.Pair("abc"), parameter_sharing="separate",
            per_device_train_batch_size=6, max_steps=2,
        )  # fmt: skip
        trainer.train()
        trainer.save_model()
        return trainer

    def test_every_agent_is_saved_as_an_ordinary_adapter(self, tiny_model, trained):
        ids = torch.randint(5, 300, (1, 9), generator=torch.Generator().manual_seed(0))
        logits = []
        for index, agent in enumerate("abc"):
            base = AutoModelForCausalLM.from_pretrained(tiny_model)
            adapter = PeftModel.from_pretrained(base, f"{trained.args.output_dir}/agents/{agent}")
            assert adapter.peft_config["default"].r == 4 and adapter.peft_config["default"].lora_alpha == 8
            with torch.no_grad():
                expected = adapter.eval()(ids).logits
                with trained.modules.rows(ForwardContext(agent=torch.tensor([index]))):
                    live = trained.model.eval()(ids).logits
            torch.testing.assert_close(live, expected, rtol=1e-5, atol=1e-5)
            logits.append(expected)
        assert (logits[0] - logits[1]).abs().max() > 1e-3
