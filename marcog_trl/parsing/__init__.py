"""Reads code out of prompts and replies."""
