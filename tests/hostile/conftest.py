"""The stage and what every case finds: made once for all of `tests/hostile/`."""

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import halfbyte
from halfbyte.utils.files import cache_folder
from tests.helpers.hostile.cases import GOOD_CHECK
from tests.helpers.hostile.inputs import STOPPED, make_common
from tests.helpers.hostile.stage import Stage

HERE, HELPERS = Path(__file__).parent, Path(__file__).parents[1] / "helpers" / "hostile"
SOURCE = Path(halfbyte.__file__).parents[1]
# What the runs below import most of: a child that did would do it for itself alone.
FIRST = ["transformers.models.llama.modeling_llama", "halfbyte.plan.shapes", "halfbyte.train.run"]


def pytest_collection_modifyitems(items):
    """Those of `make test` go to one process of xdist: the stage costs more to start than many a case."""
    for item in items:
        if item.nodeid.startswith("tests/hostile/") and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.xdist_group("stage"))


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """A user's, with caches of this session's; built kernels are those that the other tests built."""
    home = tmp_path_factory.mktemp("home")
    (home / "cache").mkdir()
    native = cache_folder() / "native"
    native.mkdir(parents=True, exist_ok=True)
    (home / "cache" / "native").symlink_to(native)
    paths = os.pathsep.join([str(SOURCE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "CUDA_VISIBLE_DEVICES": "",  # commands answer alike on a machine with a GPU
        "HALFBYTE_CACHE": str(home / "cache"),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": paths,
        "TERM": "xterm",
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.fixture(scope="session")
def stage(environment, tmp_path_factory):
    """Its children's disk can be full, where there is a compiler: see `full_disk.c`."""
    preload = {}
    if shutil.which("cc"):
        shim = tmp_path_factory.mktemp("shim") / "full_disk.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", str(HELPERS / "full_disk.c"), "-o", str(shim), "-ldl"], check=True
        )
        preload = {"LD_PRELOAD": str(shim)}
    stage = Stage(environment | preload)
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def base(stage, environment, tmp_path_factory):
    """The inputs of every case, made once for all workers; the stage has imported what a run imports."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder, scratch = root / "hostile", tmp_path_factory.mktemp("scratch")
    with open(root / "hostile.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made := not (root / "modules.json").exists():
            folder.mkdir()

            def run(*arguments, **wishes):
                wishes = {"environment": environment, "limit": 240, "names_modules": True} | wishes
                ended = stage.run(list(arguments), folder, scratch, **wishes)
                assert ended.code == 0, (ended.err or ended.out).decode()
                return ended.modules

            make_common(folder)
            stage.import_all(FIRST)
            stage.warm("tests.helpers.hostile.inputs:replay")
            modules = run("model", call="tests.helpers.hostile.inputs:make_model")
            stage.import_all(modules)
            keys = ["output_dir=run", "max_steps=4", "save_steps=2", "eval_split_size=2", "lora_dropout=0.1"]
            modules += run("train", "run.yaml", *keys)
            killed = {"signal": "SIGKILL", "when": "stopped/checkpoint-4", "environment": environment}
            ended = stage.run(["train", "run.yaml", *STOPPED.split()], folder, scratch, **killed)
            assert ended.code == -9, ended.err.decode()
            assert len([*folder.glob("stopped/checkpoint-*")]) == 2
            (folder / "stopped/.lock").unlink()
            modules += run("generate", "run", "prompts.jsonl", "--max-new-tokens", "4")
            (root / "modules.json").write_text(json.dumps(list(dict.fromkeys(modules))))
    stage.import_all(json.loads((root / "modules.json").read_text()))
    if not made:
        stage.warm("tests.helpers.hostile.inputs:replay")
    place = tmp_path_factory.mktemp("good")
    shutil.copytree(folder, place, dirs_exist_ok=True)
    checks = [stage.run(["check", "run.yaml"], place, scratch, environment=environment) for _ in range(3)]
    assert not any(check.code for check in checks)
    stage.slowness = max(1.0, sorted(check.seconds for check in checks)[1] / GOOD_CHECK)
    return folder
