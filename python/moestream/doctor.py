"""`moestream doctor`: what this machine allows, and what would help. Looks, changes nothing."""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import platform
import resource
from pathlib import Path
from typing import Any

from moestream import _native_api as native
from moestream import host
from moestream.disk import file_rate, slice_rate, try_direct
from moestream.errors import MoestreamError
from moestream.sizes import format_bytes
from moestream.stream import Stream

# The number is the same on every architecture that has this call.
_SYS_IO_URING_SETUP = 425
_DISK_BYTES = 256 * 1024**2


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("path", nargs="?", metavar="PATH", help="a model, or a folder on the disk that will hold it")


def command(args: argparse.Namespace) -> int:
    """Runs the command: 0 if streaming can work here, 1 if not."""
    from moestream.cli import print_json

    facts = examine(args.path)
    if args.json:
        print_json(facts)
    else:
        for line in report(facts):
            print(line)
    return 0 if facts["llama"]["bound"] else 1


def examine(path: str | None = None) -> dict[str, Any]:
    """Everything doctor knows, as plain data.

    Raises:
        OSError: `path` does not exist.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = host.cgroup_memory()
    facts: dict[str, Any] = {
        "build": native.build_info(),
        "llama": _llama(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "io_uring": probe_io_uring(),
        "memlock_bytes": {"soft": _unlimited(soft), "hard": _unlimited(hard)},
        "cores": {
            "physical_available": host.physical_cores(),
            "logical_available": len(host.allowed_cpus()),
            "cgroup_quota": host.cgroup_cpu_quota(),
        },
        "memory": {
            "total_bytes": host.memory_total(),
            "available_bytes": host.memory_available(),
            "cgroup_limit_bytes": limit[0] if limit else None,
            "cgroup_used_bytes": limit[1] if limit else None,
        },
        "disk": _disk(path) if path else None,
    }
    facts["advice"] = advice(facts)
    return facts


def probe_io_uring() -> dict[str, Any]:
    """Whether the kernel gives this process an io_uring: {"works", "errno", "why"}."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(256)  # struct io_uring_params is 120 bytes; zero asks for nothing special
    fd = libc.syscall(_SYS_IO_URING_SETUP, 4, params)
    if fd >= 0:
        os.close(fd)
        return {"works": True, "errno": None, "why": None}
    number = ctypes.get_errno()
    disabled = _read("/proc/sys/kernel/io_uring_disabled")
    why = os.strerror(number)
    if number == errno.EPERM and disabled in ("1", "2"):
        why = f"kernel.io_uring_disabled is {disabled}; sysctl kernel.io_uring_disabled=0 allows it"
    elif number == errno.EPERM:
        why = "refused to this process, usually by a container's seccomp profile; one that allows io_uring helps"
    elif number == errno.ENOSYS:
        why = "this kernel has no io_uring (5.1 or later does), or a seccomp profile hides it"
    return {"works": False, "errno": errno.errorcode.get(number, str(number)), "why": why}


def _llama() -> dict[str, Any]:
    try:
        features = native.features()
    except MoestreamError as error:
        return {"bound": False, "why": str(error), "features": {}, "libraries": []}
    lib = native.lib
    devices = []
    for i in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(i)
        devices.append(
            {
                "name": native.text(lib.ggml_backend_dev_name(device)),
                "description": native.text(lib.ggml_backend_dev_description(device)),
            }
        )
    return {
        "bound": True,
        "why": None,
        "features": features,
        "libraries": native.libraries(),
        "devices": devices,
    }


def _disk(path: str) -> dict[str, Any]:
    status = Path(path).stat()
    facts: dict[str, Any] = {"path": path, "file_system": _file_system(path)}
    space = os.statvfs(path)
    facts["free_bytes"] = space.f_bavail * space.f_frsize
    if not Path(path).is_file():
        return {**facts, "direct": None, "read": None}
    facts["direct"] = try_direct(path)
    try:
        rate = slice_rate(path, Stream(cache="min"), _DISK_BYTES)
        facts["read"] = {"bytes_per_s": rate, "how": "expert slices, many reads in flight"}
    except MoestreamError:
        if not status.st_size:
            return {**facts, "read": None}
        rough = file_rate(path, _DISK_BYTES)
        facts["read"] = {"bytes_per_s": rough["bytes_per_s"], "how": "4 MiB blocks, one read at a time"}
    return facts


def _file_system(path: str) -> str | None:
    """Type of the file system, by the longest mount point that `path` lies under."""
    real = os.path.realpath(path)
    best, found = "", None
    for line in _read("/proc/self/mounts").splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = parts[1].rstrip("/") + "/"
        if (real + "/").startswith(point) and len(point) > len(best):
            best, found = point, parts[2]
    return found


def advice(facts: dict[str, Any]) -> list[str]:
    """What would help, most useful first; empty when nothing would."""
    lines = []
    if not facts["llama"]["bound"]:
        lines.append(f"llama.cpp could not be loaded: {facts['llama']['why']}")
    if not facts["io_uring"]["works"]:
        lines.append(f"io_uring does not work ({facts['io_uring']['why']}); reads go through threads, which is slower")
    disk = facts["disk"]
    if disk and disk.get("direct") and not disk["direct"]["works"]:
        lines.append(f"direct reads do not work on {disk['path']} ({disk['direct']['why']}); the page cache is used")
    memory = facts["memory"]
    limit = memory["cgroup_limit_bytes"]
    if limit is not None and limit < memory["total_bytes"]:
        lines.append(f"a cgroup limits memory to {format_bytes(limit)}; cache=auto respects it")
    return lines


def report(facts: dict[str, Any]) -> list[str]:
    """The facts for people."""
    build, memory, cores = facts["build"], facts["memory"], facts["cores"]
    lines = [f"{'build':16}" + ", ".join(f"{name} {value}" for name, value in build.items())]
    lines.append(f"{'system':16}{facts['system']}, Python {facts['python']}")
    llama = facts["llama"]
    if llama["bound"]:
        named = ", ".join(device["name"] for device in llama["devices"])
        lines.append(f"{'llama.cpp':16}loaded, devices: {named}")
        lines += [f"{'':16}{item.get('path', item)}" for item in llama["libraries"]]
    else:
        lines.append(f"{'llama.cpp':16}NOT loaded: {llama['why']}")
    uring = facts["io_uring"]
    lines.append(f"{'io_uring':16}" + ("works" if uring["works"] else f"no: {uring['why']}"))
    soft = facts["memlock_bytes"]["soft"]
    lines.append(f"{'memlock':16}" + ("unlimited" if soft is None else format_bytes(soft)))
    lines.append(f"{'cores':16}{cores['physical_available']} physical, {cores['logical_available']} logical")
    lines.append(
        f"{'memory':16}{format_bytes(memory['available_bytes'])} of {format_bytes(memory['total_bytes'])} available"
    )
    if memory["cgroup_limit_bytes"] is not None:
        used = memory["cgroup_used_bytes"]
        lines.append(f"{'cgroup':16}{format_bytes(used)} of {format_bytes(memory['cgroup_limit_bytes'])} used")
    lines += _disk_lines(facts["disk"])
    lines += [f"- {line}" for line in facts["advice"]] or ["nothing here needs to be changed"]
    return lines


def _disk_lines(disk: dict[str, Any] | None) -> list[str]:
    if disk is None:
        return [f"{'disk':16}not looked at; give a model or a folder"]
    lines = [f"{'disk':16}{disk['file_system'] or 'unknown file system'}, {format_bytes(disk['free_bytes'])} free"]
    if disk["direct"]:
        lines.append(f"{'direct reads':16}" + ("work" if disk["direct"]["works"] else f"no: {disk['direct']['why']}"))
    if disk["read"]:
        lines.append(f"{'read speed':16}{format_bytes(disk['read']['bytes_per_s'])}/s ({disk['read']['how']})")
    return lines


def _unlimited(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
