"""What tests of real models share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch in one thread: with more, a tiny model costs many times as much on a busy machine."""
    import torch  # most tests of this folder do without it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
