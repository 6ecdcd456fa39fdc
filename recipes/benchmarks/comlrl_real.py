"""
Trains the helper and the main coder of a configuration with CoMLRL, and measures them as `evaluate` measures ours.

    python recipes/benchmarks/comlrl_real.py --comlrl-python PATH     # its environment also needs peft
    python recipes/train_magrpo.py --config recipes/configs/qwen2.5-coder-0.5b-cpu.yaml    # ours

Model, prompts, reward, learning rate and batches are those of the file. Each of CoMLRL's agents is a PEFT model with the file's LoRA: all
weights of two models would need 18 GiB.
"""

import json
import sys
from pathlib import Path

import numpy as np
import yaml
from common import COMLRL_ENVIRONMENT, RECIPE_FOLDER, make_parser, measure_apart, versions_of_comlrl
from learning_peers import TwoModels, write_prompts


def main():
    parser = make_parser(__doc__, tokens=25_000, points=3, seed=0, num_samples=2)
    parser.add_argument("--config", type=Path, default=RECIPE_FOLDER / "configs" / "qwen2.5-coder-0.5b-cpu.yaml")
    parser.add_argument("--model", help="the file's model, by default")
    parser.add_argument("--comlrl-python", help="interpreter of CoMLRL's environment")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/comlrl"))
    options = parser.parse_args()
    versions_of_comlrl(parser, options.comlrl_python, "peft")
    from marcog_trl import Collaboration, load_problems

    config = yaml.safe_load(options.config.read_text())
    model, roles = options.model or config["model_name_or_path"], config["roles"]
    options.output_dir.mkdir(parents=True, exist_ok=True)
    rows = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    setting = {
        "algorithm": "magrpo",
        "model": model,
        "problems": write_prompts(
            options.output_dir, model, load_problems("builtin", "train"), Collaboration(roles=roles)
        ),
        "tokens": options.tokens,
        "every": options.tokens / options.points,
        "folder": str(options.output_dir),
        "seed": options.seed,
        **{name: config[name] for name in ("dtype", "learning_rate", "num_generations")},
        "batch": rows // (2 * config["num_generations"]),
        "new_tokens": config["max_completion_length"],
        "python": sys.executable,
        "judge": {"roles": roles, "reward": config["reward"][0]},
        "lora": {"r": config["lora_r"], "lora_alpha": config["lora_alpha"]},
    }
    script = str(Path(__file__).with_name("comlrl_learning.py"))
    done = measure_apart(script, ["learn", setting], options.comlrl_python, **COMLRL_ENVIRONMENT)
    problems, curve = load_problems("builtin", config["dataset_test_split"]), []
    for tokens, seconds in done["saved"]:
        team = TwoModels(options.output_dir / str(tokens), setting["new_tokens"], roles)
        curve.append({"tokens": tokens, "seconds": seconds} | team.measure(problems, options.num_samples))
        print({name: np.mean(values).item() for name, values in curve[-1].items()}, flush=True)
    (options.output_dir / "result.json").write_text(json.dumps(done | {"curve": curve}))
    print(done)


if __name__ == "__main__":
    main()
