"""Lines of errors in the user's own files."""

import importlib.util
import json

import pytest

from marcog_trl.tracebacks import own_frames


PACKAGE = "def call(function):\n    return function()\n"


def imported(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PACKAGE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def frames_of(module):
    """The functions of the frames of an error that a module and the standard library call."""
    with pytest.raises(ValueError) as found:
        module.call(lambda: json.loads("{"))
    return [frame.name for frame in own_frames(found.value)]


@pytest.mark.parametrize(
    "folder",
    [
        "lib/python3.11/site-packages/openai",  # of another environment, or of the user
        "usr/lib/python3/dist-packages",
        "opt/libraries/openai",  # a path in a .pth file, or of `pip install --target`
    ],
)
def test_packages_are_left_out_wherever_they_are_installed(tmp_path, monkeypatch, folder):
    installed = tmp_path / "opt" / "libraries"
    (installed / "openai-3.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(installed)
    assert frames_of(imported(tmp_path / folder / "client.py")) == ["frames_of", "<lambda>"]


def test_own_files_are_shown(tmp_path, monkeypatch):
    """Also those of a folder that is imported from, and those of a project that is installed as it is being written."""
    (tmp_path / "my_agents.egg-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert frames_of(imported(tmp_path / "my_agents.py")) == ["frames_of", "call", "<lambda>"]
