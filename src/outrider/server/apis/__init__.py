"""The APIs that are served, a module for each: its requests, what they become (a plan), its answers, and a
`router` with its endpoints. `shapes`, `messages`, `plan`, `answers` and `generation` are what they share."""
