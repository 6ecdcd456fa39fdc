import pytest
from tiny_lora import make_batch


@pytest.fixture
def batch():
    return make_batch()
