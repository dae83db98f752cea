"""An OpenAI-compatible server over one session: many requests, one engine."""
