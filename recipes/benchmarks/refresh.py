"""
Measures how long it takes to update the agents of a SHPPO team in vLLM, which happens before every rollout, on the embedded
default.

    python recipes/benchmarks/refresh.py

Medians in milliseconds. The engine's part is measured where vLLM is installed (see tests/run_vllm.sh).
"""

import importlib.util
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from common import QUIET, make_parser, same_prompt_team, variety
from datasets import Dataset

from marcog_trl import SHPPOConfig, SHPPOTrainer
from marcog_trl.embedded import build_default_model
from marcog_trl.heterogeneity import fold_adapters
from marcog_trl.team.vllm import write_adapters


warnings.filterwarnings("ignore", category=FutureWarning)


@torch.no_grad()
def measure(trainer, folder, rounds):
    """Milliseconds of every part, round by round."""
    config = trainer.model.peft_config["default"]
    paths = [folder / agent for agent in trainer.agents]
    served = trainer.vllm_generation if trainer.use_vllm else None
    parts = {"latents and cores": [], "fold": [], "write": []} | ({"reload": []} if served else {})

    def clock(part, function, *args):
        started = time.perf_counter()
        result = function(*args)
        parts[part].append(1000 * (time.perf_counter() - started))
        return result

    def decode():
        mu, _ = trainer.modules.latents(trainer.team.role_observations)
        return trainer.modules.cores(mu)

    decode()  # reads the role texts, once per run
    for _ in range(rounds):
        cores = clock("latents and cores", decode)
        states = clock("fold", fold_adapters, trainer.model, cores)
        clock("write", write_adapters, [(state, config) for state in states], paths)
        if served:
            served.load([(state, config) for state in states])
            clock("reload", served.reload)
    return parts


def main():
    parser = make_parser(__doc__, num_agents=3, rounds=30)
    parser.add_argument("--model", help="default: the embedded one, which is built if need be")
    options = parser.parse_args()
    has_vllm = importlib.util.find_spec("vllm") is not None
    with tempfile.TemporaryDirectory() as folder:
        serving = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256} if has_vllm else {}
        args = SHPPOConfig(
            folder, latent_scope="agent", num_generations=2, per_device_train_batch_size=2 * options.num_agents,
            max_completion_length=32, use_cpu=not torch.cuda.is_available(), **QUIET, **serving,
        )  # fmt: skip
        dataset = Dataset.from_dict({"prompt": ["def f(xs): add one to every number"] * 8})
        model = options.model or build_default_model()
        trainer = SHPPOTrainer(model, variety, args, dataset, workflow=same_prompt_team(options.num_agents))
        parts = measure(trainer, Path(folder) / "adapters", options.rounds)
    medians = {part: statistics.median(times) for part, times in parts.items()}
    for part, median in medians.items():
        print(f"{part:18s} {median:6.1f} ms (slowest {max(parts[part]):.1f})")
    rest = "" if has_vllm else ", without the engine's part: vLLM is not installed"
    print(f"{'all':18s} {sum(medians.values()):6.1f} ms, {options.num_agents} agents{rest}")


if __name__ == "__main__":
    main()
