"""The cffi module that `build_quic.py` makes of quic*.c; absent where ngtcp2 is not installed."""

from typing import Any

ffi: Any
lib: Any
