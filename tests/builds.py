"""Builds of vLLM that are not installed here, as far as their metadata."""

from pathlib import Path


def install_build(folder: Path, version: str) -> None:
    """For a process that has the folder on its path, a distribution named vllm is installed."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
