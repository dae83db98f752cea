"""From what was asked to requests of the engine: tokens, grammars, settings. Everything here may take a
while (templates, tokenizers, schemas), so it runs in threads beside the event loop."""
