"""The code of the worker processes. They are fresh interpreters, so it imports only the standard library and itself."""
