"""Only here because setuptools takes cffi's build list from setup.py; everything else is in pyproject.toml."""

import runpy

from setuptools import setup

modules = ["native/build_ring.py:ffibuilder"]
if runpy.run_path("native/build_quic.py")["find_backend"]() is not None:  # optional: without ngtcp2, links use TCP
    modules.append("native/build_quic.py:builder")
setup(cffi_modules=modules)
