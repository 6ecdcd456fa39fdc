"""A team outside of training: loads, plays, saves, exports."""
