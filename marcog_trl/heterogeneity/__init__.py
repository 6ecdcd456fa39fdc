"""The heterogeneity layer: a LoRA adapter that all agents share, and that behaves differently for each agent's latent."""

from marcog_trl.heterogeneity.cores import LoraCores, adapted_layers, block_mask, check_peft_config
from marcog_trl.heterogeneity.fold import (
    fold_adapters,
    save_folded_adapters,
    save_split_adapters,
    split_adapter,
    stack_config,
)
from marcog_trl.heterogeneity.losses import (
    behaviour_distance,
    inference_loss,
    latent_distance_range,
    latent_diversity,
    latent_entropy,
    latent_loss,
)
from marcog_trl.heterogeneity.networks import CoreDecoder, InferenceNet, LatentNet


__all__ = [
    "CoreDecoder",
    "InferenceNet",
    "LatentNet",
    "LoraCores",
    "adapted_layers",
    "behaviour_distance",
    "block_mask",
    "check_peft_config",
    "fold_adapters",
    "inference_loss",
    "latent_distance_range",
    "latent_diversity",
    "latent_entropy",
    "latent_loss",
    "save_folded_adapters",
    "save_split_adapters",
    "split_adapter",
    "stack_config",
]
