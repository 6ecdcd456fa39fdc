"""Tools inside a reply, in training."""

import pytest
import teams
import torch
from datasets import Dataset
from tool_model import CHATS, add, call, multiply, recite_texts
from trl import GRPOConfig, GRPOTrainer

from marcog_trl import Agent, Slot, Workflow
from marcog_trl.trainers import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer


TRAINERS = [MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer]
ANSWERS = (
    [call(a=3, b=4), call(a=3, c=4), "I know no tool.<|im_end|>"],
    ["12<|im_end|>", call(a=1, b=4)],
    ["It is 4, I think.<|im_end|>"],
)


def length_reward(completions, **kwargs):
    return [float(len(completion[-1]["content"])) for completion in completions]


def make(model, path, **options):
    options = {"max_completion_length": 200, "num_generations": 3, "per_device_train_batch_size": 3, **options}
    options = {"trainer": MultiAgentGRPOTrainer, "reward": length_reward, "data": CHATS, **options}
    return teams.make(model, path, **options)


class TestSingle:
    @pytest.mark.parametrize("tool", [multiply, add])
    def test_is_trls_loop(self, tool_model, tmp_path, tool):
        seen = []

        def reward(completions, **kwargs):
            seen.append(completions)
            return length_reward(completions)

        ours = make(tool_model, tmp_path, tools=[tool], reward=reward, scale_rewards="group")
        config = ours.args.to_dict()
        config = {
            name: config[name]
            for name in GRPOConfig.__dataclass_fields__
            if name in config and name != "accelerator_config"
        }
        config |= {"use_cpu": True, "generation_batch_size": None}
        theirs = GRPOTrainer(
            tool_model, reward, GRPOConfig(**config), CHATS, peft_config=teams.lora_config(), tools=[tool]
        )
        outputs, asked = [], []
        for trainer in (theirs, ours):
            answers = [[text.replace("multiply", tool.__name__) for text in texts] for texts in ANSWERS]
            asked.append(recite_texts(trainer, *answers))
            outputs.append(teams.generation_batch(trainer))
        assert asked[0] == asked[1] and seen[0] == seen[1]
        for name in (
            "prompt_ids",
            "completion_ids",
            "completion_mask",
            "tool_mask",
            "advantages",
            "num_items_in_batch",
        ):
            torch.testing.assert_close(outputs[1][name], outputs[0][name])
        assert 0 < outputs[1]["tool_mask"].sum() < outputs[1]["tool_mask"].numel()
        for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "reward"):
            assert ours._metrics["train"][name] == pytest.approx(theirs._metrics["train"][name])


class Counter:
    """An environment with a tool, which scores itself."""

    def reset(self, **kwargs):
        self.count, self.given = 0, kwargs
        return " Count."

    def increment(self, step: int) -> int:
        """
        Increments the counter.

        Args:
            step: By how much.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


class Echo:
    def reset(self, prompt=None):
        self.given = prompt
        return "Echo."

    def shout(self, text: str) -> str:
        """
        Shouts a text.

        Args:
            text: The text.
        """
        return text.upper()


class TestEnvironments:
    @pytest.mark.parametrize("kind", TRAINERS)
    def test_every_row_has_one_of_its_own(self, tool_model, tmp_path, kind):
        trainer = make(tool_model, tmp_path, trainer=kind, environment_factory=Counter, reward=None)
        increment = [call("increment", step=step) for step in (1, 2)]
        asked = recite_texts(trainer, [*increment, "No.<|im_end|>"], ["Done.<|im_end|>"] * 2)
        output = teams.generation_batch(trainer)
        assert [environment.count for environment in trainer.environments] == [1, 2, 0]
        assert trainer.environments[0].given["prompt"] == CHATS[0]["prompt"]
        assert "What is 0 * 4? Count.<|im_end|>" in asked[0][0] and '"name": "increment"' in asked[0][0]
        assert output["tool_mask"].min() == 0
        assert trainer.reward_func_names == ["Counter"]
        assert trainer._metrics["train"]["rewards/Counter/mean"] == [1.0]
        assert trainer._metrics["train"]["tools/call_frequency"] == [pytest.approx(2 / 3)]
        with pytest.raises(ValueError, match=r"Use trainer.evaluate\(\)"):
            trainer.team.solve({"prompt": CHATS[0]["prompt"]})

    def test_rows_choose_one_by_name_and_need_no_prompt(self, tool_model, tmp_path):
        trainer = make(
            tool_model,
            tmp_path,
            environment_factory={"counter": Counter, "echo": Echo},
            data=Dataset.from_dict({"environment": ["counter", "echo"]}),
            num_generations=2,
            per_device_train_batch_size=4,
        )
        asked = recite_texts(
            trainer,
            [call("increment", step=1), "No.<|im_end|>", call("shout", text="hi"), call("increment", step=1)],
            ["Done.<|im_end|>"] * 3,
        )
        teams.generation_batch(trainer)
        assert trainer.environments[2].given is None
        assert '"increment"' in asked[0][0] and '"shout"' not in asked[0][0] and '"shout"' in asked[0][2]
        results = [prompt.partition("<tool_response>\n")[2].partition("\n<")[0] for prompt in asked[1]]
        assert results == ["1", "HI", "{'error': 'Tool increment not found.'}"]

    @pytest.mark.parametrize("observation", ["Echo.", None])
    def test_may_give_all_the_data(self, tool_model, tmp_path, monkeypatch, observation):
        """If they observe nothing either, prompts are blank."""
        monkeypatch.setattr(Echo, "reset", lambda self, prompt=None: observation)
        trainer = make(tool_model, tmp_path, environment_factory=Echo, data=None, max_steps=2)
        trainer.train()
        assert trainer.state.global_step == 2

    @pytest.mark.parametrize("options", [{"workflow": teams.Pair()}, {"num_turns": 2}])
    def test_need_one_reply_per_episode(self, tmp_path, options):
        with pytest.raises(ValueError, match="Use workflow='single' and num_turns=1"):
            make("nobody/no-such-model", tmp_path, environment_factory=Echo, **options)


class Duo(Workflow):
    """A planner without tools and a coder with one speak at the same moment. Then the planner reads what the coder said."""

    agents = (Agent("planner", "Plan."), Agent("coder", "Calculate.", tools=[multiply]))
    slots = (Slot("planner"), Slot("coder"), Slot("planner", act=1))

    def play(self, problem):
        replies = yield {agent.name: self.ask(agent.name, problem) for agent in self.agents}
        last = yield {"planner": self.ask("planner", problem, replies["coder"])}
        return last["planner"]


DUO = {"workflow": Duo(), "num_generations": 2, "per_device_train_batch_size": 6}
FIRST = ["Plan 1.<|im_end|>", call(a=3, b=4), "Plan 2.<|im_end|>", "No.<|im_end|>"]
PLAYS = FIRST, ["It is 12.<|im_end|>"], ["Yes.<|im_end|>", "Certainly not.<|im_end|>"]


class TestTeams:
    @pytest.mark.parametrize("kind", TRAINERS)
    def test_only_agents_with_tools_have_them_in_their_rows(self, tool_model, tmp_path, kind):
        trainer = make(tool_model, tmp_path, trainer=kind, **DUO)
        asked = recite_texts(trainer, *PLAYS)
        output = teams.generation_batch(trainer)
        assert [len(prompts) for prompts in asked] == [4, 1, 2]
        assert ["# Tools" in prompt for prompt in asked[0]] == [False, True, False, True]
        # The next agent reads the answer, not the calls
        assert asked[2][0].endswith("What is 0 * 4?\n\nIt is 12.<|im_end|>\n<|im_start|>assistant\n")
        texts = [trainer._tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(
            output["completion_ids"], output["completion_mask"], strict=True
        )]  # fmt: skip
        written = [trainer._tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(
            output["completion_ids"], output["completion_mask"] * output["tool_mask"], strict=True
        )]  # fmt: skip
        rows = ["Plan 1.", "Plan 2.", call(a=3, b=4) + "It is 12.", "No.", "Yes.", "Certainly not."]
        assert written == [f"{text}<|im_end|>" for text in rows]
        assert "<tool_response>\n12\n</tool_response>" in texts[2]
        assert [text for i, text in enumerate(texts) if i != 2] == [text for i, text in enumerate(written) if i != 2]
        assert output["num_items_in_batch"] == (output["completion_mask"] * output["tool_mask"]).sum()
        metrics = trainer._metrics["train"]
        assert metrics["agents/coder/tools/call_frequency"] == [0.5]
        assert metrics["agents/coder/tools/failure_frequency"] == [0.0]
        assert "agents/planner/tools/call_frequency" not in metrics
        size = sum(len(trainer._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in written[2:4])
        assert metrics["agents/coder/completion_length"] == [size / 2]

    @pytest.mark.parametrize("kind", TRAINERS)
    def test_results_have_no_gradient(self, tool_model, tmp_path, kind):
        options = {"critic_backprop": True} if kind is not MultiAgentGRPOTrainer else {}
        trainer = make(tool_model, tmp_path, trainer=kind, beta=0.1, **DUO, **options)
        recite_texts(trainer, *PLAYS)
        output = teams.generation_batch(trainer)
        found = []

        def watch(module, args, states):
            if states[0].requires_grad:
                states[0].register_hook(found.append)

        handle = trainer._causal_lm.get_decoder().register_forward_hook(watch)
        trainer.current_gradient_accumulation_steps = 1
        trainer._compute_loss(trainer.model, output).backward()
        handle.remove()
        [gradient] = found
        # The state before a token decides about it
        before = gradient[:, -output["completion_ids"].size(1) - 1 : -1].abs().amax(-1)
        mask = (output["completion_mask"] * output["tool_mask"]).bool()
        assert before[~mask].max() == 0
        assert (before[mask] > 0).all()


class TestTruncation:
    def test_results_without_room_are_dropped_and_count_as_failures(self, tool_model, tmp_path):
        trainer = make(tool_model, tmp_path, tools=[multiply], max_completion_length=40)
        asked = recite_texts(trainer, [call(a=3, b=4), call(a=3, b=4), "No.<|im_end|>"])
        output = teams.generation_batch(trainer)
        assert len(asked) == 1  # the result would be longer than the rest of the reply
        assert output["tool_mask"].all()
        assert trainer._metrics["train"]["tools/call_frequency"] == [pytest.approx(2 / 3)]
        assert trainer._metrics["train"]["tools/failure_frequency"] == [1.0]

    def test_a_cut_reply_is_masked_as_a_whole(self, tool_model, tmp_path):
        trainer = make(
            tool_model, tmp_path, tools=[multiply], max_completion_length=60, mask_truncated_completions=True
        )
        long = "It is twelve, which is three times four, and so on, and so on, and so on."
        recite_texts(trainer, [call(a=3, b=4), call(a=3, b=4), "No.<|im_end|>"], ["12<|im_end|>", long])
        output = teams.generation_batch(trainer)
        assert output["completion_ids"].size(1) == 60
        live = (output["completion_mask"] * output["tool_mask"]).any(1)
        assert live.tolist() == [True, False, True]
        assert output["num_items_in_batch"] == (output["completion_mask"] * output["tool_mask"]).sum()

    def test_calls_are_limited(self, tool_model, tmp_path):
        trainer = make(tool_model, tmp_path, tools=[multiply], max_tool_calling_iterations=1)
        asked = recite_texts(trainer, [call(a=1, b=2)] * 3, [call(a=1, b=2)] * 3)
        teams.generation_batch(trainer)
        assert len(asked) == 2
        with pytest.raises(ValueError, match="max_tool_calling_iterations=-1 must be at least 0"):
            make(tool_model, tmp_path, tools=[multiply], max_tool_calling_iterations=-1)

    @pytest.mark.parametrize("options", [{"tools": [multiply]}, {"environment_factory": Echo}])
    def test_vllm_is_refused(self, tmp_path, options):
        with pytest.raises(ValueError, match=r"use_vllm=True does not support tools and environments"):
            make("nobody/no-such-model", tmp_path, use_vllm=True, **options)

    def test_continuous_batching_calls_tools(self, taught_model, tmp_path):
        trainer = make(
            taught_model,
            tmp_path,
            tools=[multiply],
            lora={"init_lora_weights": True},
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config={"num_blocks": 64, "max_batch_tokens": 256},
            temperature=0.1,
            max_completion_length=100,
        )
        teams.generation_batch(trainer)
        assert trainer._metrics["train"]["tools/call_frequency"] == [1.0]
        assert trainer._metrics["train"]["tools/failure_frequency"] == [0.0]


class TestCriticAndLatents:
    @pytest.mark.parametrize("sharing", ["latent", "separate"])
    def test_agents_stay_the_same_after_a_result(self, tool_model, tmp_path, sharing):
        trainer = make(tool_model, tmp_path, trainer=SHPPOTrainer, parameter_sharing=sharing, **DUO)
        recite_texts(trainer, *PLAYS)
        generate, contexts = trainer._generate_single_turn, []

        def watched(*args, **options):
            context = trainer.modules.context
            contexts.append(context.z if sharing == "latent" else context.agent)
            return generate(*args, **options)

        trainer._generate_single_turn = watched
        teams.generation_batch(trainer)
        first, second, _ = contexts
        assert torch.equal(second, first[1:2])  # the coder of the first episode
        assert not torch.equal(first[0], first[1])


def test_a_resumed_run_continues_the_uninterrupted_one(taught_model, tmp_path):
    options = {"tools": [multiply], "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options |= {"lora": {"init_lora_weights": True}, "max_completion_length": 80, "learning_rate": 1e-3}
    whole = make(taught_model, tmp_path / "whole", **options)
    whole.train()
    assert sum(teams.logged(whole, "tools/call_frequency")) > 0
    resumed = make(taught_model, tmp_path / "whole", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name, tensor in teams.trainable(whole).items():
        torch.testing.assert_close(teams.trainable(resumed)[name], tensor)
    other = make(taught_model, tmp_path / "whole", **options | {"tools": [add]})
    with pytest.raises(ValueError, match="Use a checkpoint of the same team"):
        other.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
