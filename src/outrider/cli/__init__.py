"""The command line: thin layers over the Python API."""
