"""Configuration of [`MADPOTrainer`]."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from trl import DPOConfig

from marcog_trl.checks import COUNT, POSITIVE, Range, Unit, check_choice, check_fields, documented
from marcog_trl.trainers.config import check_mappings, check_output_dir, run_on_cpu, use_new_names


# Of the log-ratios of both sides only the difference counts, so that replies which are in both cancel
DIFFERENCES = ("sigmoid", "hinge", "exo_pair", "robust", "discopop")
LOSS_TYPES = (
    *DIFFERENCES, "ipo", "sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sft"
)  # fmt: skip
# They compare each side with the reference by itself
_NEED_REFERENCE = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
# Fields of DPOConfig that do not fit pairs of episodes: the only value that we accept, and why
_FIXED = {
    "ld_alpha": (None, "The shared length of two episodes means nothing across agents."),
    "use_weighting": (False, "Weights of WPO are for single replies."),
    "truncation_mode": ("keep_start", "Replies are never truncated: longer pairs are dropped."),
    "padding_free": (False, "Cores need one row per reply."),
    "precompute_ref_log_probs": (False, "They are always computed in advance."),
    "sync_ref_model": (False, "Set reference='round' and several rounds."),
}


@documented
@dataclass
class MADPOConfig(DPOConfig):
    """
    Configuration of [`MADPOTrainer`]. Lists only the arguments that differ from [`~trl.DPOConfig`].

    One row of a batch is one pair of episodes.

    Args:
        margin (`str`, *optional*, defaults to `"joint"`):
            `"joint"`: one loss per pair, on the sum over the replies of all agents; `"agent"`: one loss per pair and agent,
            on the agent's own replies. There, the preferred side is the one with the higher return of that agent. Needs
            rewards by agent to differ from a loss with the same sides for all.
        reference (`str`, *optional*, defaults to `"initial"`):
            Policy that the log-ratios are relative to: `"initial"`, `"round"` or `"none"`. `"initial"`: the team that the
            first round began with. `"round"`: the team that this training begins with. With one round both are the same.
            `"none"`: no reference, as in CoMLRL; what keeps the policy close to where it was is then missing.
        gamma_turn (`float`, *optional*, defaults to `1.0`):
            Weight of the log-ratios of each later turn, in [0, 1], as in the returns.
        beta (`float`, *optional*, defaults to `0.1`):
            See [`~trl.DPOConfig`]. With `reference="round"`, T rounds allow about as much change as one with β / T.
        loss_type (`list[str]`, *optional*, defaults to `["sigmoid"]`):
            As in [`~trl.DPOConfig`], without `"aot"` and `"aot_unpaired"`, which sort the pairs of a micro-batch. The better
            side of a pair is known for sure here, so the optimum of the sigmoid loss is at infinity: train one or two epochs,
            or use `["ipo"]`.
        max_length (`int`, *optional*, defaults to `2048`):
            Pairs with a longer reply, counted with its prompt, are dropped.
        learning_rate, num_train_epochs (`float`, *optional*, default to `1e-5` and `1.0`):
            See [`~transformers.TrainingArguments`].
    """

    _ranges: ClassVar[dict[str, Range]] = {"beta": POSITIVE, "max_length": COUNT}  # of inherited fields

    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate of the adapter and the core decoder."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the pairs."})
    max_length: int | None = 2048

    # Parameters that control the loss
    margin: Literal["joint", "agent"] = "joint"
    reference: Literal["initial", "round", "none"] = "initial"
    gamma_turn: Unit = 1.0

    def __post_init__(self):
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        check_fields(self, self._ranges)
        check_mappings(self)
        check_output_dir(self.output_dir)
        run_on_cpu(self)
        use_new_names(self)
        super().__post_init__()
        for loss_type in self.loss_type:
            check_choice("loss_type", loss_type, LOSS_TYPES)
            if loss_type in _NEED_REFERENCE and self.reference == "none":
                raise ValueError(
                    f"loss_type={loss_type!r} needs a reference, but reference='none'. Set reference='initial', or "
                    "loss_type='sigmoid'."
                )
        for name, (accepted, why) in _FIXED.items():
            if getattr(self, name) != accepted:
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported. {why} Set {name}={accepted!r}.")
