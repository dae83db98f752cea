"""Prompts of our own writing: one TOML file a category, to read and to extend.

A file holds `[[templates]]` and `[slots]`. A template has `text`, what the user asks, and may have

- `system`: a system message (without it, the model's own default applies),
- `earlier`: turns before `text`, the user's and the assistant's alternately,
- `follow_ups`: what is asked after the model's own answers.

In each of them `{place}` is replaced by one of the values of the slot `place`, the same one wherever the
template names it; `{place:2}` is a second value, different from the first. A slot is a list of texts, a
list of tables whose fields are named as in `{passage.text}`, or a range of numbers
`{ from = 2, to = 9, step = 1 }` (both ends belong to it). Slots may be used in every file, whichever
defines them. `shared.toml` and `passages.toml` define slots alone. Values are put in as they are: braces
in them mean nothing. An "a" before a slot becomes "an" where the value begins with a vowel.
"""
