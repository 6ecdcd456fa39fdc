"""The heterogeneity layer: a LoRA adapter that all agents share, and that behaves differently for each agent's latent."""
