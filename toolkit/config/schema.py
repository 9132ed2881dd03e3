"""JSON Schema (draft 7, which every editor reads) of the YAML files of ``--config``, from a command's options."""

import json
import re
from collections.abc import Mapping
from operator import ge, gt, le, lt
from typing import Any, Literal, get_args, get_origin

from toolkit.config.classes import Option, parameters_of
from toolkit.config.command import CommandOptions
from toolkit.config.types import is_mapping, is_restricted, union_members

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
    options = {key: o for key, o in command.options().items() if key.partition(".")[0] not in command.class_options}
    # a dotted key is the same as a key in a group
    properties: dict[str, Schema] = {"extensions": {"anyOf": _types(str | list[str])}}
    properties |= {key: _property(option) for key, option in options.items()}
    for group, cls in command.groups.items():
        fields = {key: {"$ref": f"#/properties/{group}.{key}"} for key in parameters_of(cls)}
        properties[group] = _mapping(fields, parameters_of(cls), nullable=True)
    definitions = dict(_DEFINITIONS)
    for base in command.class_options:
        classes = {name: parameters_of(cls) for name, cls in command.choices(base).items()}
        properties[base], fields = _class_option(base, classes, definitions)
        properties |= {f"{base}.{key}": schema for key, schema in fields.items()}
        options |= {f"{base}.{key}": option for inner in classes.values() for key, option in inner.items()}
    schema: Schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"toolkit {name}",
        **_mapping(properties, options),
        "definitions": definitions,
    }
    return json.loads(json.dumps(schema, default=str))


def format_schema(schema: Any, depth: int = 2) -> str:
    """Return the schema as JSON with a line for each option and class."""
    if depth == 0 or not isinstance(schema, dict):
        return json.dumps(schema)
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {format_schema(v, depth - 1)}" for k, v in schema.items()) + "\n}"


def _class_option(
    base: str, classes: Mapping[str, Mapping[str, Option]], definitions: dict[str, Schema]
) -> tuple[Schema, dict[str, Schema]]:
    """Return the schemas of an option such as ``data``, a class name or a mapping, and of the classes' options.

    Adds ``definitions`` of the classes.
    """
    import_path = {"type": "string", "pattern": r"\."}  # of a user's class, whose options are unknown here
    forms: list[Schema] = [{"enum": [*classes]}, import_path]
    forms.append({"type": "object", "properties": {"class_path": import_path}, "required": ["class_path"]})
    merged: dict[str, Option] = {}
    for name, options in classes.items():
        definition = f"#/definitions/{base}.{name}"
        definitions[f"{base}.{name}"] = _mapping(
            {key: _property(option) for key, option in options.items()}, options, nullable=True
        )
        fields: Schema = {key: {"$ref": f"{definition}/properties/{key}"} for key in options}
        fields |= {"class_path": {"const": name}, "init_args": {"$ref": definition}}
        forms.append(_mapping(fields, options) | {"required": ["class_path"]})
        merged |= options
    # without a class, the class is a flag or in another file
    fields = {key: _any_of(classes, base, key) for key in sorted(merged)}
    forms.append(_mapping({**fields, "init_args": {"type": "object"}}, merged))
    return {"anyOf": forms}, {key: fields[key] for key in merged}


def _any_of(classes: Mapping[str, Mapping[str, Option]], base: str, key: str) -> Schema:
    """Return the schema of an option that several classes have."""
    schemas = {name: _property(options[key]) for name, options in classes.items() if key in options}
    owners = {json.dumps(schema, default=str): name for name, schema in schemas.items()}
    refs = [{"$ref": f"#/definitions/{base}.{name}/properties/{key}"} for name in owners.values()]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _mapping(fields: Schema, options: Mapping[str, Option], *, nullable: bool = False) -> Schema:
    """Return the schema of a mapping without other keys, except entries of mappings, such as ``sources.web.weight``."""
    patterns: Schema = {f"^{re.escape(key)}\\.": {} for key, option in options.items() if is_mapping(option.kind)}
    kind = ["object", "null"] if nullable else "object"
    schema: Schema = {"type": kind, "properties": fields, "additionalProperties": False}
    return schema | ({"patternProperties": patterns} if patterns else {})


def _property(option: Option) -> Schema:
    """Return an option's schema. null means the default."""
    schema: Schema = {"description": option.doc} if option.doc else {}
    if isinstance(option.default, int | float | str):
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
