"""What a command can be told, as a class: a field is at once a flag, a key of the YAML file and an entry of the record.

No torch in this file: ``--help`` reads it, and has to answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

DTYPES = ("float32", "float64", "bfloat16", "float16")
SCORES = (
    "penumbral", "umbral", "penumbral_finite", "umbral_finite", "laplacian", "half_space", "hyperboloid", "dot",
)  # fmt: skip
#: with that of graph attention, which is for edges alone
ALL_SCORES = (*SCORES, "concatenation")


class WrongUse(Exception):
    """The command was told something it cannot do: exit code 2."""


class Failed(Exception):
    """The command could not be done: exit code 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"``, or nothing if no known word is near. A flag is also found by the end of its name.

    >>> nearest("umbrel", ["umbral", "dot"])
    "; did you mean 'umbral'?"
    >>> nearest("--lr", ["--train.lr", "--train.steps"])
    "; did you mean '--train.lr'?"
    """
    known = list(known)
    end = re.split(r"\.|--", word)[-1]
    found = [name for name in known if name.endswith(f".{end}")] or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def check_choice(flag: str, value: str, known: Iterable[str]) -> None:
    """Raises with the nearest guess, unless the value is one of the known ones."""
    known = tuple(known)
    if value not in known:
        raise WrongUse(f"--{flag}: {value!r} is not one of {', '.join(known)}{nearest(str(value), known)}")


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), least: float | None = None, short: str | None = None
) -> Any:
    """A field of a command: its default, its help, what it may be, and a letter that stands for it (``-q``)."""
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "least": least, "short": short}
    )


def section(
    default: type[Config],
    help: str,
    *,
    chosen_from: Mapping[str, type[Config]] | None = None,
    leave_out: Mapping[str, str] | None = None,
) -> Any:
    """A field of a command that is itself a config: its options become flags ``--FIELD.OPTION``.

    chosen_from: classes of which ``--FIELD NAME`` chooses one. leave_out: options that the command does not offer, and
    the flag that it has instead.
    """
    metadata = {"help": help, "default": default, "chosen_from": chosen_from, "leave_out": leave_out or {}}
    return dataclasses.field(default_factory=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Base of the commands. The first line of a docstring is the command's line in ``coneheads --help``."""

    #: what a section, if it is chosen, changes in the defaults of other flags, by their full names
    recipe: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if is_section(field):
                continue
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if field.metadata["choices"] and one is not None:
                    check_choice(field.name, one, field.metadata["choices"])
                least = field.metadata["least"]
                if least is not None and one is not None and not one >= least:  # not a number is too little, too
                    raise WrongUse(f"--{field.name}: must be at least {least:g}; got {one:g}")


C = TypeVar("C", bound=Config)


def is_section(field: dataclasses.Field[Any]) -> bool:
    return "leave_out" in field.metadata


class Flag(NamedTuple):
    """An option of a command, with all that the command line and the YAML file need to know of it."""

    key: str  # train.lr: where its value is in the YAML file and in the record
    spelled: str  # as the key, but `task` for task.name
    type: Any
    default: Any
    help: str
    short: str | None = None

    @property
    def expected(self) -> str:
        """The type in words, for messages."""
        return re.sub(r"<class '(\w+)'>", r"\1", str(self.type)).replace("None", "null")


def flags(cls: type[Config], chosen: Mapping[str, str] | None = None) -> dict[str, Flag]:
    """All flags of a command by their keys, if these sections are chosen; with the defaults of their recipes."""
    found: dict[str, Flag] = {}
    recipe: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field, section_cls in _parts(cls, chosen or {}):
        if section_cls is None:
            found[field.name] = _flag(field, hints)
            continue
        if chosen_from := field.metadata["chosen_from"]:
            name = next(name for name, one in chosen_from.items() if one is section_cls)
            found[f"{field.name}.name"] = Flag(
                f"{field.name}.name",
                field.name,
                str,
                name,
                f"one of {', '.join(chosen_from)}: {field.metadata['help']}",
            )
        inside = typing.get_type_hints(section_cls)
        for inner in dataclasses.fields(section_cls):
            if inner.name not in field.metadata["leave_out"]:
                found[f"{field.name}.{inner.name}"] = _flag(inner, inside, f"{field.name}.")
        recipe |= section_cls.recipe
    changed = {key: found[key]._replace(default=value) for key, value in recipe.items() if key in found}
    return found | changed


def choices(cls: type[Config]) -> dict[str, Mapping[str, type[Config]]]:
    """The sections of a command that are chosen by name, and what from."""
    return {
        field.name: field.metadata["chosen_from"]
        for field in dataclasses.fields(cls)
        if is_section(field) and field.metadata["chosen_from"]
    }


def no_such_flag(word: str, cls: type[Config], chosen: Mapping[str, str]) -> str:
    """What to say of a flag that there is not, written as ``--train.lrr`` or as the key ``train.lrr``."""
    known = flags(cls, chosen)
    dashes, name = ("--", word[2:]) if word.startswith("--") else ("", word)
    head, _, tail = name.partition(".")
    for field in dataclasses.fields(cls):
        if field.name != head or not is_section(field):
            continue
        if instead := field.metadata["leave_out"].get(tail):
            return f"; this command has {dashes + instead!r} instead"
        for other, options in (field.metadata["chosen_from"] or {}).items():
            if tail in {inner.name for inner in dataclasses.fields(options)}:
                return f" of {known[f'{head}.name'].default}; it is one of the {head} {other!r}"
    return nearest(word, [dashes + (flag.spelled if dashes else flag.key) for flag in known.values()])


def as_dict(config: Config) -> dict[str, Any]:
    """The config as nested plain values, with the names of what was chosen: what YAML and JSON can hold."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Config):
            names = [name for name, cls in (field.metadata["chosen_from"] or {}).items() if cls is type(value)]
            inside = {key: one for key, one in as_dict(value).items() if key not in field.metadata["leave_out"]}
            result[field.name] = ({"name": names[0]} if names else {}) | inside
        else:
            result[field.name] = list(value) if isinstance(value, tuple) else value
    return result


def to_yaml(config: Config) -> str:
    """The config as the text of a file that ``--config`` reads."""
    import yaml  # type: ignore[import-untyped]

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Lists in one line, sections in a line an option."""

    Dumper.add_representer(
        list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
    )
    return str(yaml.dump(as_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def from_dict(cls: type[C], mapping: Mapping[str, Any]) -> C:
    """The config that ``as_dict`` turned into the mapping. What the mapping leaves out has its default.

    Raises WrongUse for a key that is no flag, and for a value that its flag cannot take.
    """
    given = flat(cls, mapping)
    chosen = chosen_in(cls, given)
    check(cls, chosen, given)
    return build(cls, chosen, given)


def flat(cls: type[Config], mapping: object) -> dict[str, Any]:
    """The mapping by full keys such as ``train.lr``; ``task: tree`` is short for ``task: {name: tree}``."""
    if not isinstance(mapping, Mapping):
        raise WrongUse(f"expected flags and their values, as in `seed: 1`; got {mapping!r}")
    sections = {field.name: field.metadata for field in dataclasses.fields(cls) if is_section(field)}
    result: dict[str, Any] = {}
    for name, value in mapping.items():
        key = str(name)
        if key in sections and sections[key]["chosen_from"] and isinstance(value, str):
            result[f"{key}.name"] = value
        elif isinstance(value, Mapping) and (value or key in sections):
            result |= {f"{key}.{inner}": one for inner, one in value.items()}
        elif key not in sections:
            result[key] = value
        elif value is not None:
            raise WrongUse(f"{key}: expected its flags and their values, as in `{key}: {{...}}`; got {value!r}")
    return result


def chosen_in(cls: type[Config], given: Mapping[str, Any]) -> dict[str, str]:
    """The choices that the values make, by section."""
    found = {name: given[f"{name}.name"] for name in choices(cls) if f"{name}.name" in given}
    for name, value in found.items():
        check_choice(name, value, choices(cls)[name])
    return found


def check(cls: type[Config], chosen: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Raises if a key is no flag of the command, or a value not of the type of its flag."""
    known = flags(cls, chosen)
    for key, value in given.items():
        if key not in known:
            raise WrongUse(f"the config has {key!r}, which is no flag{no_such_flag(key, cls, chosen)}")
        if not _is(value, known[key].type):
            raise WrongUse(f"--{known[key].spelled}: expected {known[key].expected}; got {value!r}")


def build(cls: type[C], chosen: Mapping[str, str], given: Mapping[str, Any]) -> C:
    """The config of these choices and values, both checked."""
    values = {key: _of_type(given.get(key, flag.default), flag.type) for key, flag in flags(cls, chosen).items()}
    arguments: dict[str, Any] = {}
    for field, section_cls in _parts(cls, chosen):
        if section_cls is None:
            arguments[field.name] = values[field.name]
            continue
        names = [inner.name for inner in dataclasses.fields(section_cls)]
        inside = {name: values[f"{field.name}.{name}"] for name in names if f"{field.name}.{name}" in values}
        try:
            arguments[field.name] = section_cls(**inside)
        except WrongUse as error:  # a section does not know its own name
            own = re.compile(rf"--(?=(?:{'|'.join(names)})(?![\w-]))")
            raise WrongUse(own.sub(f"--{field.name}.", str(error))) from None
    return cls(**arguments)


def _parts(
    cls: type[Config], chosen: Mapping[str, str]
) -> Iterable[tuple[dataclasses.Field[Any], type[Config] | None]]:
    """The fields of a command; with its class, if a field is a section."""
    for field in dataclasses.fields(cls):
        if not is_section(field):
            yield field, None
        elif field.name in chosen:
            yield field, field.metadata["chosen_from"][chosen[field.name]]
        else:
            yield field, field.metadata["default"]


def _flag(field: dataclasses.Field[Any], hints: Mapping[str, Any], prefix: str = "") -> Flag:
    key = prefix + field.name
    return Flag(key, key, hints[field.name], field.default, field.metadata["help"], field.metadata["short"])


def _is(value: object, hint: Any) -> bool:
    """Whether a plain value can be of the type: a list stands for a tuple, a whole number for a float."""
    if isinstance(hint, types.UnionType):
        return any(_is(value, one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, (list, tuple)) and all(_is(one, typing.get_args(hint)[0]) for one in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _of_type(value: Any, hint: Any) -> Any:
    """The value with lists as tuples, and whole numbers as floats where a float is asked for."""
    if isinstance(value, (list, tuple)):
        return tuple(_of_type(one, typing.get_args(hint)[0]) for one in value)
    wanted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return float(value) if float in wanted and type(value) is int else value
