"""Fixtures shared by all areas: only the embedded models, which take seconds to make."""

import pytest

from faser.models import Pair, prepare


@pytest.fixture(scope="session")
def models() -> Pair:
    """The `smollm2` pair, whole, in the default cache directory (FASER_CACHE moves it)."""
    return prepare("smollm2", progress=False)
