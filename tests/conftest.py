"""What all tests share: the size of the fuzz test as a flag, one thread for each worker, and a fixed seed."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--fuzz-cases", type=int, default=20_000, help="how many random calls the fuzz test makes")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # under pytest-xdist, workers share the cores
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
