"""From what the engine did to what the client gets: text, tool calls, log probabilities, usage, and what
speculation was worth."""
