"""The keywords of JSON Schema: those that are enforced, and those that say nothing about the value."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ENFORCED = _words(
    "$ref additionalItems additionalProperties allOf anyOf const enum exclusiveMaximum exclusiveMinimum"
    " format items maxItems maxLength maxProperties maximum minItems minLength minProperties minimum"
    " multipleOf oneOf pattern patternProperties prefixItems properties required type"
)

ANNOTATIONS = _words(
    "$anchor $comment $defs $id $schema $vocabulary contentEncoding contentMediaType contentSchema"
    " default definitions deprecated description discriminator example examples externalDocs id readOnly"
    " title writeOnly xml"
)
"""Those of the standard and of OpenAPI. The standard lets `content…` be an annotation."""

STANDARD = _words(
    "$dynamicAnchor $dynamicRef $recursiveAnchor $recursiveRef contains dependencies dependentRequired"
    " dependentSchemas else if maxContains minContains not propertyNames then unevaluatedItems"
    " unevaluatedProperties uniqueItems"
)
"""Known, and not enforced."""

NEUTRAL = (
    ("uniqueItems", False),
    ("unevaluatedItems", True),
    ("unevaluatedProperties", True),
    ("not", False),
)
"""Keywords with values that allow everything."""

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)

SCHEMA_MAPS = ("properties", "patternProperties")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = ("items", "additionalItems", "additionalProperties")

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
BOUNDS = (
    ("minimum", "maximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)
TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
