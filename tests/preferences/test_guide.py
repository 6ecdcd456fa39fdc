"""The Python code in the guide, from top to bottom."""

import re

import guides
import teams

from marcog_trl import MultiAgentGRPOTrainer, Team


def test_every_block_runs(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = teams.dataset(4, entry_point=["f"] * 4)
    trainer = teams.make(
        tiny_model, tmp_path / "outputs" / "quickstart", MultiAgentGRPOTrainer, data=data, workflow="collaboration",
        isolation="best_effort", num_workers=1,
    )  # fmt: skip
    trainer.save_model()
    trainer.executor.close()
    code = (
        guides.code_of("marcog_trl/preferences/README.md")
        .replace("path/to/base", tiny_model)
        .replace("range(64)", "range(4)")
    )
    # A tiny random model solves nothing: its replies are told apart by their lengths
    code = code.replace('"execution_reward"', "lengths").replace(
        'MADPOConfig("outputs/madpo", ', 'MADPOConfig("outputs/madpo", report_to="none", '
    )
    for config in ("TeamRewardConfig", "MultiAgentGRPOConfig"):
        code = re.sub(rf'({config}\("[\w/]+", )', r'\1report_to="none", use_cpu=True, bf16=False, ', code)
    code = code.replace(
        'MultiAgentGRPOConfig("outputs/marlhf", ', 'MultiAgentGRPOConfig("outputs/marlhf", max_completion_length=16, '
    )
    names = {"lengths": lambda completions, replies, **kwargs: [sum(map(len, texts.values())) for texts in replies]}
    exec(code, names)
    assert names["trainer"].state.global_step > 0
    assert Team.from_pretrained("outputs/start", isolation="best_effort").settings.has_latents
    assert names["reward_model"].std > 0
    assert "rewards/reward_model/mean" in names["rl_trainer"].state.log_history[-1]
    assert (tmp_path / "outputs" / "madpo" / "team.json").is_file()
