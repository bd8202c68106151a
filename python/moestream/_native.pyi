# The cffi module, generated at build time by tools/build_ffi.py; its contents follow the C headers.
from typing import Any

ffi: Any
lib: Any
