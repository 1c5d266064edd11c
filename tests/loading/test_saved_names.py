"""Names of formats in saved runs keep the meaning that they had when the run was written."""

import pytest

from halfbyte.config import RunConfig, dump_config
from halfbyte.config.run_config import with_specs
from halfbyte.formats import KBit, named
from halfbyte.runs.saved import SavedPaths, saved_config


def config_of(folder, **keys):
    return RunConfig(model_name_or_path=str(folder), dataset="d", **keys)


@pytest.fixture
def reload(tmp_path):
    def saved(config, overrides=()):
        (tmp_path / "config.resolved.yaml").write_text(dump_config(config))
        return saved_config(SavedPaths(str(tmp_path), None, tmp_path / "config.resolved.yaml"), overrides)

    return saved


def test_a_name_means_what_it_meant(tmp_path, reload):
    mixed = {"*.q_proj": "kbit3", "*.o_proj": "16bit", "*": "nf4"}
    assert reload(config_of(tmp_path, quantization="kbit3")).quantization == "kbit:3:bnf"
    assert reload(config_of(tmp_path, quantization=mixed)).quantization == mixed | {"*.q_proj": "kbit:3:bnf"}
    rounded = config_of(tmp_path, quantization="16bit", qat_scheme="kbit2")
    assert reload(rounded).qat_scheme == "kbit:2:bnf"


def test_a_name_given_now_means_what_it_means_now(tmp_path, reload):
    assert reload(config_of(tmp_path, quantization="kbit4"), ["quantization=kbit3"]).quantization == "kbit3"


def test_a_run_written_now_has_specs(tmp_path, reload):
    config = with_specs(config_of(tmp_path, quantization="kbit3"), KBit.names)
    assert config.quantization == named("kbit3").spec
    assert reload(config).quantization == config.quantization
    assert with_specs(config_of(tmp_path), KBit.names) == config_of(tmp_path)
