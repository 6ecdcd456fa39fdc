"""These tests need frameworks for agents, which tests/run_programs.sh installs; elsewhere they are not collected."""

from importlib.util import find_spec


collect_ignore_glob = [] if find_spec("agents") and find_spec("langgraph") else ["test_*.py"]
