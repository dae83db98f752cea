"""Work on many machines through Ray: nothing here is imported without `--ray`."""

import os

# Read when Ray is imported: what it says of workers that died would go to standard output, among the results.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
