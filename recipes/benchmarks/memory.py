"""
Peak memory of SHPPO with 2 and with 8 agents at the same number of rows, each in a process of its own.

    python recipes/benchmarks/memory.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path


warnings.filterwarnings("ignore", category=FutureWarning)


def resident_mib(which: str) -> float:
    """`which`: "VmRSS", what is resident now, or "VmHWM", its peak. (`ru_maxrss` would begin with the peak of the parent.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{which}:")[1].split()[0]) / 1024


def measure(options: argparse.Namespace) -> None:
    from datasets import Dataset
    from throughput import make_model, make_team, reward

    from marcog_trl import SHPPOConfig, SHPPOTrainer

    folder = tempfile.mkdtemp()
    make_model(folder, options.shape)
    args = SHPPOConfig(
        folder, per_device_train_batch_size=32, num_generations=4, max_completion_length=options.tokens, max_steps=3,
        generation_kwargs={"min_new_tokens": options.tokens}, beta=0.02, use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": ["def f(xs): add one to every number " * 8] * 64})
    trainer = SHPPOTrainer(folder, reward, args, dataset, workflow=make_team(options.agents))
    start = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the set-up
    trainer.train()
    peak = resident_mib("VmHWM")
    print(json.dumps({"agents": options.agents, "peak_mib": peak, "training_mib": peak - start}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, help="measure this team in this process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="medium", help="of the model; see throughput.py")
    parser.add_argument("--tokens", type=int, default=64, help="length of a reply")
    options = parser.parse_args()
    if options.agents is not None:
        measure(options)
        return
    peaks: dict[int, list[dict]] = {2: [], 8: []}
    for _ in range(options.rounds):
        for agents in peaks:
            command = [sys.executable, __file__, "--agents", str(agents), "--shape", options.shape]
            command += ["--tokens", str(options.tokens)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            peaks[agents].append(json.loads(output.strip().splitlines()[-1]))
    for key in ("peak_mib", "training_mib"):
        two, eight = (sorted(run[key] for run in peaks[agents])[options.rounds // 2] for agents in peaks)
        print(f"{key}: 2 agents {two:.0f}, 8 agents {eight:.0f}, ratio {eight / two:.3f}")


if __name__ == "__main__":
    main()
