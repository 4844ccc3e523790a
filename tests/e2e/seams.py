"""Where test builds take something out of the product and put something else in."""

from __future__ import annotations

from types import ModuleType


def replace(module: ModuleType, name: str, value: object) -> None:
    """Raises AttributeError when the seam has moved: a fault that is not planted proves nothing."""
    getattr(module, name)
    setattr(module, name, value)
