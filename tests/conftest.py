"""Shared fixtures: where the real data lies, tiny models, the seed, a share of the GPU, and a log of failures."""

import contextlib
import fcntl
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from zlib import crc32

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin until others have had a core take it from them

SHARED = Path(os.environ.get("HALFBYTE_SHARED", Path(__file__).resolve().parents[2] / "shared"))


GIB = 2**30
GPU_SHARE = 4  # GiB that a process's tests may take of a GPU, however many processes share it


def pytest_addoption(parser):
    parser.addoption("--log-to", metavar="FOLDER", help="append failures and seconds to files there as they happen")


# Folders whose tests share processes that cost more to start than to ask; as they are the longest, they go first.
WHOLE = ("tests/hostile/", "tests/parallel/")
# Then files of over ten seconds, so that no process of xdist is left with one while the others have ended.
LONG = (
    "tests/kernels/test_interpreted.py",
    "tests/train/test_grpo.py",
    "tests/train/test_served.py",
    "tests/train/test_preference.py",
    "tests/train/test_gkd.py",
    "tests/plan/test_estimate.py",
    "tests/plan/test_rank.py",
    "tests/kernels/test_linear_planes.py",
    "tests/export/test_merge_targets.py",
    "tests/cli/test_cli_check.py",
    "tests/loading/test_mixed.py",
    "tests/data/test_data_answers.py",
    "tests/generation/test_rollouts.py",
    "tests/export/test_merge.py",
    "tests/export/test_merge_kept.py",
    "tests/data/test_data_masks.py",
    "tests/kernels/test_decode_layers.py",
    "tests/plan/test_rollouts.py",
    "tests/train/test_sft.py",
    "tests/plan/test_policy.py",
)


def unit(nodeid: str) -> str:
    """What goes to one process, which makes its fixtures once."""
    return next((folder for folder in WHOLE if nodeid.startswith(folder)), nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """For --dist loadfile, which otherwise begins with the file of the most tests."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Longest(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit(nodeid)

    config.option.loadscopereorder = False
    return Longest(config, log)


def pytest_configure(config):
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0" and config.args_source == config.ArgsSource.TESTPATHS:
        # The first process rewrites assertions from the first file on, the others from the last, and where they meet
        # each finds what the other has written.
        tests = [path for path in sorted(Path(__file__).parent.iterdir(), reverse=True) if path.name[0] not in "._"]
        config.args = [str(path) for path in tests if path.is_dir() or path.match("test_*.py")]
    folder = config.getoption("--log-to")
    if folder and not hasattr(config, "workerinput"):  # workers send their reports to the one that started them
        config.pluginmanager.register(Log(Path(folder)))


def leave_out(items):
    """Mark as slow what `left_to_test_all.txt` names."""
    lines = (Path(__file__).parent / "left_to_test_all.txt").read_text().splitlines()
    shares = dict(line.split(" 1/") for line in lines if " 1/" in line)
    whole, seen = tuple(line for line in lines if line and line[0] != "#" and " 1/" not in line), set()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        test = name.partition("[")[0]
        another = test in seen and crc32(name.encode()) % int(shares.get(test, 1))
        if another or name.startswith(whole):
            item.add_marker(pytest.mark.slow)
        seen.add(test)


_imported = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """What was imported stays: collections, in the code under test too, need not go through it each time."""
    global _imported
    if len(sys.modules) > _imported + 20:  # tests import, too: the first run of a process half of transformers
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


class Log:
    """`gpu-failures.txt`, `gpu-seconds.txt`, `gpu-skipped.txt`: what is left of a session killed at its time limit; and
    `gpu-order.txt`: what each process ran, since what breaks a GPU's context may be a test before."""

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
    """A test that needs more fails alone as it does beside others."""
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
    """For a test marked `large`, while no other process has one."""
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
    """What a small run does longest is drawing its report, and waiting until the disk has its files, which no test
    outlives. Here it does neither, but inside of this context it draws."""
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
        yield context


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real weights, tokenizers and datasets; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no real data at {SHARED} (set HALFBYTE_SHARED)")
    return SHARED


@pytest.fixture(autouse=True)
def _allocator():
    """Commands that a test runs in its own process set up torch's allocator there (`utils.hardware.let_segments_grow`), and
    plans of later tests would count on it."""
    before = os.environ.get("PYTORCH_ALLOC_CONF")
    yield
    if before is None:
        os.environ.pop("PYTORCH_ALLOC_CONF", None)


REPLAYING = ("tests/plan/", "tests/loading/", "tests/modeling/", "tests/memory/", "tests/kernels/")  # and what a replay itself does


@pytest.fixture(autouse=True)
def _plans(request):
    """A tiny run takes half of its time for its plan, which is that of the run before."""
    if request.node.nodeid.startswith(REPLAYING):
        yield
        return
    import replays

    with pytest.MonkeyPatch.context() as patch:  # a test's own, made so early, would be undone after other fixtures
        replays.install(patch)
        yield


@pytest.fixture(autouse=True)
def _seed():
    import torch

    try:
        torch.manual_seed(0)
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:  # a kernel has broken this process's context: xdist starts another
            os._exit(1)
        raise
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads, "the test leaves torch another number of threads, and others other sums"


@pytest.fixture(scope="module")
def in_float32():
    """A model whose dtype nobody names computes in float32, whatever this machine is fast in.

    For tests that compare what is generated: in bfloat16 the two likeliest tokens are often within a rounding of each
    other, and a row alone and in a batch, or another way to sum, takes either.
    """
    import torch

    from halfbyte.utils.hardware import ComputeDtype

    with pytest.MonkeyPatch.context() as patch:
        chosen = ComputeDtype(torch.float32, "as the test asks")
        patch.setattr("halfbyte.loading.load.compute_dtype", lambda device: chosen)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    import torch

    leave_out(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        first = {name: at for at, name in enumerate((*WHOLE, *LONG))}
        items.sort(key=lambda item: (first.get(unit(item.nodeid), len(first)), item.path))
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
    """A function from a family's name to the folder of a tiny random model of it, in several safetensors shards."""
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
