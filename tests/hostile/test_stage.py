"""The process that runs the cases: where it dies, the case that it died of is named, and the next one finds another."""

import os
import signal
import sys

import pytest

from tests.helpers.hostile.stage import Stage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")


def test_a_stage_that_dies(environment, tmp_path):
    stage = Stage(environment)
    stage.import_all(["colorsys"])
    asked = {"environment": environment, "names_modules": True, "call": "os:getppid"}
    try:
        assert stage.run([], tmp_path, tmp_path, **asked).code == 0
        os.kill(stage._process.pid, signal.SIGKILL)
        with pytest.raises(AssertionError, match=r"code -9\).*run.yaml"):
            stage.run(["check", "run.yaml"], tmp_path, tmp_path, environment=environment)
        ended = stage.run([], tmp_path, tmp_path, **asked)
        assert ended.code == 0
        assert "colorsys" in ended.modules  # as the first one was made
    finally:
        stage.close()
