"""Fixtures of several areas: the embedded models and plain servers, which take long to make; torch on one thread;
Triton on a CPU.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest

from faser.bench.server import Server
from faser.models import Pair, prepare


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would all that tests start; some send it one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def models() -> Pair:
    """The `smollm2` pair, whole, in the default cache directory (FASER_CACHE moves it)."""
    return prepare("smollm2", progress=False)


@pytest.fixture(scope="session")
def plain() -> Iterator[Callable[[str], Server]]:
    """Of a dtype, the one server without speculation that all tests hold others' outputs against."""
    with ExitStack() as running:
        yield cache(lambda dtype: running.enter_context(Server(["--policy", "none", "--dtype", dtype])))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models this small two threads mostly wait for each other, for seconds on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(f, *arguments)` is f of them where Triton's kernels run on the CPU, and fresh memory holds garbage.

    That is another process: whether Triton interprets is settled when it is first imported.
    """
    import torch

    # Deterministic torch fills what torch.empty gives: NaN, or the largest integer.
    pool = ProcessPoolExecutor(1, get_context("spawn"), torch.use_deterministic_algorithms, (True,))
    with pool:
        with patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"):
            pool.submit(int).result()
        yield lambda f, *arguments: pool.submit(f, *arguments).result()
