"""JSON Schema: what of it is enforced, what is refused, and how JSON is spaced."""

from outrider.constraints.json_schema.prepare import prepare

__all__ = ["prepare"]
