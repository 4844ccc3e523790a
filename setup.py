"""Only here because setuptools takes cffi's build list from setup.py; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["native/build_ring.py:ffibuilder"])
