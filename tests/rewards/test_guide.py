"""The code in the guide of `marcog_trl/rewards`."""

from guides import code_of
from teams import logged, script


def test_trains(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    code = code_of("marcog_trl/rewards/README.md").replace("Qwen/Qwen2.5-Coder-0.5B-Instruct", tiny_model)
    exec(code.replace('GRPOConfig("outputs/grpo")', 'GRPOConfig("outputs/grpo", use_cpu=True)'), names)
    trainer = names["trainer"]
    trainer.args.max_steps, trainer.args.logging_steps = 1, 1
    script(trainer)
    trainer.train()
    assert logged(trainer, "rewards/speed_reward/mean") == [0]
    assert logged(trainer, "rewards/brevity_reward/mean")[0] < 0 < logged(trainer, "speed_reward/seconds")[0]
