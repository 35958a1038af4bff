from pathlib import Path

import pytest

from predictor.samples import Sample, read_samples


@pytest.fixture(scope="session")
def real_file() -> Path:
    return Path(__file__).parent / "data" / "prompts.jsonl.gz"


@pytest.fixture(scope="session")
def real_samples(real_file: Path) -> list[Sample]:
    """Prompts of five public sets with the length of a real answer."""
    return read_samples([real_file])
