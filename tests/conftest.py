"""Shared fixtures: the folder of real data, tiny models, the seed, the GPU memory limit, and a log of failures."""

import contextlib
import fcntl
import functools
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.helpers import marks

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads would take cores from other processes

SHARED = Path(os.environ.get("HALFBYTE_SHARED", Path(__file__).resolve().parents[2] / "shared"))


GIB = 2**30
GPU_SHARE = 4  # GiB of GPU memory per pytest process, however many processes share the GPU


def pytest_addoption(parser):
    parser.addoption("--log-to", metavar="FOLDER", help="append failures and seconds to files there as they happen")


# Folders whose tests share what takes long to make (rank processes, the hostile stage, the package's syntax trees): one
# xdist worker runs each.
TOGETHER = ("tests/hostile/", "tests/package/", "tests/parallel/")
# What takes longest, by seconds on one core. Scheduled first, so that no worker is left with it at the end.
LONGEST = ("tests/parallel/", "tests/hostile/")


def unit(nodeid: str) -> str:
    """Return the scheduling unit of a test: its folder if in TOGETHER, else its file."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Schedule `--dist loadfile` by unit, in the order of collection; xdist alone starts with the most tests."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit(nodeid)

    config.option.loadscopereorder = False
    return ByUnit(config, log)


def pytest_configure(config):
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0" and config.args_source == config.ArgsSource.TESTPATHS:
        # Workers collect files in opposite orders, so that each finds assertion rewrites that the other has cached.
        tests = [path for path in sorted(Path(__file__).parent.iterdir(), reverse=True) if path.name[0] not in "._"]
        config.args = [str(path) for path in tests if path.is_dir() or path.match("test_*.py")]
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("twenty", max_examples=20, deadline=None)
        settings.load_profile("twenty")
    folder = config.getoption("--log-to")
    if folder and not hasattr(config, "workerinput"):  # workers send their reports to the controller
        config.pluginmanager.register(Log(Path(folder)))


_imported = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Freeze imported objects, so that later garbage collections skip them."""
    global _imported
    if len(sys.modules) > _imported + 20:  # tests import lazily, the first run half of transformers
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


class Log:
    """Append failures, durations and skips to files as they happen, for sessions killed at a time limit.

    `gpu-order.txt` lists the tests of each process in order: an earlier test may have broken the CUDA context."""

    def __init__(self, folder: Path):
        self.folder, self.began = folder, time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("gpu-failures.txt", "gpu-seconds.txt", "gpu-skipped.txt", "gpu-order.txt"):
            (folder / name).write_text("", encoding="utf-8")

    def _append(self, name: str, text: str) -> None:
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(text)

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self._append("gpu-order.txt", f"{getattr(report, 'worker_id', 'main')} {report.nodeid}\n")
        if report.failed:
            self._append("gpu-failures.txt", f"=== {report.nodeid} ({report.when})\n{report.longreprtext}\n")
        if report.skipped:
            reason = report.longrepr[-1] if isinstance(report.longrepr, tuple | list) else report.longreprtext
            self._append("gpu-skipped.txt", f"{report.nodeid}: {reason}\n")
        if report.duration >= 1:
            now = time.monotonic() - self.began
            self._append("gpu-seconds.txt", f"{report.duration:.1f} {report.nodeid} {report.when} at {now:.0f}\n")


@contextlib.contextmanager
def _share_of_gpu(gib: float):
    """Limit this process to `gib` of GPU memory, so that results do not depend on the other processes."""
    import torch

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


@pytest.fixture(scope="session", autouse=True)
def _usual_share():
    import torch

    with _share_of_gpu(GPU_SHARE) if torch.cuda.is_available() else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _large_share(request):
    """Raise the GPU memory limit for a test marked `large`; one such test runs at a time."""
    import torch

    marker = request.node.get_closest_marker("large")
    if marker is None or not torch.cuda.is_available():
        yield
        return
    with open(Path(tempfile.gettempdir()) / "halfbyte-tests-large.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < marker.args[0] * GIB:
            pytest.skip(f"needs {marker.args[0]} GiB of free device memory")
        with _share_of_gpu(marker.args[0]):
            yield
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def drawing():
    """Skip plotting and fsync, which dominate tiny runs. Within the returned context manager plots are drawn.

    The template of the Hub's model cards, which PEFT writes with each adapter, is compiled once, and the parser of
    the command line is built once.
    """
    import jinja2
    import typer.main
    import typer.testing

    from halfbyte.report import plots

    own = plots._svg

    @contextlib.contextmanager
    def context():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plots, "_svg", own)
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_svg", lambda *arguments: "<svg></svg>")
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(jinja2, "Template", functools.lru_cache(jinja2.Template))
        command = functools.cache(typer.main.get_command)
        patch.setattr(typer.main, "get_command", command)
        patch.setattr(typer.testing, "_get_command", command)
        yield context


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real weights, tokenizers and datasets; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no real data at {SHARED} (set HALFBYTE_SHARED)")
    return SHARED


@pytest.fixture(autouse=True)
def _allocator():
    """Restore PYTORCH_ALLOC_CONF: commands set it in this process, and plans read it."""
    before = os.environ.get("PYTORCH_ALLOC_CONF")
    yield
    if before is None:
        os.environ.pop("PYTORCH_ALLOC_CONF", None)


@pytest.fixture(autouse=True)
def _fresh_notices():
    """Forget logged notices: a test finds none of other tests, and each is logged again."""
    from halfbyte.utils import notices

    notices.reset_notices()


REPLAYING = ("tests/plan/", "tests/memory/", "tests/kernels/", "tests/loading/")  # these test what is cached


@pytest.fixture(autouse=True)
def _plans(request):
    """Cache memory plans and checked checkpoints between tests: they take a third of a tiny run's time."""
    if request.node.nodeid.startswith(REPLAYING):
        yield
        return
    from tests.helpers import cached_replays

    with pytest.MonkeyPatch.context() as patch:  # the `monkeypatch` fixture would be undone too late
        cached_replays.install(patch)
        yield


@pytest.fixture(autouse=True)
def _seed():
    import torch

    try:
        torch.manual_seed(0)
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:  # the CUDA context is broken: xdist starts another worker
            os._exit(1)
        raise
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads, "the test changed torch's number of threads"


@pytest.fixture(scope="module")
def in_float32():
    """Default the compute dtype to float32 on every machine.

    For tests that compare generated tokens: in bfloat16 the two likeliest tokens are often within a rounding of each
    other, so another order of sums may choose the other one.
    """
    import torch

    from halfbyte.utils.hardware import ComputeDtype

    with pytest.MonkeyPatch.context() as patch:
        chosen = ComputeDtype(torch.float32, "requested by the test")
        patch.setattr("halfbyte.loading.load.compute_dtype", lambda device: chosen)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    import torch

    marks.sample(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {name: position for position, name in enumerate(LONGEST)}
        items.sort(key=lambda item: (rank.get(unit(item.nodeid), len(rank)), unit(item.nodeid), item.path))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """Return a function that saves a tiny random model of a family in several safetensors shards, once per session."""
    import torch
    import transformers

    made = {}

    def make(family="Llama", dtype="float32", **keys) -> Path:
        key = (family, dtype, *sorted(keys.items()))
        if key not in made:
            torch.manual_seed(len(family))
            config = getattr(transformers, f"{family}Config")(**(TINY | keys))
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
            for parameter in model.parameters():  # HF starts norms at one and biases at zero: make them matter
                parameter.data += 0.02 * torch.randn_like(parameter)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder, max_shard_size="100KB")
            made[key] = folder
        return made[key]

    return make
