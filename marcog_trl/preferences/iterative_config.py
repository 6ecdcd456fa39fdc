"""Configuration of MADPO in rounds, for its recipe."""

from dataclasses import dataclass, field
from typing import ClassVar

from marcog_trl.checks import NOT_NEGATIVE, Range
from marcog_trl.preferences.madpo_config import MADPOConfig
from marcog_trl.preferences.rounds import RoundsSettings
from marcog_trl.team.settings import TeamSettings
from marcog_trl.trainers.config import SHPPOConfig


@dataclass
class IterativeMADPOConfig(RoundsSettings, TeamSettings, MADPOConfig):
    """
    Configuration of rounds of MADPO: [`MADPOConfig`] for the training of a round, [`RoundsSettings`], and [`TeamSettings`] for the
    team that the first round begins with.

    Args:
        start_team (`str`, *optional*):
            Folder or Hub repository of a saved team that the first round begins with. Its own settings and base model then replace
            those given here. By default the team is untrained.
        init_core_scale (`float`, *optional*, defaults to `0.3`):
            As in [`SHPPOConfig`], for an untrained team with `parameter_sharing="latent"`.
    """

    _VALID_DICT_FIELDS = [
        *MADPOConfig._VALID_DICT_FIELDS,
        "roles",
        "endpoints",
        "generation_kwargs",
        "chat_template_kwargs",
    ]
    _ranges: ClassVar[dict[str, Range]] = {
        **TeamSettings._ranges, **RoundsSettings.rounds_ranges, **MADPOConfig._ranges, "init_core_scale": NOT_NEGATIVE
    }  # fmt: skip

    start_team: str | None = field(
        default=None, metadata={"help": "Saved team that the first round begins with. Default: an untrained one."}
    )
    init_core_scale: float = field(
        default=SHPPOConfig.init_core_scale,
        metadata={"help": "Initial size of the cores of an untrained team with latents."},
    )

    def __post_init__(self):
        MADPOConfig.__post_init__(self)
        TeamSettings.__post_init__(self)
        self.check_rounds()
        if self.eval_strategy != "no":
            raise ValueError(
                f"eval_strategy={self.eval_strategy.value!r} is not supported: the team is evaluated after every round. Set "
                "--eval_strategy no."
            )
        if self.push_to_hub:
            raise ValueError(
                "push_to_hub=True is not supported in rounds. Push the last team with `python recipes/export.py --adapter "
                "OUTPUT_DIR --output_dir TEAM --push user/team`."
            )
