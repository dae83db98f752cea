"""`python -m outrider` is `outrider`."""

from outrider.cli.main import main

if __name__ == "__main__":
    main()
