"""The `outrider` program: errors become messages and exit statuses."""

from __future__ import annotations

import sys

from outrider.cli.commands import carry_out
from outrider.cli.output import USAGE_ERROR, leave, open_streams
from outrider.core.errors import OutriderError
from outrider.core.files import reason_of
from outrider.core.numbers import readable


def main() -> None:
    """Run the program. Errors become one message and exit status 2."""
    open_streams()
    try:
        sys.exit(carry_out(sys.argv[1:]))
    except OutriderError as error:
        what = str(error)
    except OSError as error:
        if error.filename is None:
            raise
        what = f"{error.filename}: {reason_of(error)}. Check it, or name another."
    except MemoryError:
        what = "memory: this machine has none left. Choose a smaller model or context (-c)."
    from rich.text import Text  # loads slowly

    from outrider.cli.screen import Screen

    Screen(stderr=True, soft_wrap=True).say(Text.assemble(("error: ", "bold red"), readable(what)))
    leave(USAGE_ERROR)
