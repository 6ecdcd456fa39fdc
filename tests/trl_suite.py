"""
Runs TRL's own tests of `GRPOTrainer` with the trainers of this package in its place:

    git clone https://github.com/huggingface/trl path/to/trl
    pip install jmespath
    python tests/trl_suite.py path/to/trl --results outputs/trl_suite

Nothing of TRL's tests is in this repository: they are read from the checkout, and test the installed TRL. Without `--hub`, the
tiny models and the data set that they load are made locally (`helpers/tiny_hub.py`), so that no network is needed.
With large vocabularies on Linux, `export MALLOC_TRIM_THRESHOLD_=16000000000 MALLOC_MMAP_THRESHOLD_=8000000000` saves a third of the time.

Two names change in the tests: `GRPOTrainer` and `GRPOConfig`. One setting is added, because TRL trains all weights where a test
gives no `peft_config`, and this package trains a LoRA: `full_finetuning=True` in these tests. Tests of images, and those that
TRL marks as slow, are left out.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


TRAINERS = {
    "trl": "GRPOTrainer",
    "grpo": "MultiAgentGRPOTrainer",
    "ppo": "MultiAgentPPOTrainer",
    "shppo": "SHPPOTrainer",
}
LEFT_OUT = "not VLM and not Slow"
# Some tests recite replies as token ids of Qwen's tokenizer. The others run with a vocabulary of 300 words, which is much faster
RECITING = "qwen_ids"
_RECITING = "with_tools or malformed_tool_calls or environment or mask_truncated_completions"
PARTS = {"few_ids": f"not ({_RECITING})", RECITING: _RECITING}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of TRL")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--results", type=Path, default=Path("outputs/trl_suite"), help="folder of the outcomes")
    parser.add_argument("-k", default="", help="only tests that match, as in pytest; updates earlier outcomes")
    parser.add_argument(
        "--pytest", nargs="+", default=[], help="more flags of pytest, such as --pytest=--durations=10"
    )
    parser.add_argument("--hub", action="store_true", help="load models and data from the Hub")
    parser.add_argument("--process", choices=TRAINERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        sys.exit(run(options, options.process))
    options.results.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    hubs = [None] if options.hub else [prepare(options.results, part) for part in PARTS]
    for name in options.trainers:  # a process for each, since tests import the names from `trl`
        for hub in hubs:
            if hub is not None:
                environment |= {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--process", name], env=environment)
    report(options)


def prepare(results: Path, part: str) -> Path:
    """Makes the models and the data set for a part of the tests, unless an earlier run has."""
    sys.path.insert(0, str(Path(__file__).parent / "helpers"))
    import tiny_hub

    hub = (results / part).absolute()
    tiny_hub.write_hub(hub, qwen_ids=part == RECITING)
    num_rows = 3 if part == RECITING else 17  # some of the others expect as many
    tiny_hub.write_dataset(hub / "zen", num_rows)
    return hub


def run(options: argparse.Namespace, name: str) -> int:
    """Runs the tests with one trainer in this process, and adds their outcomes to `<results>/<name>.json`."""
    import datasets
    import pytest
    import trl

    if name != "trl":
        trl.GRPOTrainer, trl.GRPOConfig = stand_ins(TRAINERS[name])  # type: ignore[misc]
    if not options.hub:
        hub = Path(os.environ["HF_HUB_CACHE"])
        datasets.load_dataset = functools.partial(load_local, datasets.load_dataset, hub / "zen")
    tests = options.checkout.absolute() / "tests" / "test_grpo_trainer.py"
    conditions = [LEFT_OUT, "" if options.hub else PARTS[hub.name], options.k]
    chosen = " and ".join(f"({condition})" for condition in conditions if condition)
    outcomes = Outcomes(options.results / f"{name}.json")
    # `trl` is imported already, so that the tests find the installed one, and not that of the checkout
    status = pytest.main(
        [str(tests), "-k", chosen, "-q", "-rN", "--tb=no", "-c", os.devnull, *options.pytest],
        plugins=[outcomes],
    )
    return int(status)


def stand_ins(name: str) -> tuple[Any, Any]:
    """Returns a trainer of this package and its configuration, which train all weights if there is no adapter."""
    from peft import PeftModel

    import marcog_trl

    trainer_class = getattr(marcog_trl, name)
    config_class = trainer_class._config_class
    if name == "SHPPOTrainer":  # which needs an adapter
        return trainer_class, config_class

    class Trainer(trainer_class):  # type: ignore[misc, valid-type]
        def __init__(self, model, *args, **kwargs):
            config = kwargs.get("args") or config_class(self._default_folder)
            config.full_finetuning = kwargs.get("peft_config") is None and not isinstance(model, PeftModel)
            super().__init__(model, *args, **kwargs | {"args": config})

        _default_folder = str(Path(os.environ.get("TMPDIR", "/tmp")) / "trl_suite")

    return Trainer, config_class


def load_local(load_dataset: Any, folder: Path, path: str, *args: Any, **kwargs: Any) -> Any:
    """`datasets.load_dataset`, except for the data set of the tests, which is in a folder."""
    if path != "trl-internal-testing/zen":
        return load_dataset(path, *args, **kwargs)
    files = {split: str(folder / args[0] / f"{split}.jsonl") for split in ("train", "test")}
    return load_dataset("json", data_files=files, **kwargs)


class Outcomes:
    """A plugin of pytest that keeps in a file how each test ended, and the error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, list[str]] = json.loads(path.read_text()) if path.is_file() else {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            error = "" if report.passed or report.skipped else report.longrepr.reprcrash.message
            self.found[report.nodeid.partition("::")[2]] = [report.outcome, " ".join(error.split())[:300]]
            self.path.write_text(json.dumps(self.found, indent=1))


def report(options: argparse.Namespace) -> None:
    """Prints, for each trainer, how many of the tests that TRL passes it passes, and why the others fail."""
    results = {name: options.results / f"{name}.json" for name in TRAINERS}
    found = {name: json.loads(path.read_text()) for name, path in results.items() if path.is_file()}
    if "trl" not in found:
        sys.exit(f"{results['trl']} is missing, which says which tests TRL passes. Run with --trainers trl first.")
    passed = [test for test, (outcome, _) in found["trl"].items() if outcome == "passed"]
    skipped = sum(outcome == "skipped" for outcome, _ in found["trl"].values())
    print(f"\nTRL passes {len(passed)} of its tests here, and {skipped} are skipped.")
    for name in [name for name in found if name != "trl"]:
        ended = {test: found[name].get(test, ["not run", ""]) for test in passed}
        failed = {test: error for test, (outcome, error) in ended.items() if outcome != "passed"}
        print(f"\n{TRAINERS[name]} passes {len(passed) - len(failed)} of these {len(passed)}.")
        for test, error in failed.items():
            print(f"  {test}\n    {error}")


if __name__ == "__main__":
    main()
