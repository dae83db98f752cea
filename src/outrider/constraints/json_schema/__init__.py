"""JSON Schema: what of it is enforced, what is refused, and how JSON is spaced."""

from outrider.constraints.json_schema.prepare import prepare
from outrider.constraints.json_schema.style import writing_options

__all__ = ["prepare", "writing_options"]
