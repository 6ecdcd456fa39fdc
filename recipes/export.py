"""
Writes each agent of a saved team as an ordinary LoRA adapter, for PEFT and vLLM, beside a copy of the team, and pushes the
folder to the Hub:

    python recipes/export.py --adapter outputs/quickstart --output_dir outputs/team --push user/team

With `--num_agents` or `--agents agents.yaml` (a list of `{name: ..., role: ...}`, which is the whole team, or a mapping of
names to texts) it is a team of other agents with the same weights. Without `--push` all stays local; without `--adapter` a
folder that was written before is pushed, for instance again.
"""

from marcog_trl.cli.endings import interrupts


def main():
    with interrupts() as kept:  # also while libraries are imported, which takes seconds
        from marcog_trl.cli.export import export

        export(kept)


if __name__ == "__main__":
    main()
