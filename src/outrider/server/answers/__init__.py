"""From what the engine did to what the client is told: text, tool calls, log probabilities, usage, and what
speculation was worth."""
