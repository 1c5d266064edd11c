"""What can be said of a run before torch is imported: a wrong path is answered at once."""

from __future__ import annotations

from halfbyte.config import RunConfig
from halfbyte.methods import method_of

from ..runs.inputs import look_over_inputs, look_over_output
from ..runs.lock import check_free
from .checkpoint import starting_point


def look_over_run(config: RunConfig, resume: str | bool | None = None) -> None:
    """Whether a run may write into its folder, and its model, adapter and data are there.

    Args:
        resume: as in `prepare_run`.

    Raises:
        HalfbyteError: what is wrong, and what to do.
    """
    method_of(config)
    look_over_output(config.output_dir)
    check_free(config.output_path)
    starting_point(config, config.resume_from_checkpoint if resume is None else resume, contents=False)
    look_over_inputs(config)
