"""What every test relies on."""

import os

from hypothesis import settings

from outrider.backends.gguf import libraries
from outrider.tuning import options

# It runs in a process of its own, and forbids that process the network: nothing to look for doctests in.
collect_ignore = ["client_litellm.py"]

# No deadline: the machines that run the tests are shared, and a slow one finds no bug by it.
# In CI the same examples are tried every time, so that a failure is one of the change.
settings.register_profile("outrider", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("outrider")

# Only the libraries of packages: a build for the machine's own CPU may or may not be in the user's cache.
vars(libraries)["native_library"] = lambda: None

# A choice between libraries need not be a good one here: one round of calls is enough.
vars(options)["_QUICK_SECONDS"] = 0.0
