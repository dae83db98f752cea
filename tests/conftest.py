"""What every test relies on."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from cli_helpers import ROOT, TEMPLATE, Call, call
from first_calls import remembering
from outrider.backends import machine, tuning
from outrider.backends.gguf import guard, libraries
from outrider.costs import other_programs
from outrider.models.hub import cache_dir
from outrider.session import learned

if TYPE_CHECKING:
    from real_server import RealServer

# Programs that a shell starts in the background ignore Ctrl-C, and so do theirs: several tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the machines that run the tests are shared, and a slow one finds no bug by it.
# In CI the same examples are tried every time, so that a failure is one of the change; and as many as in
# `make test-all`.
for _name, _examples in {"quick": 20, "full": 100}.items():
    settings.register_profile(_name, max_examples=_examples, deadline=None, derandomize="CI" in os.environ)
settings.load_profile("full" if "CI" in os.environ else "quick")

# One thread for each model: several tests run at once, and threads that wait for a core spin meanwhile.
# The libraries read the variables when they are loaded, here and in programs that tests start.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
os.environ["PYTHONPATH"] = str(ROOT / "src")  # this process may have it by pytest's doing alone
vars(machine)["_cpu_quota"] = lambda: 1
machine.physical_cores.cache_clear()

# Whatever else runs on the machine: nothing is measured again for it. What is said once a day was said.
vars(other_programs)["STAT"] = Path(os.devnull)
vars(learned)["is_first_today"] = lambda _what: False

# A cache of the run's own, with the user's models in it: no call was measured yet, and there is no build for
# the machine's own CPU. The processes of a run share it.
if "PYTEST_XDIST_WORKER" in os.environ:
    _cache = None
else:
    _cache = TemporaryDirectory(prefix="outrider-tests-")
    if (_models := cache_dir() / "models").is_dir():
        Path(_cache.name, "models").symlink_to(_models.resolve())
    os.environ["OUTRIDER_CACHE"] = _cache.name


def pytest_configure(config: pytest.Config) -> None:
    """Modules that import Ray, an extra, cannot be looked through for doctests where it is missing."""
    if find_spec("ray") is None:
        config.option.ignore_glob = [*(config.option.ignore_glob or ()), *_without_doctests("ray")]


def _without_doctests(module: str) -> Iterator[str]:
    sources = Path(__file__).parents[1] / "src/outrider"
    return (str(path) for path in sources.rglob("*.py") if f"\nimport {module}\n" in path.read_text("utf-8"))


def _freeze() -> None:
    """What is there between two modules of tests stays: the garbage collector need not go through all of it
    again and again."""
    gc.collect()
    gc.freeze()


def pytest_collection() -> None:
    """What is imported stays, too."""
    gc.disable()


def pytest_collection_finish() -> None:
    _freeze()
    gc.set_threshold(5_000)  # a seventh as often as usual: little of what tests make is cyclic
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """What the tests themselves load is frozen with the last of a module."""
    found = yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()
    return found


def pytest_unconfigure() -> None:
    """Take the run's cache away."""
    if _cache is not None:
        _cache.cleanup()


# Each child that tries a library takes longer than most tests: one for each kind of tiny model is enough.
vars(guard)["_run_child"] = remembering(Path(os.environ["OUTRIDER_CACHE"], "first-calls"))

# Only the libraries of packages: builds for the machine itself may or may not be in the user's cache.
vars(libraries)["native_library"] = vars(libraries)["cuda_library"] = lambda: None

# A choice between libraries need not be a good one here: one round of calls is enough.
vars(tuning)["_STAGE_SECONDS"] = 0.0

# Nor what calls of tiny models cost: their estimate takes a moment.
vars(tuning)["GLANCE_SECONDS"] = 0.02


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[RealServer]":
    """`outrider serve` with the embedded model. Clients of all kinds share it: its start takes longest."""
    from real_server import ARGUMENTS, CONTEXT, real_server

    # Fixed lengths: what is drafted, and so how numbers are rounded, depends on no clock.
    options = (*ARGUMENTS, "-c", str(CONTEXT), "--policy", "fixed")
    with real_server(tmp_path_factory.mktemp("server"), *options) as running:
        yield running


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is tried in a child process first."""
    monkeypatch.setattr(guard, "_run_child", lambda *_: 0)


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Call:
    """The program, in this process."""
    return partial(call, monkeypatch, capfdbinary)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny models, which no test changes."""
    from tiny_gguf import write_tiny

    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target.gguf")
    write_tiny(folder / "draft.gguf", noise=0.3)
    write_tiny(folder / "chat.gguf", chat_template=TEMPLATE)
    write_tiny(folder / "long.gguf", chat_template=TEMPLATE, context_length=8192)
    write_tiny(folder / "mamba.gguf", arch="mamba")
    return folder
