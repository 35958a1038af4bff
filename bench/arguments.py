"""Types of command-line arguments: what is wrong is told before anything is measured."""

import argparse
from pathlib import Path


def file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no file {text}")
    return Path(text)


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"no folder {text}")
    return Path(text)


def writable_file(text: str) -> Path:
    folder(str(Path(text).parent))
    return Path(text)


def positive_number(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {value}")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
