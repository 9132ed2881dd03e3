"""JSON Schema (draft 7, which every editor reads) of the YAML files of ``--config``, from a command's options."""

import json
import re
from collections.abc import Mapping
from operator import ge, gt, le, lt
from typing import Any, Literal, get_args, get_origin

from toolkit.config.classes import Option, parameters_of
from toolkit.config.command import CommandOptions
from toolkit.config.types import is_restricted, union_members

Schema = dict[str, Any]
_NUMBER = r"^[+-]?(\d[\d_]*\.?\d*|\.\d+|\.?inf)([eE][+-]?\d+)?$"  # YAML readers differ on 1e6 and 2_000
_LIMITS = {gt: "exclusiveMinimum", ge: "minimum", lt: "exclusiveMaximum", le: "maximum"}
_DEFINITIONS: dict[str, Schema] = {
    "bool": {"type": "boolean"},
    "str": {"type": ["string", "number", "boolean", "null"]},  # a scalar of another type is read as text
    "int": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": _NUMBER}]},
    "float": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": _NUMBER}]},
}


def json_schema(name: str, command: CommandOptions) -> Schema:
    """Return the schema of a command's YAML file. It rejects unknown keys, and keys with values of a wrong type."""
    options = command.options()
    definitions = dict(_DEFINITIONS)
    properties: dict[str, Schema] = {"extensions": {"anyOf": _types(str | list[str])}}
    for key, option in options.items():
        group = key.rpartition(".")[0]
        if group not in command.class_options:
            properties[key] = _property(option)  # a dotted key is the same as a key in a group
    for group in command.groups:
        prefix = f"{group}."
        inner = {k.removeprefix(prefix): properties[k] for k in properties if k.startswith(prefix)}
        properties[group] = _mapping({k: {"$ref": f"#/properties/{prefix}{k}"} for k in inner}, inner, nullable=True)
    described = dict(properties)
    for base in command.class_options:
        properties[base] = _class_option(command, base, definitions)
        for cls in command.choices(base):
            for key, value in definitions[f"{base}.{cls}"]["properties"].items():
                properties[f"{base}.{key}"] = _any_of(definitions, base, key)
                described[f"{base}.{key}"] = value
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"toolkit {name}",
        **_mapping(properties, described),
        "definitions": definitions,
    }
    return json.loads(json.dumps(schema, default=str))


def format_schema(schema: Any, depth: int = 2) -> str:
    """Return the schema as JSON with a line for each option and class."""
    if depth == 0 or not isinstance(schema, dict):
        return json.dumps(schema)
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {format_schema(v, depth - 1)}" for k, v in schema.items()) + "\n}"


def _class_option(command: CommandOptions, base: str, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of an option such as ``data``: a class name, or a mapping with its options."""
    names = list(command.choices(base))
    is_import_path = {"type": "string", "pattern": r"\."}  # of a user's class, whose options are unknown here
    forms: list[Schema] = [{"enum": names}, is_import_path]
    forms.append({"type": "object", "properties": {"class_path": is_import_path}, "required": ["class_path"]})
    for name, cls in command.choices(base).items():
        definition = f"{base}.{name}"
        inner = {key: _property(option) for key, option in parameters_of(cls).items()}
        definitions[definition] = _mapping(inner, inner, nullable=True)
        fields = {key: {"$ref": f"#/definitions/{definition}/properties/{key}"} for key in inner}
        fields |= {"class_path": {"const": name}, "init_args": {"$ref": f"#/definitions/{definition}"}}
        forms.append(_mapping(fields, inner) | {"required": ["class_path"]})
    # without a class, the class is a flag or in another file
    all_keys = {key: value for name in names for key, value in definitions[f"{base}.{name}"]["properties"].items()}
    fields = {key: _any_of(definitions, base, key) for key in sorted(all_keys)}
    forms.append(_mapping({**fields, "init_args": {"type": "object"}}, all_keys))
    return {"anyOf": forms}


def _any_of(definitions: dict[str, Schema], base: str, key: str) -> Schema:
    """Return the schema of an option that several classes have."""
    owners = {
        json.dumps(definition["properties"][key], default=str): name
        for name, definition in definitions.items()
        if name.startswith(f"{base}.") and key in definition["properties"]
    }
    refs = [{"$ref": f"#/definitions/{name}/properties/{key}"} for name in owners.values()]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _mapping(properties: Schema, described: Mapping[str, Schema], *, nullable: bool = False) -> Schema:
    """Return the schema of a mapping without other keys, except entries of mappings, such as ``sources.web.weight``."""
    dotted = [k for k, v in described.items() if any("additionalProperties" in part for part in v.get("anyOf", ()))]
    patterns: Schema = {f"^{re.escape(key)}\\.": {} for key in dotted}
    kind = ["object", "null"] if nullable else "object"
    schema: Schema = {"type": kind, "properties": properties, "additionalProperties": False}
    return schema | ({"patternProperties": patterns} if patterns else {})


def _property(option: Option) -> Schema:
    """Return an option's schema. null means the default."""
    schema: Schema = {"description": option.doc} if option.doc else {}
    if not option.is_required and isinstance(option.default, bool | int | float | str):
        schema["default"] = option.default
    return schema | {"anyOf": [*_types(option.kind), {"type": "null"}]}


def _types(kind: Any) -> list[Schema]:
    """Return the schemas of a type's alternatives, without null."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [{"enum": list(parts)}]
    if origin in (list, tuple):
        items: Schema = {"anyOf": _types(parts[0])} if parts else {}
        size = {"minItems": len(parts), "maxItems": len(parts)} if origin is tuple else {}
        return [{"type": "array", "items": items, **size}]
    if origin is dict or kind is dict:
        value = {"anyOf": _types(parts[1])} if parts and parts[1] is not Any else True
        return [{"type": "object", "additionalProperties": value}]
    if parts:  # a union
        return [schema for part in union_members(kind) for schema in _types(part)]
    if is_restricted(kind):
        bounds = {_LIMITS[sign]: limit for sign, limit in kind._restrictions}
        number, text = _DEFINITIONS[kind._type.__name__]["anyOf"]
        return [number | bounds, text]
    name = getattr(kind, "__name__", "")
    return [{"$ref": f"#/definitions/{name}"} if name in _DEFINITIONS else {}]
