"""What pydantic found wrong, in the words of the person who wrote the file.

Pydantic's own messages tell of Python types, and of one end of a range. Here each error is put beside the
JSON Schema of the place it concerns, and that schema says what is allowed there: one source for checking and
for telling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from bridge import toml
from bridge.errors import MOST_COUNTED, printable, shown

__all__ = ["LocatedError", "allowed", "problems"]

Schema = Mapping[str, Any]
Steps = Sequence[int | str]

_LONGEST = 80  # characters of the user's own value that a message repeats
_LIMITS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "of at most",
    "exclusiveMaximum": "below",
}


class LocatedError(ValueError):
    """For a validator that knows where the fault lies below its own place: `steps` lead there."""

    def __init__(self, steps: Steps, message: str) -> None:
        self.steps = tuple(steps)
        super().__init__(message)


def problems(model: type[BaseModel], error: ValidationError, data: object, first: Sequence[str] = ()) -> dict[str, str]:
    """What is wrong with `data`: places, such as ``layers[1] (id "rnn").units``, and a sentence on each.

    The sentence says what was found there and what is allowed. `error` is what validating `data` as `model`
    raised. There are at most `MOST_COUNTED` and one, and those of the keys in `first` in any case.
    """
    root = model.model_json_schema()
    sentences: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        if len(sentences) > MOST_COUNTED and detail["loc"][:1] not in [(name,) for name in first]:
            continue
        if detail["type"] == "default_factory_not_called":  # the value that it follows from has its own error
            continue
        place, sentence = _explain(detail, root, data)
        sentences.setdefault(place, sentence)  # a union reports the same value once for each alternative
    # When a list has a faulty item, pydantic also calls the list too short: the item's own fault says more.
    return {
        place: sentence
        for place, sentence in sentences.items()
        if not any(other.startswith((f"{place}.", f"{place}[")) for other in sentences)
    }


def allowed(model: type[BaseModel]) -> dict[str, str]:
    """What each key of a table may be, in the words of the messages."""
    root = model.model_json_schema()
    return {name: _describe(schema, root) for name, schema in root["properties"].items()}


def _explain(detail: Any, root: Schema, data: object) -> tuple[str, str]:
    """The place and the sentence for one of pydantic's error records."""
    kind, steps = detail["type"], detail["loc"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, LocatedError):
        return _locate((*steps, *cause.steps), root, data).path, str(cause)
    place = _locate(steps, root, data)
    if isinstance(cause, ValueError):
        return place.path, str(cause)
    if kind == "missing":
        return place.path, f"missing, expected {_describe(place.schema, root)}"
    if kind == "extra_forbidden":
        keys = list(_locate(steps[:-1], root, data).schema["properties"])
        return place.path, f"unknown key{_suggestion(steps[-1], keys)}, expected {_one_of(keys)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _explain_tag(place)
    return place.path, f"found {_show(place.value)}, expected {_describe(place.schema, root)}"


def _explain_tag(place: _Place) -> tuple[str, str]:
    """The same for a table whose `op` (or `name`) decides what else it holds, and is missing or unknown."""
    union = _union(place.schema)
    assert union is not None, "only a discriminated union reports a tag"
    tag, allowed = union["discriminator"]["propertyName"], list(union["discriminator"]["mapping"])
    path, found = place.path, place.value
    if isinstance(found, Mapping):
        path = f"{path}.{tag}"
        if tag not in found:
            return path, f"missing, expected {_one_of(allowed)}"
        found = found[tag]
    return path, f"unknown {tag} {_show(found)}{_suggestion(found, allowed)}, expected {_one_of(allowed)}"


@dataclass(frozen=True)
class _Place:
    """Somewhere in the data: how a user would point at it, what the schema says of it, and what is there."""

    path: str
    schema: Schema
    value: object


def _locate(steps: Steps, root: Schema, data: object) -> _Place:
    """Follow a pydantic location through the schema and the data together.

    The tag of a discriminated union is a step to pydantic, but not to a reader, and is left out of the path.
    Where a location continues beyond the data (into the alternatives of a plain union), the walk stops.
    """
    path, schema, value = "", root, data
    for step in steps:
        union = _union(schema)
        if union is not None and step in union["discriminator"]["mapping"]:
            schema = _resolve({"$ref": union["discriminator"]["mapping"][step]}, root)
        elif isinstance(step, int) and isinstance(value, list | tuple):
            value = value[step]
            path += f"[{step}]"
            if isinstance(value, Mapping) and isinstance(value.get("id"), str):
                path += f" (id {_show(value['id'])})"
            options = (schema, *(_resolve(option, root) for option in schema.get("anyOf", ())))
            schema = _resolve(next((option["items"] for option in options if "items" in option), {}), root)
        elif isinstance(step, str) and isinstance(value, Mapping):
            value = value.get(step)
            path += f".{_key(step)}" if path else _key(step)
            schema = _resolve(schema.get("properties", {}).get(step, {}), root)
        else:
            break
    return _Place(path, schema, value)


def _resolve(schema: Schema, root: Schema) -> Schema:
    """The schema itself, or the definition that it refers to."""
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return schema


def _union(schema: Schema) -> Schema | None:
    """The discriminated union that `schema` is, or that is one of its alternatives."""
    return next((option for option in (schema, *schema.get("anyOf", ())) if "discriminator" in option), None)


def _describe(schema: Schema, root: Schema) -> str:
    """What a schema allows, in words."""
    schema = _resolve(schema, root)
    if "const" in schema:
        return toml.inline(schema["const"])
    if "enum" in schema:
        return _one_of(schema["enum"])
    if "anyOf" in schema:
        return " or ".join(
            f"a table with its {option['discriminator']['propertyName']}"
            if "discriminator" in option
            else _describe(option, root)
            for option in schema["anyOf"]
            if option.get("type") != "null"  # a key that may be missing: TOML has no other way to say nothing
        )
    if "discriminator" in schema:
        tag, names = schema["discriminator"]["propertyName"], schema["discriminator"]["mapping"]
        return f"a table whose {tag} is {_one_of(names)}"
    match schema.get("type"):
        case "integer":
            return _describe_number(schema, "an integer")
        case "number":
            return _describe_number(schema, "a finite number")
        case "boolean":
            return "true or false"
        case "string":
            return _describe_text(schema)
        case "array":
            return f"a list of {_describe_length(schema)}, each {_describe(schema['items'], root)}"
        case "object":
            return f"a table with {', '.join(schema['properties'])}"
    return "something else"


def _describe_number(schema: Schema, noun: str) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return str(low) if low == high else f"{noun} from {low} to {high}"
    limits = [f"{words} {schema[limit]}" for limit, words in _LIMITS.items() if limit in schema]
    return f"{noun} {' and '.join(limits)}" if limits else noun


def _describe_text(schema: Schema) -> str:
    pattern = f" that matches {schema['pattern']}" if "pattern" in schema else ""
    length = f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
    return f"a text{length}{pattern}"


def _describe_length(schema: Schema) -> str:
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    if low == high:
        return str(low)
    return f"{low} or more" if high is None else f"{low} to {high}"


def _suggestion(name: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name)[:_LONGEST], known, n=1)
    return f" (did you mean {toml.inline(close[0])}?)" if close else ""


def _one_of(names: Iterable[object]) -> str:
    shown = [toml.inline(name) for name in names]
    return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"


def _key(name: str) -> str:
    """A key of the user's as TOML writes it, cut where it is long."""
    return toml.key(name) if len(name) <= _LONGEST else f"{printable(toml.key(name[:_LONGEST]))}…"


def _show(value: object) -> str:
    """The user's own value as TOML writes it, cut where it is long."""
    if isinstance(value, str):
        value = value[: _LONGEST + 1]
    elif isinstance(value, Mapping | list | tuple) and len(value) > _LONGEST:
        return shown(value)
    text = printable(toml.inline(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
