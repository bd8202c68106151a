"""ggml's RPC devices: memory and compute of another machine, as devices of this process.

`add_rpc_server` makes the devices of a running RPC server known; from then on they are devices like any other
("RPC0", buffer type "RPC0[host:port]") for every model that is loaded. Guarantees: a server that cannot be reached,
or that speaks another protocol, is an exception (ggml itself ends the process). Never: encrypts or authenticates;
ggml's protocol does neither, so both ends belong in one trusted network.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from typing import Any

from moestream import _native_api as native
from moestream import logs
from moestream.errors import ReadError, UnsupportedError

_known: dict[str, Any] = {}  # endpoint -> ggml_backend_reg_t
_lock = threading.Lock()


def add_rpc_server(endpoint: str, *, timeout: float = 5.0) -> list[str]:
    """Makes the devices of an RPC server available; returns their names, such as ["RPC0"]. Again: the same names.

    Models loaded afterwards use them unless `devices` says otherwise. The server has to come from the same llama.cpp
    commit (its protocol changes), and has to stay: ggml ends this process when a server it uses goes away.

    Args:
        endpoint: "host:port".
        timeout: seconds to wait for the server's answer.

    Raises:
        ValueError: not of the form host:port. ReadError: nobody answers there.
        UnsupportedError: libggml was built without RPC, or the server speaks another protocol.
    """
    host, colon, port = str(endpoint).rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536 or "\0" in host:
        raise ValueError(f'endpoint was {endpoint!r}; it is "host:port"')
    with _lock:
        if endpoint in _known:
            return _device_names(_known[endpoint])
        function = _rpc_function("ggml_backend_rpc_add_server", "ggml_backend_reg_t (*)(const char *)")
        _check_answer(endpoint, host, int(port), timeout)
        registry = function(endpoint.encode())
        logs.drain()
        if registry == native.ffi.NULL:
            raise UnsupportedError(f"the RPC server at {endpoint} has no devices")
        native.lib.ggml_backend_register(registry)
        _known[endpoint] = registry
        return _device_names(registry)


def remove_rpc_server(endpoint: str) -> None:
    """Takes a server's devices away again, so that models loaded afterwards do not use them. Close the models that do
    first; then the server may end.

    Raises:
        ValueError: it was not added.
    """
    lib = native.lib
    with _lock:
        if endpoint not in _known:
            raise ValueError(f"{endpoint!r} was not added; there are: {', '.join(_known) or 'none'}")
        # ggml files the devices of every server under the backend itself, so all have to go, and the others come back.
        backend = lib.ggml_backend_reg_by_name(b"RPC")
        lib.ggml_backend_unload(_known.pop(endpoint))
        for registry in _known.values():
            lib.ggml_backend_unload(registry)
        lib.ggml_backend_unload(backend)
        for registry in (backend, *_known.values()):
            lib.ggml_backend_register(registry)


def _device_names(registry: Any) -> list[str]:
    lib = native.lib
    return [
        native.text(lib.ggml_backend_dev_name(lib.ggml_backend_reg_dev_get(registry, i)))
        for i in range(lib.ggml_backend_reg_dev_count(registry))
    ]


def _rpc_function(name: str, ctype: str) -> Any:
    ffi, lib = native.ffi, native.lib
    registry = lib.ggml_backend_reg_by_name(b"RPC")
    address = lib.ggml_backend_reg_get_proc_address(registry, name.encode()) if registry != ffi.NULL else ffi.NULL
    if address == ffi.NULL:
        raise UnsupportedError("the loaded libggml has no RPC backend; build llama.cpp with -DGGML_RPC=ON")
    return ffi.cast(ctype, address)


def _check_answer(endpoint: str, host: str, port: int, timeout: float) -> None:
    """Raises unless a server answers with our protocol. ggml aborts the process on either fault, so the handshake is
    tried in another one."""
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError as error:
        raise ReadError(
            f"no RPC server answered at {endpoint}: {error.strerror or error}", os_errno=error.errno or 0
        ) from error
    if not sys.executable:
        return
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _HANDSHAKE, endpoint, *[entry or "." for entry in sys.path]],
            capture_output=True, timeout=timeout + 15, text=True, errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ReadError(f"the RPC server at {endpoint} took the connection, but did not answer") from None
    if tried.returncode == 0:
        return
    said = [line.strip() for line in tried.stderr.splitlines() if line.strip()]
    mismatch = [line for line in said if "mismatch" in line]
    what = "; ".join(mismatch or said[:1]) or f"exit status {tried.returncode}"
    raise UnsupportedError(
        f"what listens at {endpoint} is not an RPC server of this llama.cpp ({native.build_info()['llama_commit'][:9]})"
        f": {what}"
    )


# Its own core dump would be noise: the abort is expected where the protocols differ.
_HANDSHAKE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path[:] = sys.argv[2:]
from moestream import rpc
rpc._rpc_function("ggml_backend_rpc_add_server", "ggml_backend_reg_t (*)(const char *)")(sys.argv[1].encode())
"""

__all__ = ["add_rpc_server", "remove_rpc_server"]
