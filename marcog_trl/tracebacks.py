"""The lines of an error that are in the user's own files."""

import functools
import os
import sys
import sysconfig
import traceback
from pathlib import Path


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of an error that are neither in this package, nor in Python, nor in an installed package."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_foreign(frame.filename)]


@functools.cache
def _is_foreign(file: str) -> bool:
    if file.startswith("<frozen"):
        return True
    paths = sysconfig.get_paths()
    foreign = {os.path.realpath(path) for path in (Path(__file__).parent, paths["stdlib"], paths["platstdlib"])}
    folders = Path(os.path.realpath(file)).parents
    return any(str(folder) in foreign or _has_packages(folder) for folder in folders)


def _has_packages(folder: Path) -> bool:
    """Whether packages are installed in a folder: that of an environment, of the system, of the user, or any that is imported from."""
    if folder.name in ("site-packages", "dist-packages"):
        return True
    imported = {os.path.realpath(path) for path in sys.path if path}
    return str(folder) in imported and any(folder.glob("*.dist-info"))
