"""Fixtures for all tests: the models of support/models.py by name, fresh processes, and the rule about skips."""

from __future__ import annotations

import pathlib
import signal
import subprocess
from collections.abc import Callable

import pytest
from support import expected_skips, models

from moestream import demo

HERE = pathlib.Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full`: identity tests run every combination instead of a rotation that covers every pair."""
    parser.addoption("--full", action="store_true", help="run every combination of the identity matrix")


@pytest.fixture(scope="session")
def full_matrix(request: pytest.FixtureRequest) -> bool:
    """Whether --full was given."""
    return bool(request.config.getoption("--full"))


def pytest_configure(config: pytest.Config) -> None:
    """Watch for skips (see support/expected_skips.py)."""
    config.pluginmanager.register(expected_skips.ExpectedSkips(HERE / "expected_skips.txt"), "expected-skips")


@pytest.fixture(scope="session")
def tiny_moe() -> Callable[..., pathlib.Path]:
    """tiny_moe("Q4_K", n_expert=16, ...): the smallest usual model with experts of this type, made once."""
    return models.tiny


@pytest.fixture(scope="session")
def make_moe() -> Callable[..., pathlib.Path]:
    """make_moe(Spec(...)): any synthetic model, made once."""
    return models.make


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_python(code, env=..., preload=..., timeout=...): code in a fresh Python process."""
    return models.run_python


@pytest.fixture(scope="session")
def demo_model() -> pathlib.Path:
    """The demo model with 16 experts, from the user's cache; made (and its source fetched) if it is not there."""
    return demo.ensure_demo_model(progress=False)


def _named(name: str) -> Callable[[], pathlib.Path]:
    @pytest.fixture(scope="session", name=name)
    def fixture() -> pathlib.Path:
        return models.named(name)

    return fixture


for _name in models.MODELS:
    globals()[f"_fixture_{_name}"] = _named(_name)


# A shell that starts something in the background has it ignore SIGINT, and with it every process that tests start:
# those that tests interrupt would not notice.
signal.signal(signal.SIGINT, signal.default_int_handler)
