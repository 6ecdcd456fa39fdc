"""These tests need vLLM, which tests/run_vllm.sh sets up; elsewhere they are not collected."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parent))  # test_cuda.py imports from test_agents.py


@pytest.fixture(scope="session", autouse=True)
def plain_weights():
    """vLLM packs weights for CPUs and drops the originals, which a test wants to look at and TRL's own sync to change."""
    from vllm import _custom_ops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_custom_ops, "_supports_onednn", False)
        yield
