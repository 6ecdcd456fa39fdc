"""Configuration of [`SHPPOTrainer`]."""

from dataclasses import dataclass, field
from typing import ClassVar

from marcog_trl.checks import COUNT, NOT_NEGATIVE, POSITIVE, Range, check_choice
from marcog_trl.trainers.multi_agent_ppo_config import MultiAgentPPOConfig


@dataclass
class SHPPOConfig(MultiAgentPPOConfig):
    """
    Configuration of [`SHPPOTrainer`].

    Args:
        > Parameters that control the heterogeneity layer

        parameter_sharing (`str`, *optional*, defaults to `"latent"`):
            `"latent"`: one adapter, with latents that make agents differ (SHPPO). `"shared"`: one adapter without latents.
            `"separate"`: one adapter per agent, as a baseline.
        latent_scope (`str`, *optional*, defaults to `"observation"`):
            Input of the latents. `"observation"`: role text and prompt of the row, with equal weight. `"agent"`: role text
            only, with one draw per agent and generation batch. Each agent is then one LoRA adapter, as vLLM needs.
        latent_size (`int`, *optional*, defaults to `8`):
            Size of the latent.
        sigma_min (`float`, *optional*, defaults to `0.05`):
            Smallest standard deviation of a latent.
        policy_gradient_to_latent (`bool`, *optional*, defaults to `False`):
            Whether to backpropagate the PPO loss into LatentNet. Otherwise LatentNet learns from the latent loss only.
        core_scale (`float`, *optional*, defaults to `0.3`):
            Initial size of the cores, relative to the identity, for layers with LoRA's B at 0, where cores have no effect
            yet. Layers with another B start with cores of 0. With `core_scale=0`, training starts at plain shared LoRA, and
            agents separate slowly (see [`CoreDecoder`]). With larger values, agents separate sooner and share less.

        > Parameters that control the latent losses

        latent_entropy_coef (`float`, *optional*, defaults to `0.01`):
            Weight of the entropy of the latents. It is minimised.
        latent_distance_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the distance between the latents of agents. It is maximised.
        latent_distance (`str`, *optional*, defaults to `"cosine"`):
            Distance of latents: `"cosine"`, or `"minmax"`, which is normalised over the generation batch.
        behaviour_distance_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the distance between what an agent does and what it would do with the latent of another agent that
            reads the same prompt (see [`behaviour_distance`]). It is maximised. One of eight rows is compared. Agents with
            prompts of their own are not compared.
        latent_learning_rate (`float`, *optional*, defaults to `3e-3`):
            Learning rate of LatentNet. Agents have distant latents after about 5 steps with the default, and after about 30
            steps with `1e-4`.
        inference_learning_rate (`float`, *optional*, defaults to `1e-4`):
            Learning rate of InferenceNet.
    """

    _ranges: ClassVar[dict[str, Range]] = {
        **MultiAgentPPOConfig._ranges,
        "latent_size": COUNT,
        "sigma_min": POSITIVE,
        **dict.fromkeys(
            "core_scale latent_entropy_coef latent_distance_coef behaviour_distance_coef latent_learning_rate "
            "inference_learning_rate".split(),
            NOT_NEGATIVE,
        ),
    }

    # Parameters that control the heterogeneity layer
    parameter_sharing: str = field(
        default="latent",
        metadata={"help": "'latent' (SHPPO), 'shared' (one adapter, no latents) or 'separate' (one per agent)."},
    )
    latent_scope: str = field(
        default="observation",
        metadata={"help": "Input of the latents: 'observation' (role text and prompt) or 'agent' (role text only)."},
    )
    latent_size: int = field(default=8, metadata={"help": "Size of the latent."})
    sigma_min: float = field(default=0.05, metadata={"help": "Smallest standard deviation of a latent."})
    policy_gradient_to_latent: bool = field(
        default=False, metadata={"help": "Whether to backpropagate the PPO loss into LatentNet."}
    )

    core_scale: float = field(
        default=0.3,
        metadata={"help": "Initial size of the cores, relative to the identity, for layers with LoRA's B at 0."},
    )

    # Parameters that control the latent losses
    latent_entropy_coef: float = field(
        default=0.01, metadata={"help": "Weight of the entropy of the latents (minimised)."}
    )
    latent_distance_coef: float = field(
        default=0.1, metadata={"help": "Weight of the distance between the latents of agents (maximised)."}
    )
    behaviour_distance_coef: float = field(
        default=0.1,
        metadata={"help": "Weight of the distance between what agents do with each other's latents (maximised)."},
    )
    latent_distance: str = field(default="cosine", metadata={"help": "Distance of latents: 'cosine' or 'minmax'."})
    latent_learning_rate: float = field(default=3e-3, metadata={"help": "Learning rate of LatentNet."})
    inference_learning_rate: float = field(default=1e-4, metadata={"help": "Learning rate of InferenceNet."})

    def __post_init__(self):
        super().__post_init__()
        if self.full_finetuning:
            raise ValueError(
                "full_finetuning=True is not supported by SHPPO: its latents act inside the adapter, and are folded into it for "
                "export. Set full_finetuning=False, or use MultiAgentPPOTrainer."
            )
        check_choice("parameter_sharing", self.parameter_sharing, ("latent", "shared", "separate"))
        check_choice("latent_scope", self.latent_scope, ("observation", "agent"))
        check_choice("latent_distance", self.latent_distance, ("cosine", "minmax"))
        if self.use_vllm and self.parameter_sharing != "shared":
            self._check_vllm()
        reentrant = self.gradient_checkpointing and (self.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if reentrant and self.parameter_sharing == "latent":
            raise ValueError(
                "parameter_sharing='latent' does not support reentrant gradient checkpointing: all layers decode their cores "
                "from one latent. Set gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        for name in ("merge_for_generation", "use_transformers_continuous_batching"):
            if getattr(self, name) and self.parameter_sharing != "shared":
                raise ValueError(
                    f"{name}=True does not support parameter_sharing={self.parameter_sharing!r}: all rows must use one "
                    f"adapter. Set {name}=False, or parameter_sharing='shared'."
                )

    def _check_vllm(self) -> None:
        """Refuses settings that vLLM does not support with one LoRA adapter per agent."""
        if self.parameter_sharing == "latent" and self.latent_scope == "observation":
            raise ValueError(
                "use_vllm=True does not support latent_scope='observation': vLLM serves one adapter per agent, not one per "
                "row. Set latent_scope='agent'."
            )
        for name, value, needed, reason in (
            ("vllm_mode", self.vllm_mode, "colocate", "TRL's vLLM server does not serve LoRA adapters"),
            ("vllm_tensor_parallel_size", self.vllm_tensor_parallel_size, 1, "each process has its own engine"),
            ("vllm_enable_sleep_mode", self.vllm_enable_sleep_mode, False, "a sleeping engine drops the base weights"),
        ):
            if value != needed:
                raise ValueError(
                    f"{name}={value!r} does not support parameter_sharing={self.parameter_sharing!r}: {reason}. Set "
                    f"{name}={needed!r}, or parameter_sharing='shared'."
                )
