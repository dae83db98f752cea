"""What every part shares: data, errors, contracts. Imports nothing else of the project."""
