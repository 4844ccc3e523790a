"""The cffi module that `build_ring.py` makes of ring.c and slab.c."""

from typing import Any

ffi: Any
lib: Any
