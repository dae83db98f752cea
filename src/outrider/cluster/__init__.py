"""Work on many machines through Ray: nothing here is imported without `--ray`."""
