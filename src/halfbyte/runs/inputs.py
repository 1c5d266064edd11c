"""What a run is given, looked over with pathlib and json alone: a path that is wrong is said before torch is imported.

What may be a hub id is left to those that fetch it. Each check is the one that stands where its input is read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..auxiliary.find import look_over_teacher
from ..config import RunConfig, resolve
from ..config.combinations import DIVIDE_ROWS, undivided_sizes
from ..config.schema import PATHS
from ..data.sources import files_of
from ..loading.find import preflight_model
from ..reading import look, why
from ..reading.model_config import CONFIG, read_config
from ..reading.tensors import ADAPTER, ADAPTER_AGAIN, ADAPTER_CONFIG, read_adapter_config, read_header
from ..rl.rewards import read_specs
from ..rl.rewards.judges import look_over_judges
from ..utils import hub
from ..utils.errors import ConfigError, of_key
from ..utils.text import brief

WRITTEN = (".html", ".json", ".jsonl", ".md", ".yaml")  # what a run's files end in
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
LONGEST_BELOW = "x" * 160  # as long as what a run and its checkpoints put below output_dir


def look_over_spelling(config: RunConfig) -> None:
    """Whether the paths of a run are written out: no shell has been at them.

    Raises:
        ConfigError: one names a variable of the environment.
    """
    for key in PATHS:
        value = getattr(config, key)
        for path in value if isinstance(value, list) else [value]:
            if not isinstance(path, str) or not (found := VARIABLE.search(path)) or os.path.lexists(path):
                continue
            name = found[1] or found[2]
            known = os.environ.get(name)
            fix = f"write {VARIABLE.sub(known, path, count=1)}" if known else "write the path itself"
            unset = "" if known else ", and is not set"
            raise ConfigError(f"{key}: {path}: {name} is not filled in, as a shell would{unset}", fix)


def look_over_inputs(config: RunConfig) -> None:
    """Whether the model, the adapter to continue from, what rewards and the datasets of a run are there.

    Raises:
        HalfbyteError: which is not, and what to do.
    """
    preflight_model(resolve(config).origin)
    if config.adapter_path:
        with of_key("adapter_path"):
            read_adapter_config(Path(config.adapter_path))
            read_header(Path(config.adapter_path) / ADAPTER, ADAPTER_AGAIN)
    if config.teacher_model_name_or_path is not None:
        with of_key("teacher_model_name_or_path"):
            look_over_teacher(config)
    if config.chat_template_path is not None:
        with of_key("chat_template_path"):
            _look_over_template(config.chat_template_path)
    look_over_judges(config, read_specs(config.reward_funcs or [], None))
    look_over_datasets(config.dataset, config.eval_dataset)
    _look_over_apart(config)


def _look_over_apart(config: RunConfig) -> None:
    """Whether what the run writes lies outside of folders that are read as data."""
    for given in (config.dataset, config.eval_dataset):
        for name in [given] if isinstance(given, str) else given or []:
            if os.path.isdir(name) and config.output_path.resolve().is_relative_to(Path(name).resolve()):
                said = f"output_dir: {config.output_dir} lies in the dataset's folder {name}, whose files are all read"
                raise ConfigError(said, "name a folder outside of it")


def look_over_division(config: RunConfig) -> None:
    """Whether heads and channels of a model in a folder can be divided as `parallel` says, before processes start.

    Raises:
        CheckpointError: its config.json cannot be read.
        ConfigError: they cannot be.
    """
    layout, folder = resolve(config).parallel, Path(resolve(config).origin.name)
    if layout is None or layout.tensor == 1 or not folder.is_dir():
        return
    found = read_config(folder)
    text = found.get("text_config")
    sizes = text if isinstance(text, dict) else found
    heads, key_heads, channels = (
        sizes.get(name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    heads = heads if isinstance(heads, int) else 0  # what is not one number is looked at layer by layer, loaded
    key_heads = key_heads if isinstance(key_heads, int) else heads
    channels = channels if isinstance(channels, int) else 0
    if wrong := undivided_sizes(layout.tensor, heads, key_heads, channels):
        raise ConfigError(f"parallel: {{tensor: {layout.tensor}}}: {wrong}", DIVIDE_ROWS)


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


def _look_over_template(name: str) -> None:
    fix = "give the path of a Jinja file"
    kind = look(name, ConfigError, fix)
    if kind != "file":
        raise ConfigError(f"{name} is a folder" if kind else f"there is no file {name}", fix)


def look_over_output(output_dir: str) -> None:
    """Whether a run can write into `output_dir`, which need not be there; nothing is made.

    Raises:
        ConfigError: it cannot, and why.
    """
    fix = "name a folder that you may write to"
    if not output_dir.strip():
        raise ConfigError("output_dir is empty", fix)
    path = Path(output_dir)
    try:
        there = next(place for place in (path, *path.parents) if os.path.lexists(place))
        for below in (*path.relative_to(there).parts, LONGEST_BELOW):
            _exists(there / below)  # the system's own rules: for names, and for the whole
        _exists(path / LONGEST_BELOW)
        what = "" if there.is_dir() else "is a file" if there.exists() else "is a link to nothing"
        if there.resolve().is_relative_to("/proc") or there.resolve().is_relative_to("/sys"):
            what = "is the system's own, and holds no files of anybody"
        if not what and not os.access(there, os.W_OK | os.X_OK):
            what = "is not yours to write to"
    except (OSError, ValueError) as error:  # ValueError: a NUL
        reason = why(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"output_dir: cannot write into {brief(output_dir)}: {reason}", fix) from error
    if what:
        raise ConfigError(f"output_dir: cannot write into {path}: {there} {what}", fix)
    for name in (CONFIG, ADAPTER_CONFIG):
        if (path / name).exists():
            raise ConfigError(f"output_dir: {path} holds a model ({name})", "name a folder for the run alone")
    for held in path.iterdir() if path.is_dir() else ():
        if held.suffix in WRITTEN and held.is_dir():
            raise ConfigError(f"output_dir: {held} is a folder, where a run writes a file", "move it elsewhere")


def _exists(path: Path) -> bool:
    """As `os.path.lexists`, but what the name itself is refused for is raised."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True
