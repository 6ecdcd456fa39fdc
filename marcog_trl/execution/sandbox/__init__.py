"""Runs inside the worker processes, in fresh interpreters: imports nothing but the standard library and itself."""
