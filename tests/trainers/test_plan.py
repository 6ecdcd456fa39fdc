"""Plans are held against what trainers take: the tracker that a plan is made with also watches a real run."""

import gc
from dataclasses import replace

import pytest
import teams
import torch
from transformers import AutoTokenizer, BitsAndBytesConfig, Qwen2Config
from trl.kernels import chunked_logprob
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOConfig, SHPPOTrainer
from marcog_trl.rollout.prompts import measure_prompts, widest_stage
from marcog_trl.trainers.data import fit_batches
from marcog_trl.trainers.memory import MemoryTracker, TritonHead
from marcog_trl.trainers.plan import (
    ADAPTER,
    CACHE,
    GENERATION,
    GIB,
    GRADIENTS,
    OPTIMIZER,
    REFERENCE,
    UPDATE,
    WEIGHTS,
    Machine,
    Setup,
)


FULL = {"generation": {"min_new_tokens": 12}, "max_completion_length": 12, "max_steps": 2}
WHOLE = {"full_finetuning": True, "peft_config": None, "learning_rate": 1e-3}


class SamePrompt(teams.Pair):
    """Prompts of one length, so that no row is padded."""

    def play(self, problem):
        for _ in range(self.num_turns):
            yield {agent.name: problem["prompt"] for agent in self.agents}


def watching(trainer):
    """A tracker that knows what the trainer holds."""
    tracker = MemoryTracker()
    for model in (trainer.model, trainer.ref_model):
        tracker.add([] if model is None else [*model.parameters(), *model.buffers()])
    return tracker


class TestAgainstRuns:
    @pytest.mark.parametrize(
        ("trainer_class", "options"),
        [
            (MultiAgentPPOTrainer, {}),
            (MultiAgentPPOTrainer, {"gradient_accumulation_steps": 2}),
            (MultiAgentGRPOTrainer, {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}),
            (SHPPOTrainer, {"gradient_checkpointing": True, "beta": 0.02}),
            (SHPPOTrainer, {"parameter_sharing": "separate", "per_device_train_batch_size": 2}),
            (SHPPOTrainer, {"latent_distance": "minmax", "policy_gradient_to_latent": True, "critic": "agent"}),
            (MultiAgentPPOTrainer, WHOLE),
            (MultiAgentPPOTrainer, {**WHOLE, "beta": 0.02, "gradient_accumulation_steps": 2}),
            (MultiAgentPPOTrainer, {**WHOLE, "bf16": True}),
        ],
        ids=str,
    )
    def test_peak(self, tiny_model, tmp_path, trainer_class, options):
        options = FULL | {"workflow": SamePrompt(), "data": teams.dataset(8), **options}
        trainer = teams.make(tiny_model, tmp_path, trainer_class, **options)
        plan = trainer.plan()
        gc.collect()
        with watching(trainer) as tracker:
            trainer.train()
        assert plan.peak == pytest.approx(tracker.peak, rel=0.15)
        assert (REFERENCE in plan.memory[UPDATE]) == (trainer.ref_model is not None)
        assert (ADAPTER in plan.memory[UPDATE]) == (options.get("peft_config", 0) is not None)

    def test_generation_of_many_rows(self, tiny_model, tmp_path):
        """Long replies to few agents at a time, and small micro-batches: generation takes the most."""
        options = FULL | {"max_completion_length": 300, "generation": {"min_new_tokens": 300}, "max_steps": 1}
        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=SamePrompt(), **options, generation_batch_size=32,
            data=teams.dataset(8).to_iterable_dataset(), per_device_train_batch_size=1, gradient_checkpointing=True,
        )  # fmt: skip
        memory = trainer.plan().memory[GENERATION]
        with watching(trainer) as tracker:
            trainer.team.play([{"prompt": "def f0(x):"}] * 16)  # two replies each
        assert memory[CACHE] > sum(memory.values()) / 2
        before = memory[OPTIMIZER]  # which is there from the second step on
        assert sum(memory.values()) - before == pytest.approx(tracker.peak, rel=0.15)

    def test_quantised_weights(self, tiny_model, tmp_path):
        pytest.importorskip("bitsandbytes")
        stored = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentPPOTrainer, workflow=SamePrompt(),
            quantization_config=BitsAndBytesConfig(**stored), **FULL,
        )  # fmt: skip
        memory = trainer.plan().memory[UPDATE]
        base = trainer.model.get_base_model()
        frozen = [p for p in base.parameters() if not p.requires_grad]
        states = [p.quant_state.absmax.nbytes for p in frozen if getattr(p, "quant_state", None) is not None]
        assert len(states) == 14
        held = sum(p.nbytes for p in frozen) + sum(states) + sum(b.nbytes for b in base.buffers())
        assert memory[WEIGHTS] == pytest.approx(held, rel=0.01)
        adapter = [p for name, p in base.named_parameters() if "lora_" in name]
        assert memory[ADAPTER] == sum(p.nbytes for p in adapter) and {p.dtype for p in adapter} == {torch.bfloat16}

    def test_head_of_a_gpu(self, monkeypatch):
        """TRL's own function with kernels that make no tensors, as Triton's."""
        hidden = torch.zeros(300, 16, requires_grad=True)
        weight = torch.zeros(_CHUNKED_LOGPROB_CHUNK_SIZE + 10, 16)
        targets = torch.zeros(300, dtype=torch.long)
        for name in ("_forward_tile", "_backward_tile"):
            monkeypatch.setattr(chunked_logprob, name, lambda *args, **options: None)

        def peak(head):
            with MemoryTracker() as tracker:
                head().sum().backward()
            hidden.grad = None
            return tracker.peak

        whole = lambda: chunked_logprob.ChunkedLogProbFunction.apply(  # noqa: E731
            hidden, weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",)
        )[0]
        assert peak(lambda: TritonHead.apply(hidden, weight)) == pytest.approx(peak(whole), rel=0.01)


def setup(
    machine=None, trainer=SHPPOTrainer, config=None, workflow=None, quantization=None, prompt_tokens=20, **options
):
    """A small model that exists nowhere."""
    workflow = workflow or teams.Pair()
    made = {SHPPOTrainer: SHPPOConfig, MultiAgentGRPOTrainer: MultiAgentGRPOConfig}[trainer](
        "out", report_to="none", use_cpu=True, num_turns=workflow.num_turns, **{"bf16": False, **options}
    )
    algorithm = trainer.algorithm_class(made, workflow)
    fit_batches(made, algorithm.tree(training=True), algorithm.tree(training=False))
    config = config or Qwen2Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    width = widest_stage(workflow)
    return Setup(
        algorithm, config, teams.lora_config(), machine or Machine(), prompt_tokens, width, False, quantization
    )


def test_what_a_rollout_has():
    plan = setup(per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2).plan()
    # 4 generations x 2 agents
    assert plan.rollout == {"problems": 1, "rows": 8, "tokens": 8 * (20 + 512), "evaluations": 4}
    assert plan.steps_per_rollout == 1 and plan.fits is None
    tree = {"turn_tree": True, "num_generations": 2, "per_device_train_batch_size": 4, "num_iterations": 2}
    plan = setup(trainer=MultiAgentGRPOTrainer, workflow=teams.Pair(num_turns=2), **tree).plan()
    # 2 agents x 2 generations at the root and at each of its 2 children
    assert plan.rollout == {"problems": 1, "rows": 12, "tokens": 12 * 532, "evaluations": 2 + 4}
    assert plan.steps_per_rollout == 6


def test_rows_that_speak_at_once():
    chain = setup(workflow=teams.Chain(("a", "b", "c")), per_device_train_batch_size=12)
    assert chain.speaking == 12  # from the slots alone, they might
    assert replace(chain, width=1).speaking == 4
    tree = {"turn_tree": True, "num_generations": 2, "per_device_train_batch_size": 12}
    tree = setup(trainer=MultiAgentGRPOTrainer, workflow=teams.Pair(num_turns=2), **tree)
    assert tree.speaking == 8  # 2 agents x 2 generations at 2 nodes


class TestSharing:
    def parts(self, *args, **options):
        plan = setup(Machine(*args), **{"per_device_train_batch_size": 8, **options}).plan()
        return plan, plan.memory[UPDATE]

    def test_processes(self):
        one, alone = self.parts()
        two, ddp = self.parts(None, True, 2)
        assert two.rollout["rows"] == 2 * one.rollout["rows"]
        assert ddp.pop("buckets of DDP") == 4 * one.trained and ddp == alone

    def test_zero(self):
        one, alone = self.parts()
        _, zero2 = self.parts(None, True, 4, 2)
        _, zero3 = self.parts(None, True, 4, 3)
        assert zero2[OPTIMIZER] == pytest.approx((alone[OPTIMIZER] + 4 * one.trained) / 4, rel=0.01)
        assert zero2[GRADIENTS] == one.trained and zero2["reduce bucket"] == 4 * 5e8
        assert zero2[WEIGHTS] == alone[WEIGHTS] and zero3[WEIGHTS] == alone[WEIGHTS] // 4
        assert zero3["gathered weights"] == alone[WEIGHTS]
        plan, parts = self.parts(None, True, 1, 2, bf16=True)  # which trains in bfloat16
        assert parts[ADAPTER] + parts["critic and latent networks"] == pytest.approx(2 * plan.trained, rel=0.01)
        assert parts[OPTIMIZER] == pytest.approx(12 * plan.trained, rel=0.01)

    def test_vllm(self):
        vllm = {"use_vllm": True, "latent_scope": "agent", "vllm_gpu_memory_utilization": 0.25}
        plan, parts = self.parts(8.0, **vllm)
        assert parts["vLLM"] == plan.memory[GENERATION]["vLLM"] == 2 * GIB
        assert CACHE not in plan.memory[GENERATION] and "vLLM" in plan.notes[0]
        plan, parts = self.parts(8.0, use_vllm=True, vllm_mode="server", parameter_sharing="shared")
        assert "vLLM" not in parts and "server" in plan.notes[0]

    @pytest.mark.parametrize(
        ("numbers", "named"),
        [((0,), "gpu_memory=0"), ((24, True, 0), "num_processes=0"), ((24, True, 1, 1), "zero_stage=1")],
    )
    def test_refuses(self, numbers, named):
        with pytest.raises(ValueError, match=f"^{named} "):
            Machine(*numbers)


class TestWhatToChange:
    # A head and a cache that are large beside the weights
    CONFIG = Qwen2Config(
        vocab_size=5000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    LARGE = {"config": CONFIG, "model_init_kwargs": {"dtype": "bfloat16"}, "bf16": True, "prompt_tokens": 400}

    def plan(self, gib, **options):
        # What CUDA and gaps take comes on top
        return setup(Machine((gib + 0.6) / 0.95), **self.LARGE | options).plan()

    def test_smaller_micro_batches(self):
        large = {"per_device_train_batch_size": 64, "num_generations": 8, "gradient_checkpointing": False}
        whole = self.plan(100, **large)
        assert whole.fits and whole.changes == []
        plan = self.plan(whole.peak / GIB / 4, **large)
        assert plan.fits is False
        first, second = (change.settings for change in plan.changes[:2])
        assert first == {"gradient_checkpointing": True}
        assert second["per_device_train_batch_size"] * second["gradient_accumulation_steps"] == 64
        peaks = [plan.peak, *(change.peak for change in plan.changes)]
        assert peaks == sorted(peaks, reverse=True) and peaks[-1] <= whole.peak / 4
        # They are right: a run with these settings is planned to take as much
        assert self.plan(100, **large | first | second).peak == pytest.approx(plan.changes[1].peak, rel=0.02)

    def test_fewer_problems(self):
        many = {"per_device_train_batch_size": 2, "generation_batch_size": 64, "max_completion_length": 600}
        whole = self.plan(100, **many)
        plan = self.plan(whole.peak / GIB / 2, **many)
        assert plan.changes[0].settings.keys() == {"generation_batch_size"}
        rows = plan.changes[0].settings["generation_batch_size"]
        assert rows % 8 == 0 and rows < 64 and plan.changes[-1].peak <= whole.peak / 2

    def test_says_where_nothing_helps(self):
        plan = self.plan(0.001, per_device_train_batch_size=8, model_init_kwargs={}, bf16=False)
        assert plan.changes[0].settings == {"dtype": "bfloat16", "bf16": True}
        assert plan.fits is False and plan.changes[-1].settings == {"load_in_4bit": True}
        assert plan.changes[-1].peak > 0.001 * GIB


def test_rehearsal(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    problems = [{"prompt": "def f(x):"}, {"prompt": "def longer(x, y, z):"}]
    alone, width, alike = measure_prompts(teams.Pair(), problems, tokenizer, 50)
    longest = max(len(tokenizer(f"def longer(x, y, z): {name}0")["input_ids"]) for name in "ab")
    assert width == 2 and alone == longest and not alike
    assert measure_prompts(SamePrompt(), problems, tokenizer, 50)[1:] == (2, True)
    # The second agent reads the first one's reply
    after, width, alike = measure_prompts(teams.Chain(), problems, tokenizer, 50)
    assert width == 1 and not alike and 40 < after - alone < 150


def test_optimizers():
    adamw, sgd, other = (
        setup(optim=name, per_device_train_batch_size=8).plan() for name in ("adamw_torch", "sgd", "adafactor")
    )
    assert adamw.memory[UPDATE][OPTIMIZER] == 8 * adamw.trained
    assert OPTIMIZER not in sgd.memory[UPDATE] and not sgd.notes
    assert other.memory == adamw.memory and other.notes[0].startswith("optim='adafactor' is counted as AdamW")


def test_models_whose_code_needs_data(monkeypatch):
    planned = setup(per_device_train_batch_size=8, parameter_sharing="shared")
    monkeypatch.setattr(
        torch.nn.Embedding, "forward", lambda self, ids: self.weight[ids] if self.weight.sum() > 0 else None
    )
    with pytest.raises(ValueError, match=r"^A model of type 'qwen2' in torch\.float32 cannot be planned"):
        planned.plan()
