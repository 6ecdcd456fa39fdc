"""An executor that follows a script."""

import pytest
from players import ScriptedExecutor


@pytest.fixture
def scripted():
    return ScriptedExecutor
