"""Fixtures shared by all areas: the embedded models, which take seconds to make, and torch on one thread."""

from collections.abc import Iterator

import pytest

from faser.models import Pair, prepare


@pytest.fixture(scope="session")
def models() -> Pair:
    """The `smollm2` pair, whole, in the default cache directory (FASER_CACHE moves it)."""
    return prepare("smollm2", progress=False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models this small two threads mostly wait for each other, for seconds on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
