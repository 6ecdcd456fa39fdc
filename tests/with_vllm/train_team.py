"""Run by test_processes.py: a team whose processes have different numbers of rows in a stage."""

import json
import sys
from pathlib import Path

import teams
import torch
from trl.generation import vllm_generation

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer


def reply(prompt):
    return [5 + sum(prompt) % teams.VOCABULARY, teams.EOS]


class Client:
    """What TRL asks of a server, without one; replies depend on the prompt alone."""

    weights: list = []

    def __init__(self, **kwargs):
        pass

    def init_communicator(self, device):
        pass

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, params):
        self.weights.append({name: tensor.sum().item() for name, tensor in params})
        assert list(self.weights[-1]) == [name for name, _, _ in metadata]

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, n, **kwargs):
        completions = [reply(prompt) for prompt in prompts]
        logprobs = [[[-1.0]] * len(completion) for completion in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


def main():
    model, out, mode = sys.argv[1:]
    vllm_generation.VLLMClient = Client
    options = {"vllm_mode": "server"} if mode == "server" else {"latent_scope": "agent"}
    trainer = teams.make(
        model,
        out,
        MultiAgentPPOTrainer if mode == "server" else SHPPOTrainer,
        workflow=teams.Short(),
        data=teams.Dataset.from_dict({"prompt": ["def f(x):", "more f(x):"] * 2}),
        per_device_train_batch_size=10,
        max_steps=3,
        use_vllm=True,
        ddp_backend="gloo",
        **options,
    )
    teams.randomize(trainer.modules, scale=0.2)
    rows = []
    play = trainer.team.play_tree

    def watched(*args, **options):
        turns = play(*args, **options)
        rows.extend(row for episode in turns[-1] for row in episode.rows)
        return turns

    trainer.team.play_tree = watched
    trainer.train()
    result = {
        "rows": len(rows),
        "right": sum(row.completion_ids == reply(row.prompt_ids) for row in rows),
        "difference": teams.logged(trainer, "sampling/sampling_logp_difference/max"),
        "weights": Client.weights,
        "policy": {name: tensor.double().sum().item() for name, tensor in teams.trainable(trainer).items()},
    }
    rank = trainer.accelerator.process_index
    (Path(out) / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
