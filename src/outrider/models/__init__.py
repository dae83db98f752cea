"""Model files: what they say of themselves, and how a name leads to one."""
