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
from pydantic_core.core_schema import ErrorType

from ..utils.errors import ConfigError, UsageError
from ..utils.notices import notice, remark
from ..utils.text import brief
from .aliases import HINTS
from .foreign import Ignored, Mapped, Refused, foreign_names, is_foreign_section, overridden_keys, translate
from .methods import defaults_of
from .resolved import Storage
from .run_config import RunConfig
from .schema import QuantizationSection
from .section import Section, nearest
from .yaml import Located, dump_value, parse_scalar, read_mapping

MOST_PROBLEMS = 20
PYDANTIC_ERRORS = frozenset(get_args(ErrorType))

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
    file_keys = read_mapping(path, TEXT_KEYS) if path else {}
    if isinstance(overrides, dict):
        written = {key: Located(value, "argument") for key, value in overrides.items()}
    else:
        written = _parse_overrides(list(overrides or ()))
    if path and not (file_keys or written or defaults):
        raise ConfigError(f"{path} is empty", "write keys into it; `halfbyte init MODEL DATA` prints them")
    config = _validated(RunConfig, (file_keys, written), defaults or {})
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
        located = {key: Located(value, "argument") for key, value in keys.items()}
        return _validated(QuantizationSection, [located]).storage
    if keys:
        raise ConfigError(f"{', '.join(keys)} in addition to a storage", "give one of the two")
    return storage


def _validated(
    section: type[AnySection], layers: Iterable[dict[str, Located]], defaults: Mapping[str, Any] | None = None
) -> AnySection:
    """Validate the keys of all layers as a section; later layers override earlier ones."""
    problems: list[ConfigError] = []
    settings: dict[str, Located] = {}
    for written in layers:
        settings |= _map_foreign_keys(written, problems)
    if isinstance(value := settings["adapters"].value if "adapters" in settings else None, list):
        listed = settings["adapters"]
        entries = [_mapped_adapter(entry, listed, problems) for entry in value]
        settings["adapters"] = Located(entries, listed.source)
    keys = section.model_fields
    problems += [_unknown(key, settings[key].source, keys) for key in settings if key not in keys]
    if problems:
        raise _joined(problems)
    try:
        return section(**{**(defaults or {}), **{key: setting.value for key, setting in settings.items()}})
    except ValidationError as error:
        unique = {(key_of(detail), detail["type"]): detail for detail in reversed(error.errors(include_url=False))}
        raise _joined([explain(detail, settings) for detail in reversed(unique.values())]) from None


def _mapped_adapter(entry: Any, listed: Located, problems: list[ConfigError]) -> Any:
    """Return an entry of `adapters` with other tools' keys mapped to ours."""
    if not isinstance(entry, dict):
        return entry
    source = f"{listed.source}: adapters" if listed.source else "adapters"
    written = {str(key): Located(value, source) for key, value in entry.items() if key != "name"}
    mapped = {key: setting.value for key, setting in _map_foreign_keys(written, problems).items()}
    return {key: value for key, value in entry.items() if key == "name"} | mapped


def _parse_overrides(tokens: list[str]) -> dict[str, Located]:
    """Parse `key=value`, `--key=value` and `--key value`; the last value of a repeated key counts."""
    overrides: dict[str, Located] = {}
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
        overrides[key] = Located(value, "command line")
    return overrides


def _map_foreign_keys(written: dict[str, Located], problems: list[ConfigError]) -> dict[str, Located]:
    """Map other tools' keys to ours with a notice each; add keys that cannot be mapped to `problems`."""
    values = {key: setting.value for key, setting in written.items()}
    overridden = overridden_keys(values)
    known_keys = {key for key in written if key in RunConfig.model_fields and not is_foreign_section(key, values)}
    mapped = {key: written[key] for key in written if key in known_keys and key not in overridden}
    for key, setting in written.items():
        if key in known_keys:
            continue
        match translate(key, values):
            case None:
                problems.append(_unknown(key, setting.source, RunConfig.model_fields))
            case Refused(why, fix):
                problems.append(ConfigError(f"{setting.source}: {why}", fix))
            case Ignored(why):
                if why:
                    notice(f"ignored {key}", f"{setting.source}: {key} is ignored: {why}")
            case Mapped(keys):
                as_ours = ", ".join(dump_value(target, value) for target, value in keys.items())
                notice(f"alias {key}", f"{setting.source}: {key} is read as {as_ours}")
                for target, value in keys.items():
                    if target in mapped and mapped[target].value != value:
                        contradiction = f"but {mapped[target].source} has another value"
                        message = f"{setting.source}: {key} is read as {as_ours}, {contradiction}"
                        problems.append(ConfigError(message, f"keep one of {key} and {target}"))
                    mapped.setdefault(target, Located(value, f"{setting.source}: {key}"))
    return mapped


def _unknown(key: str, source: str, keys: Collection[str]) -> ConfigError:
    hint = HINTS.get(key, "")
    near = hint if hint in keys else nearest(key, keys if key in RunConfig.model_fields else [*keys, *foreign_names()])
    return ConfigError(
        f"{source}: unknown key {brief(key)}", f"did you mean {near}?" if near else "`halfbyte init` lists the keys"
    )


def key_of(detail: Any) -> str:
    """Return the key of a pydantic error."""
    return str(detail.get("ctx", {}).get("key") or detail["loc"][0])


def explain(detail: Any, settings: dict[str, Located]) -> ConfigError:
    """Convert a pydantic error to a ConfigError with its key, place and allowed values."""
    context, key = detail.get("ctx", {}), key_of(detail)
    if detail["type"] == "missing":
        return ConfigError(f"{key} is missing", f"add a line `{key}: ...` ({RunConfig.model_fields[key].description})")
    source = f"{settings[key].source}: " if key in settings and settings[key].source else ""
    if detail["type"] == "contradiction":
        return ConfigError(source + context["message"], context["fix"])
    if detail["type"] not in PYDANTIC_ERRORS:  # a validator of ours says what is wrong
        message, near = f"{source}{key} {detail['msg']}", context.get("near")
    else:
        value = settings[key].value
        message = f"{source}{key} must be {allowed(key)}, not {brief(value)}"
        near = nearest(value, _choices(RunConfig.model_fields[key].annotation)) if isinstance(value, str) else ""
    return ConfigError(
        message, f"did you mean {near}?" if near else f"correct it: {RunConfig.model_fields[key].description}"
    )


def _joined(problems: list[ConfigError]) -> ConfigError:
    unique = list({str(problem): problem for problem in problems}.values())
    if len(unique) == 1:
        return unique[0]
    shown = [f"- {problem}" for problem in unique[:MOST_PROBLEMS]]
    remaining = [f"- and {len(unique) - MOST_PROBLEMS} more"] if len(unique) > MOST_PROBLEMS else []
    return ConfigError("\n".join([f"{len(unique)} problems:", *shown, *remaining]))


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
        items = (arguments[0], *get_args(arguments[0]))
        mappings = " and mappings" if any(get_origin(item) is dict for item in items) else ""
        yield f"a list of {'numbers' if float in arguments else 'text'}{mappings}"
    elif origin is dict:
        yield f"a mapping from {' or '.join(_in_words(arguments[0]))} to {' or '.join(_in_words(arguments[1]))}"
    else:
        plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
        plain[Any] = "any value"
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
