"""Facts about the machine: cores, memory, cgroup limits. Reads /proc and /sys, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def allowed_cpus() -> set[int]:
    """Numbers of the logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Physical cores available to this process: affinity, hyper-threads and a cgroup CPU quota counted."""
    seen: set[str] = set()
    for cpu in allowed_cpus():
        siblings = _read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        seen.add(siblings or str(cpu))
    cores = max(1, len(seen))
    quota = cgroup_cpu_quota()
    return max(1, min(cores, int(quota + 0.5))) if quota else cores


def memory_available() -> int:
    """MemAvailable in bytes; 0 where the system does not say."""
    return _meminfo("MemAvailable")


def memory_total() -> int:
    """MemTotal in bytes; 0 where the system does not say."""
    return _meminfo("MemTotal")


def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes (VmHWM); 0 where the system does not say."""
    return _status("VmHWM")


def rss() -> int:
    """Resident set of this process, in bytes; 0 where the system does not say."""
    return _status("VmRSS")


def cgroup_memory() -> tuple[int, int] | None:
    """(limit, use) in bytes of the tightest memory cgroup this process is in, v1 or v2; None if none has a limit."""
    tightest: tuple[int, int] | None = None
    for folder, version in _cgroup_folders("memory"):
        names = ("memory.max", "memory.current")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, use = _read(folder / names[0]), _read(folder / names[1])
        # cgroup v1 says "no limit" with a number close to 2**63.
        if limit.isdigit() and use.isdigit() and int(limit) < 2**62:
            room = int(limit) - int(use)
            if tightest is None or room < tightest[0] - tightest[1]:
                tightest = (int(limit), int(use))
    return tightest


def cgroup_cpu_quota() -> float | None:
    """CPUs' worth of time that the tightest CPU cgroup allows; None if none has a quota."""
    quotas = []
    for folder, version in _cgroup_folders("cpu"):
        if version == 2:
            parts = _read(folder / "cpu.max").split()
        else:
            parts = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit() and int(parts[1]):
            quotas.append(int(parts[0]) / int(parts[1]))
    return min(quotas) if quotas else None


def cgroup_root(controller: str = "memory") -> tuple[Path, int] | None:
    """Where a controller's own hierarchy is mounted and its version (1 or 2); None if it is not mounted."""
    v2: Path | None = None
    for line in _read(Path("/proc/self/mounts")).splitlines():
        parts = line.split()
        if len(parts) < 4:
            continue
        if parts[2] == "cgroup" and controller in parts[3].split(","):
            return Path(parts[1]), 1
        if parts[2] == "cgroup2":
            v2 = Path(parts[1])
    if v2 is not None and controller in _read(v2 / "cgroup.controllers").split():
        return v2, 2
    return None


def _cgroup_folders(controller: str) -> Iterator[tuple[Path, int]]:
    """The folders from this process's group up to the mounted root: nested limits count as well."""
    mounted = cgroup_root(controller)
    if mounted is None:
        return
    root, version = mounted
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if (version == 2 and controllers == "") or controller in controllers.split(","):
            folder = root / path.lstrip("/")
            while folder != root and root in folder.parents:
                if folder.is_dir():
                    yield folder, version
                folder = folder.parent
            yield root, version
            return


def _meminfo(key: str) -> int:
    return _kib(Path("/proc/meminfo"), key)


def _status(key: str) -> int:
    return _kib(Path("/proc/self/status"), key)


def _kib(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
