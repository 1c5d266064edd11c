"""Seeded runs of combinations: methods × families × formats × options × resuming × merging, on tiny models.

A seed draws one run. It must finish, or be refused by an error of `halfbyte.utils.errors` before its first step; a
resumed run must be bit-equal to an uninterrupted one. `HALFBYTE_FUZZ=first:last` chooses seeds by hand.
"""

import os
import random

import pytest
from safetensors.torch import load_file

from halfbyte.config import load_config
from halfbyte.export.merge import merge
from halfbyte.train.run import train
from halfbyte.utils import notices
from halfbyte.utils.errors import HalfbyteError
from tests.helpers.tiny_cases import FAMILIES, FORMATS, METHODS, OPTIONS, Case, Place

SEEDS = 2000
TOGETHER = 20  # seeds of a test
FIRST, LAST = map(int, os.environ.get("HALFBYTE_FUZZ", f"0:{SEEDS}").split(":"))
LEVELS = ("keep", "recompute", "recompute_mlp", "checkpoint")
FEW = 4  # seeds that `make test` runs


def drawn(seed):
    """A case, and the commands after the run."""
    chance = random.Random(seed)
    family, method = chance.choice(sorted(FAMILIES)), chance.choice(sorted(METHODS))
    keys = {"method": method, "seed": seed, "dtype": chance.choice(["float32", "float32", "bfloat16"])}
    keys |= chance.choice([*FORMATS.values()])
    for options in chance.sample(OPTIONS, chance.choice([0, 1, 1, 2])):
        keys = options | keys if "method" in options else keys | options
    keys |= {"activation_checkpointing": chance.choice(LEVELS)} if chance.random() < 0.5 else {}
    return Case(f"seed {seed}: {method} {family}", family, keys), chance.choice(["", "resume", "merge", "merge"])


def run_of(place, case, output, **more):
    notices.reset_notices()
    return train(load_config(None, place.keys(case, output) | more))


def check(place, seed, folder):
    """Run a seed; return how it ended: ok, refused, or what halfbyte calls a fault of its own."""
    case, then = drawn(seed)
    try:
        run_of(place, case, folder / "run", max_steps=2, save_steps=1)
    except HalfbyteError as error:
        return f"{case.name}: {error}" if "report this" in error.fix else "refused"
    if then == "resume" and case.keys.get("use_peft", True):
        again = folder / "again"
        os.makedirs(again)
        os.rename(folder / "run/checkpoint-1", again / "checkpoint-1")
        config = load_config(None, place.keys(case, again) | {"max_steps": 2, "save_steps": 1})
        train(config, resume=str(again / "checkpoint-1"))
        mine, theirs = (load_file(each / "adapter/adapter_model.safetensors") for each in (again, folder / "run"))
        assert all(mine[name].equal(theirs[name]) for name in theirs), case.name
    if then == "merge" and case.keys["method"] not in ("reward", "prm") and case.keys.get("use_peft", True):
        try:
            merge(str(folder / "run"), folder / "merged")
        except HalfbyteError as error:
            return f"{case.name}: {error}" if "report this" in error.fix else "ok"
    return "ok"


def outcomes(tmp_path, seeds):
    place = Place(tmp_path / "place")
    place.folder.mkdir()
    place.write_rows()
    found = [check(place, seed, tmp_path / str(seed)) for seed in seeds]
    assert set(found) <= {"ok", "refused"}
    return found


@pytest.mark.slow
def test_a_few_seeds(tmp_path):
    found = outcomes(tmp_path, range(FEW))
    assert "ok" in found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(FIRST, LAST, TOGETHER))
def test_seeds(tmp_path, first):
    found = outcomes(tmp_path, range(first, min(first + TOGETHER, LAST)))
    assert found.count("ok") >= len(found) // 2
