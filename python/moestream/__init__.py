"""moestream: Mixture-of-Experts models larger than memory, on an unmodified llama.cpp.

    import moestream as ms

    model = ms.Model("model.gguf", stream=ms.Stream(cache="8GiB"))
    context = model.context(n_ctx=4096)
    for piece in context.generate("Once upon a time", max_tokens=64):
        print(piece, end="")

Importing prints nothing and does not load llama.cpp; the first use of a model or of `features()` does. The C level is
`moestream.lib` and `moestream.ffi`.
"""

from moestream._native_api import build_info, features, ffi, get_cpu_buffer_type, lib, libraries
from moestream.context import Context
from moestream.errors import (
    BusyError,
    ClosedError,
    ContextFullError,
    CorruptError,
    FileMissingError,
    FormatError,
    InternalError,
    InvalidError,
    MissingFunctionError,
    MoestreamError,
    OutOfMemoryError,
    ReadError,
    TruncatedError,
    UnsupportedError,
)
from moestream.generation import Generation
from moestream.logs import set_log_level
from moestream.model import Model, device_names
from moestream.placement import Placement, Plan, plan
from moestream.rpc import add_rpc_server, remove_rpc_server
from moestream.stream import Stream

__all__ = [
    "BusyError",
    "ClosedError",
    "Context",
    "ContextFullError",
    "CorruptError",
    "FileMissingError",
    "FormatError",
    "Generation",
    "InternalError",
    "InvalidError",
    "MissingFunctionError",
    "Model",
    "MoestreamError",
    "OutOfMemoryError",
    "Placement",
    "Plan",
    "ReadError",
    "Stream",
    "TruncatedError",
    "UnsupportedError",
    "add_rpc_server",
    "build_info",
    "device_names",
    "features",
    "ffi",
    "get_cpu_buffer_type",
    "lib",
    "libraries",
    "plan",
    "remove_rpc_server",
    "set_log_level",
]
