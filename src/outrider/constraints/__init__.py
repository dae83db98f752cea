"""What an output may be: JSON schemas, regular expressions, choices and grammars, on llguidance."""
