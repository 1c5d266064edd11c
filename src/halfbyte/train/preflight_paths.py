"""What can be said of a run before torch is imported: a wrong path is answered at once."""

from __future__ import annotations

from pathlib import Path

from halfbyte.config import RunConfig
from halfbyte.config.methods import SCORES
from halfbyte.methods import METHODS, Method, method_of
from halfbyte.utils.errors import CheckpointError

from ..reading.tensors import read_adapter_config
from ..runs.inputs import check_inputs, check_output_dir, check_path_spelling, check_tensor_sizes
from ..runs.lock import check_free
from .checkpoint import starting_point


def look_over_run(config: RunConfig, resume: str | bool | None = None) -> None:
    """Whether a run may write into its folder, and its model, adapter and data are there.

    Args:
        resume: as in `prepare_run`.

    Raises:
        HalfbyteError: what is wrong, and what to do.
    """
    method = method_of(config)
    check_path_spelling(config)
    check_output_dir(config.output_dir)
    check_free(config.output_path)
    starting_point(config, config.resume_from_checkpoint if resume is None else resume, contents=False)
    check_inputs(config)
    check_tensor_sizes(config)
    if config.adapter_path:
        _look_over_kind(config, method)


def _look_over_kind(config: RunConfig, method: Method) -> None:
    """Whether the adapter to continue from has the head that scores which the method trains, and no other."""
    kind = read_adapter_config(Path(str(config.adapter_path))).get("task_type")
    if kind != method.scores and (method.scores or kind in SCORES):
        said = f"a head that scores ({kind})" if kind in SCORES else "no head that scores"
        made = next((other for other, each in METHODS.items() if each.scores == kind and kind in SCORES), "sft")
        raise CheckpointError(
            f"adapter_path: {config.adapter_path} has {said}, and method: {config.method} trains"
            f" {'another' if kind in SCORES and method.scores else 'one' if method.scores else 'none'}",
            f"set method: {made}, as it was trained, or continue from another adapter",
        )
