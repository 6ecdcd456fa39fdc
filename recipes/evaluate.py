"""
Measures a team on problems: pass@k, tests passed, rewards, tokens and seconds, as a table and in files.

A saved team; its base model before training; one untrained agent with the team's budget of tokens; a model as it is:

    python recipes/evaluate.py --adapter outputs/quickstart --output outputs/quickstart/evaluation.json
    python recipes/evaluate.py --adapter outputs/quickstart --untrained true
    python recipes/evaluate.py --adapter outputs/quickstart --single_agent true
    python recipes/evaluate.py --model_name_or_path Qwen/Qwen2.5-Coder-0.5B-Instruct --dataset_name humaneval \
        --override workflow=collaboration temperature=0.8

The same weights with more or fewer agents, or with other role texts (agents.yaml: a list of `{name: ..., role: ...}`, which
is the whole team, or a mapping of names to texts):

    python recipes/evaluate.py --adapter outputs/quickstart --num_agents 4
    python recipes/evaluate.py --adapter outputs/quickstart --agents agents.yaml

Several processes share the problems: `accelerate launch --config_file recipes/ddp.yaml --num_processes 8 recipes/evaluate.py
...` gives the same figures. The same command continues an evaluation with `--output` that was stopped.
"""

from marcog_trl.cli.endings import interrupts


def main():
    with interrupts() as kept:  # also while libraries are imported, which takes seconds
        from marcog_trl.cli.evaluate import evaluate

        evaluate(kept)


if __name__ == "__main__":
    main()
