"""
Looks for leaks in a long run of SHPPO on the embedded default: memory, live objects, tensors, files and processes, every 50
steps. The last row of the table is the ratio of the row before it to the first one.

    python recipes/benchmarks/long_run.py
    python recipes/benchmarks/long_run.py --steps 100 --every 10
"""

import ctypes
import gc
import os
import tempfile
import time
import warnings
from pathlib import Path

import torch
from common import make_parser
from transformers import PrinterCallback, TrainerCallback

from marcog_trl import SHPPOTrainer
from marcog_trl.cli.parsing import read_training_arguments
from marcog_trl.cli.recipe import RECIPES


warnings.filterwarnings("ignore", category=FutureWarning)

MEASURED = ("resident MiB", "in use MiB", "objects", "tensors", "tensor MiB", "files", "processes")


def private_mib() -> float:
    """Memory that is this process's own."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_", "Swap:"))) / 1024


class MallInfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def allocated_mib() -> float:
    """Memory that C code has allocated and not freed, tensors included; resident memory has what is kept for later too."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    return (info.uordblks + info.hblkhd) / 2**20


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


class Watch(TrainerCallback):
    """Takes stock every few steps."""

    def __init__(self, every: int):
        self.every, self.rows, self.started = every, {}, time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every:
            return
        gc.collect()
        objects = gc.get_objects()
        tensors = [thing for thing in objects if issubclass(type(thing), torch.Tensor)]
        self.rows[state.global_step] = (
            private_mib(),
            allocated_mib(),
            len(objects),
            len(tensors),
            sum(tensor.nbytes for tensor in tensors) / 2**20,
            len(os.listdir("/proc/self/fd")),
            len(descendants(os.getpid())),
        )
        row = "".join(
            f"{value:13,.1f}" if isinstance(value, float) else f"{value:13,}" for value in self.rows[state.global_step]
        )
        print(f"{state.global_step:6}{row}{time.perf_counter() - self.started:9.0f}", flush=True)


def main():
    options = make_parser(__doc__, steps=500, every=50).parse_args()
    argv = ["--max_steps", str(options.steps), "--output_dir", tempfile.mkdtemp(), "--disable_tqdm", "true"]
    script, args, model = read_training_arguments(RECIPES["shppo"], argv)
    train_dataset, _ = script.load_splits()
    trainer = SHPPOTrainer(model.model_name_or_path, script.reward, args, train_dataset)
    watch = Watch(options.every)
    trainer.add_callback(watch)
    trainer.remove_callback(PrinterCallback)
    print(f"{'step':>6}" + "".join(f"{name:>13}" for name in MEASURED) + f"{'seconds':>9}")
    trainer.train()
    first, last = watch.rows[options.every], watch.rows[max(watch.rows)]
    print("ratio " + "".join(f"{b / a:13.3f}" for a, b in zip(first, last, strict=True)))


if __name__ == "__main__":
    main()
