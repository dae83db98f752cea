"""`outrider serve` up to the point where the server's own libraries are needed: settings from all sources."""

from __future__ import annotations

import os
from pathlib import Path

from outrider.core.extras import require_extra
from outrider.core.schema import setting
from outrider.server.settings import ServeSettings, read_configuration


class ServeOptions(ServeSettings):
    """Settings that the command line gives. Others may come from the environment or from a file."""

    config: Path | None = setting(
        None,
        "Settings as TOML, below the command line and the environment. Default: $OUTRIDER_CONFIG.",
        panel="Server",
    )


def serve_configured(options: ServeOptions) -> int:
    """Serve; returns the exit status."""
    given = options.model_fields_set & ServeSettings.model_fields.keys()
    flags = {name: getattr(options, name) for name in given}
    configuration = read_configuration(flags, os.environ, options.config)
    require_extra("outrider serve", "serve")
    from outrider.cli.serve import serve

    return serve(configuration)
