"""How many cores this process may use."""

import os
import sys
from pathlib import Path


def available_cores() -> int:
    """Number of CPU cores that this process may use, at least 1. Both its affinity mask and the quota of its control group
    count."""
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores(cores)))


def _cgroup_cores(default: int) -> int:
    """Number of cores in the CPU quota of this process's control group, rounded down; `default` without a quota."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return default
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: the lowest quota of the group and its ancestors counts
            root, group = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup" + path)
            for folder in (group, *group.parents):
                if folder == root.parent:
                    break
                text = _read(folder / "cpu.max").split()
                if len(text) == 2 and text[0] != "max":
                    quotas.append(int(text[0]) / int(text[1]))
        elif "cpu" in controllers.split(","):
            for folder in (Path(f"/sys/fs/cgroup/{controllers}{path}"), Path("/sys/fs/cgroup/cpu")):
                quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
                if quota.strip() and int(quota) > 0 and period.strip():
                    quotas.append(int(quota) / int(period))
    return max(1, int(min(quotas))) if quotas else default


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def default_num_workers() -> int:
    """This process's share of the node's cores. `LOCAL_WORLD_SIZE` (or, by DeepSpeed's launcher, `LOCAL_SIZE`) training
    processes divide them."""
    processes = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    return max(1, available_cores() // max(1, int(processes)))
