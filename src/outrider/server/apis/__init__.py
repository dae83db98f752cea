"""The APIs that are served, a module for each: its requests, what they become (a plan), its answers, and a
`router` with its endpoints. `shapes`, `plan` and `answers` are what they share."""
