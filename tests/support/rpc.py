"""A second device for tests: ggml's RPC server on loopback, in a process of its own, from our own bundled libraries.

    with rpc.Server(n_threads=2) as server:
        names = moestream.add_rpc_server(server.endpoint)

Guarantees: a port that was free, a server that answers when `with` is entered, and that is killed by its own pid at
the end; if the test process dies, the kernel kills it. Never: leaves a process, listens beyond loopback.
"""

from __future__ import annotations

import pathlib
import signal
import socket
import subprocess
import sys
import time
from types import TracebackType

import moestream

# argv: folder of the libraries, endpoint, threads. The libraries are loaded by ctypes, so that the server shares no
# code with what is tested. prctl(1, ...) is PR_SET_PDEATHSIG.
_SERVE = """
import ctypes, pathlib, signal, sys
folder, endpoint, n_threads = sys.argv[1:]
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
def load(name):
    return ctypes.CDLL(str(sorted(pathlib.Path(folder).glob(name + ".so*"))[0]), mode=ctypes.RTLD_GLOBAL)
load("libggml-base"); load("libggml-cpu"); rpc = load("libggml-rpc"); ggml = load("libggml")
ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
cpu = ggml.ggml_backend_dev_by_type(0)
devices = (ctypes.c_void_p * 1)(cpu)
rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, ctypes.c_size_t(int(n_threads)), ctypes.c_size_t(1), devices)
"""


def library_folder() -> pathlib.Path:
    """Where the bundled libllama and libggml lie."""
    moestream.features()  # binds, so that the libraries are there to be asked
    path = next(entry["path"] for entry in moestream.libraries() if entry["bound"])
    return pathlib.Path(path).parent


def free_port() -> int:
    """A port nobody listens on, by letting the kernel choose."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One RPC server whose device is the CPU, with its threads."""

    def __init__(self, n_threads: int = 2) -> None:
        self.n_threads = n_threads
        self.endpoint = ""
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Server:
        for _ in range(5):  # between choosing a port and listening on it somebody else may take it
            port = free_port()
            self.endpoint = f"127.0.0.1:{port}"
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(library_folder()), self.endpoint, str(self.n_threads)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            if self._answers(port):
                return self
            self.close()
        raise RuntimeError("the RPC server did not come up")

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        for _ in range(200):
            if self._process.poll() is not None:
                return False
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return True
        return False

    def close(self) -> None:
        """Kills the server, by its pid."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
