#!/usr/bin/env python3
"""Runs a command in a process where io_uring is refused, as most container runtimes refuse it.

    no_io_uring.py [--errno EPERM|ENOSYS|ENOMEM|EMFILE] [--call setup|enter|register] COMMAND ARG...

Installs a seccomp filter that answers the three io_uring calls, or one of them, with the errno, then becomes the
command. Needs no rights. Never returns after the command has started.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import struct

IO_URING_CALLS = {"setup": 425, "enter": 426, "register": 427}  # the same numbers on every architecture
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_ABSOLUTE, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
JUMP_IF_BIT = 0x45
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse(number: int, calls: list[int]) -> None:
    """From now on this process and its children get `number` as the answer to these calls. OSError if refused."""
    rows = [(LOAD_ABSOLUTE, 0, 0, 0)]  # the number of the call
    last = len(calls) - 1
    rows += [(JUMP_IF_EQUAL, last - i + 1, 0, call) for i, call in enumerate(calls)]
    rows += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | number)]
    _install(rows)


def _install(rows: list[tuple[int, int, int, int]]) -> None:
    code = b"".join(struct.pack("HBBI", *row) for row in rows)
    program = _Program(len(rows), code)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    for option, value, pointer in (
        (PR_SET_NO_NEW_PRIVS, 1, None),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program)),
    ):
        if libc.prctl(option, value, pointer, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def kill_on_sockets_and_writes() -> None:
    """From now on this process dies at the first socket, file opened to be written, folder, link or rename (x86-64)."""
    socket, mkdir, rename, creat, link, symlink, openat, mkdirat, renameat, linkat, symlinkat, memfd = (
        41, 83, 82, 85, 86, 88, 257, 258, 264, 265, 266, 319,
    )  # fmt: skip
    always = [socket, mkdir, rename, creat, link, symlink, mkdirat, renameat, linkat, symlinkat, memfd]
    flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    # number; each of `always` jumps to the end, openat to its flags (third argument), anything else is allowed
    rows = [(LOAD_ABSOLUTE, 0, 0, 0)]
    rows += [(JUMP_IF_EQUAL, len(always) - i + 3, 0, call) for i, call in enumerate(always)]
    rows += [(JUMP_IF_EQUAL, 1, 0, openat), (RETURN, 0, 0, ALLOW), (LOAD_ABSOLUTE, 0, 0, 32)]
    rows += [(JUMP_IF_BIT, 1, 0, flags), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, KILL)]
    _install(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errno", default="EPERM")
    parser.add_argument("--call", choices=IO_URING_CALLS, help="only this one")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    calls = [IO_URING_CALLS[args.call]] if args.call else list(IO_URING_CALLS.values())
    refuse(getattr(errno, args.errno), calls)
    os.execvp(args.command[0], args.command)


if __name__ == "__main__":
    main()
