"""What a run is given, looked over with pathlib and json alone: a path that is wrong is said before torch is imported.

What may be a hub id is left to those that fetch it. Each check is the one that stands where its input is read.
"""

from __future__ import annotations

from pathlib import Path

from .. import hub
from ..checkpoint_files import read_adapter_config
from ..config import RunConfig, resolve
from ..data.sources import files_of
from ..models.find import look_over


def look_over_inputs(config: RunConfig) -> None:
    """Whether the model, the adapter to continue from and the datasets of a run are there.

    Raises:
        HalfbyteError: which is not, and what to do.
    """
    look_over(resolve(config).origin)
    if config.adapter_path:
        read_adapter_config(Path(config.adapter_path))
    look_over_datasets(config.dataset, config.eval_dataset)


def look_over_datasets(*names: str | list[str] | None) -> None:
    """Whether the files of datasets are there.

    Raises:
        DataError: which are not, and what is nearest.
    """
    for given in names:
        for name in [given] if isinstance(given, str) else given or []:
            if files_of(name) is None:
                hub.reach()
                hub.say_silent()
