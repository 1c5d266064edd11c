"""Reading a run's configuration: a YAML file, overrides, other tools' keys, and error messages for all of them.

Keys are named as in PEFT, TRL and transformers. Keys of other tools with the same meaning are mapped with a notice. Any
other unknown key is an error that names the most similar key.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from ..utils.errors import ConfigError, UsageError
from ..utils.notices import notice, remark
from ..utils.text import brief
from .aliases import HINTS
from .foreign import Ignored, Mapped, Refused, foreign_names, overridden_keys, translate
from .methods import defaults_of
from .resolved import Storage
from .run_config import RunConfig
from .schema import QuantizationSection
from .section import Section, nearest
from .yaml import Located, dump_value, parse_scalar, read_mapping

MOST_PROBLEMS = 20

AnySection = TypeVar("AnySection", bound=Section)


def load_config(
    path: Path | str | None,
    overrides: Iterable[str] | dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
) -> RunConfig:
    """Read a YAML file, apply overrides, map foreign names, and validate.

    Args:
        path: the YAML file, or None for overrides only.
        overrides: `["learning_rate=1e-4", "--r", "8"]`, values in YAML's spelling; or a dictionary of values.
        defaults: values for keys that neither gives, instead of the schema's defaults.

    Raises:
        ConfigError: all problems, each with its key, its place (`run.yaml:4`) and the allowed values.
    """
    given = read_mapping(path, TEXT_KEYS) if path else {}
    if isinstance(overrides, dict):
        written = {key: Located(value, "argument") for key, value in overrides.items()}
    else:
        written = _parse_overrides(list(overrides or ()))
    if path and not (given or written or defaults):
        raise ConfigError(f"{path} is empty", "write keys into it; `halfbyte init MODEL DATA` prints them")
    config = _validated(RunConfig, (given, written), defaults or {})
    if defaults_of(config.method) and "learning_rate" not in config.model_fields_set:
        trained = "adapters" if config.use_peft else "all weights"
        rate = f"learning_rate: {config.learning_rate:g}, the default of method: {config.method} for {trained}"
        remark("learning_rate", rate)
    if config.eval_steps is not None and not (config.eval_dataset or config.eval_split_size):
        notice(
            "eval_steps", "eval_steps has no effect: there is no held-out data (set eval_split_size or eval_dataset)"
        )
    return config


def storage_of(storage: Storage | None = None, /, **keys: Any) -> Storage:
    """Return `storage`, or the one that quantization keys describe (`load_in_4bit`, `quantization`, ...).

    Other tools' names are mapped with a notice, as in a run's file.

    Raises:
        ConfigError: an unknown key, a value of another type, keys that contradict each other, or keys and a storage.
    """
    if storage is None:
        given = {key: Located(value, "argument") for key, value in keys.items()}
        return _validated(QuantizationSection, [given]).storage
    if keys:
        raise ConfigError(f"{', '.join(keys)} in addition to a storage", "give one of the two")
    return storage


def _validated(
    section: type[AnySection], layers: Iterable[dict[str, Located]], defaults: Mapping[str, Any] | None = None
) -> AnySection:
    """Validate the keys of all layers as a section; later layers override earlier ones."""
    problems: list[ConfigError] = []
    given: dict[str, Located] = {}
    for written in layers:
        given |= _map_foreign_keys(written, problems)
    keys = section.model_fields
    problems += [_unknown(key, given[key].where, keys) for key in given if key not in keys]
    if problems:
        raise _joined(problems)
    try:
        return section(**{**(defaults or {}), **{key: setting.value for key, setting in given.items()}})
    except ValidationError as error:
        kinds = {(key_of(detail), detail["type"]): detail for detail in reversed(error.errors(include_url=False))}
        raise _joined([explain(detail, given) for detail in reversed(kinds.values())]) from None


def _parse_overrides(tokens: list[str]) -> dict[str, Located]:
    """Parse `key=value`, `--key=value` and `--key value`; the last value of a repeated key counts."""
    found: dict[str, Located] = {}
    while tokens:
        token = tokens.pop(0)
        key, equals, text = token.removeprefix("--").partition("=")
        if not equals:
            if not token.startswith("--"):
                raise UsageError(f"command line: {brief(token)} is not an override", "write key=value")
            if not tokens or tokens[0].startswith("--"):
                raise UsageError(f"command line: {token} needs a value", f"write {token} VALUE, or {key}=VALUE")
            text = tokens.pop(0)
        key = key.replace("-", "_")
        try:
            value = parse_scalar(text, f"command line: {key}={brief(text)}", key in TEXT_KEYS)
        except ConfigError:
            if key not in SINGLE_TEXT_KEYS or not text.isprintable():
                raise
            value = text  # a valid folder name that is not YAML, as in `output_dir=[a]b`
        found[key] = Located(value, "command line")
    return found


def _map_foreign_keys(written: dict[str, Located], problems: list[ConfigError]) -> dict[str, Located]:
    """Map other tools' keys to ours with a notice each; add keys that cannot be mapped to `problems`."""
    values = {key: setting.value for key, setting in written.items()}
    overridden = overridden_keys(values)
    own = {key: setting for key, setting in written.items() if key in RunConfig.model_fields and key not in overridden}
    for key, setting in written.items():
        if key in RunConfig.model_fields:
            continue
        match translate(key, values):
            case None:
                problems.append(_unknown(key, setting.where, RunConfig.model_fields))
            case Refused(why, fix):
                problems.append(ConfigError(f"{setting.where}: {why}", fix))
            case Ignored(why):
                if why:
                    notice(f"ignored {key}", f"{setting.where}: {key} is ignored: {why}")
            case Mapped(keys):
                as_ours = ", ".join(dump_value(ours, value) for ours, value in keys.items())
                notice(f"alias {key}", f"{setting.where}: {key} is read as {as_ours}")
                for ours, value in keys.items():
                    if ours in own and own[ours].value != value:
                        message = (
                            f"{setting.where}: {key} is read as {as_ours}, but {own[ours].where} has another value"
                        )
                        problems.append(ConfigError(message, f"keep one of {key} and {ours}"))
                    own.setdefault(ours, Located(value, f"{setting.where}: {key}"))
    return own


def _unknown(key: str, where: str, keys: Collection[str]) -> ConfigError:
    hint = HINTS.get(key, "")
    near = hint if hint in keys else nearest(key, keys if key in RunConfig.model_fields else [*keys, *foreign_names()])
    return ConfigError(
        f"{where}: unknown key {brief(key)}", f"did you mean {near}?" if near else "`halfbyte init` lists the keys"
    )


def key_of(detail: Any) -> str:
    """Return the key of a pydantic error."""
    return str(detail.get("ctx", {}).get("key") or detail["loc"][0])


def explain(detail: Any, given: dict[str, Located]) -> ConfigError:
    """Convert a pydantic error to a ConfigError with its key, place and allowed values."""
    context, key = detail.get("ctx", {}), key_of(detail)
    if detail["type"] == "missing":
        return ConfigError(f"{key} is missing", f"add a line `{key}: ...` ({RunConfig.model_fields[key].description})")
    where = f"{given[key].where}: " if key in given and given[key].where else ""
    if detail["type"] == "contradiction":
        return ConfigError(where + context["message"], context["fix"])
    if "near" in context or detail["type"] in ("empty", "format", "limit", "steps", "whole"):
        message, near = f"{where}{key} {detail['msg']}", context.get("near")
    else:
        value = given[key].value
        message = f"{where}{key} must be {allowed(key)}, not {brief(value)}"
        near = nearest(value, _choices(RunConfig.model_fields[key].annotation)) if isinstance(value, str) else ""
    return ConfigError(
        message, f"did you mean {near}?" if near else f"correct it: {RunConfig.model_fields[key].description}"
    )


def _joined(problems: list[ConfigError]) -> ConfigError:
    unique = list({str(problem): problem for problem in problems}.values())
    if len(unique) == 1:
        return unique[0]
    shown = [f"- {problem}" for problem in unique[:MOST_PROBLEMS]]
    more = [f"- and {len(unique) - MOST_PROBLEMS} more"] if len(unique) > MOST_PROBLEMS else []
    return ConfigError("\n".join([f"{len(unique)} problems:", *shown, *more]))


def allowed(key: str) -> str:
    """Return the values of a key in words: `nf4 or fp4`, `a whole number above 0`, `text or null`."""
    field = RunConfig.model_fields[key]
    return " or ".join(dict.fromkeys(_in_words(field.annotation, field.metadata)))


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _in_words(arguments[0], [*getattr(arguments[1], "metadata", ()), *arguments[1:]])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _in_words(argument, metadata)
    elif origin is Literal:
        yield from map(str, arguments)
    elif origin is list:
        mappings = " and mappings" if any(get_origin(each) is dict for each in get_args(arguments[0])) else ""
        yield f"a list of {'numbers' if float in arguments else 'text'}{mappings}"
    elif origin is dict:
        yield f"a mapping from {' or '.join(_in_words(arguments[0]))} to {' or '.join(_in_words(arguments[1]))}"
    else:
        plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
        yield plain[annotation] + (_bounds(metadata) if annotation in (int, float) else "")


def _bounds(metadata: Iterable[Any]) -> str:
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
    limits = [
        f" {word} {limit:,.15g}"
        for rule in metadata
        for name, word in words.items()
        if (limit := getattr(rule, name, None)) is not None
    ]
    return " and".join(limits).replace(" and to ", " to ")


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is dict:  # its keys are not values
        return []
    return [choice for argument in get_args(annotation) for choice in _choices(argument)]


def _kinds(key: str) -> set[Any]:
    annotation = RunConfig.model_fields[key].annotation
    return set(get_args(annotation)) if get_origin(annotation) in (Union, types.UnionType) else {annotation}


# Keys whose value is text even if it looks like a number, and the subset that takes no list.
TEXT_KEYS = frozenset(
    key for key in RunConfig.model_fields if str in _kinds(key) and not _kinds(key) & {bool, int, float}
)
SINGLE_TEXT_KEYS = frozenset(key for key in TEXT_KEYS if _kinds(key) <= {str, type(None)})
