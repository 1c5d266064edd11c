"""Quick imports of torch, transformers and PEFT."""

import gc
import importlib.util
import sys

import peft
import pytest

from halfbyte.cli.startup import quick_imports


@pytest.fixture
def as_before():
    frozen = gc.get_freeze_count()
    yield
    peft.import_utils.is_bnb_available.cache_clear()
    if not frozen:
        gc.unfreeze()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fails", [False, True])
def test_no_collections_and_no_bitsandbytes_inside_both_afterwards(monkeypatch, as_before, fails):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    del sys.modules["bitsandbytes"]
    assert importlib.util.find_spec("bitsandbytes")
    peft.import_utils.is_bnb_available.cache_clear()
    try:
        with quick_imports():
            assert not gc.isenabled()
            assert importlib.util.find_spec("bitsandbytes") is None
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert importlib.util.find_spec("bitsandbytes")
    assert peft.import_utils.is_bnb_available() == fails


def test_modules_that_are_imported_stay(monkeypatch, as_before):
    module = type(sys)("bitsandbytes")
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    with quick_imports():
        assert sys.modules["bitsandbytes"] is module
    assert sys.modules["bitsandbytes"] is module
