"""The prompts of a certificate when none are given: the kinds of text that models are used for."""

from __future__ import annotations

BUILT_IN: tuple[str, ...] = (
    "Write the opening paragraph of a story about a lighthouse keeper who receives a letter.",
    "Rename the variable x to total in this function and return all of it:\n\n"
    "def add_up(values):\n    x = 0\n    for value in values:\n        x += value\n    return x\n",
    "Extract name, city and age as JSON: Maria Keller, who is 34, moved from Graz to Porto last spring.",
    "List eight things to pack for a week of hiking, one per line, with a reason for each.",
    "Translate into French, then repeat the English: The train to the coast leaves at half past six.",
    "A tank holds 240 litres. It loses 3 litres an hour and gains 50 a day. When is it dry? Show the steps.",
    "Summarise in two sentences: Bees find their way by the sun. On cloudy days they read the pattern of "
    "polarised light instead. A bee that has found food dances, and the dance tells direction and distance.",
    "Explain to a ten-year-old why the sky is blue and sunsets are red.",
    "Correct the spelling and change nothing else: Their going to recieve the package tommorow, "
    "becuase the curier was delayd in the mountians.",
    "Give five unusual names for a bakery that is open at night.",
    "Write a SQL query that lists each customer with the number of orders placed in 2023, largest first.",
    "Fill in the rest of the table:\n\n| country | capital |\n|---|---|\n| Norway | Oslo |\n"
    "| Kenya | Nairobi |\n| Peru | Lima |\n| Japan |",
)
"""One conversation's first message each."""
