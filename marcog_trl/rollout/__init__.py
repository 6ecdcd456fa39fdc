"""Plays workflows in batches."""
