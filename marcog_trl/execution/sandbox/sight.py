"""What programs see of the file system: modules that they may import, and files that they may read.

Confined processes cannot ask the kernel about files by name (`seccomp.py`), because it would tell them about any file. The
functions of `os` that do so are replaced: they open the file, which Landlock controls, and ask about the open file.
"""

import errno
import importlib.machinery
import importlib.util
import os
import posix
import sys
from typing import Any


class Finder:
    """
    Finds top-level modules in a fixed table, so that the folders that contain them need not be listed.

    Args:
        modules (`dict[str, str]`): Path by name: a file, or a package's folder.
    """

    def __init__(self, modules: dict[str, str]):
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        location = self.modules.get(name)
        if path is not None or location is None:
            return None
        if not os.path.isdir(location):
            return importlib.util.spec_from_file_location(name, location)
        first = os.path.join(location, "__init__.py")
        if os.path.isfile(first):
            return importlib.util.spec_from_file_location(name, first, submodule_search_locations=[location])
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)  # a namespace
        spec.submodule_search_locations = [location]
        return spec


def library_modules() -> dict[str, str]:
    """Paths of the modules and packages of the standard library that are written in Python, by name."""
    library = os.path.dirname(os.__file__)
    found = {}
    for entry in os.scandir(library):
        if entry.name.endswith(".py"):
            found[entry.name[:-3]] = entry.path
        elif os.path.exists(os.path.join(entry.path, "__init__.py")):
            found[entry.name] = entry.path
    return found


def show_modules(modules: dict[str, str]) -> None:
    """Makes the standard library and the given modules importable, and nothing else that is installed."""
    library = os.path.dirname(os.__file__)
    sys.path[:] = [path for path in sys.path if path != library]
    sys.meta_path.append(Finder({**modules, **library_modules()}))


def look_by_opening() -> None:
    """Replaces `os.stat`, `os.lstat` and `os.access`: files that the program may not read do not exist for them."""
    real_stat, fstat, opened, close = posix.stat, posix.fstat, posix.open, posix.close
    looking = posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK

    def stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if isinstance(path, int):
            return fstat(path)
        try:
            fd = opened(path, looking if follow_symlinks else looking | posix.O_NOFOLLOW, dir_fd=dir_fd)
        except PermissionError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        try:
            return fstat(fd)
        finally:
            close(fd)

    def lstat(path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def access(
        path: Any, mode: int, *, dir_fd: int | None = None, effective_ids: bool = False, follow_symlinks: bool = True
    ) -> bool:
        try:
            stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        except OSError:
            return False
        return not mode & (os.W_OK | os.X_OK)

    for function in (stat, lstat, access):
        for kinds in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if getattr(posix, function.__name__) in kinds:
                kinds.add(function)
        for module in (posix, os):
            setattr(module, function.__name__, function)
    assert os.stat is not real_stat
