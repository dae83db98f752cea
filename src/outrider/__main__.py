"""The program's start: `outrider`, and `python -m outrider`."""

import gc
import signal


def main() -> None:
    """Run the program. Until a command runs, Ctrl-C ends it at once, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # until a command runs: nothing that is imported can be given back
    from outrider.cli.main import main as program  # loads slowly

    program()


if __name__ == "__main__":
    main()
