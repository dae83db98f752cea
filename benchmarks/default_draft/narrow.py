"""A narrow workload: one task, many inputs. Parcels are booked by mail; each mail is to become JSON.

    python benchmarks/default_draft/narrow.py --count 800 --out parcels.jsonl

The mails are templates of our own with names, places, dates and weights to fill in; `--seed` chooses them.
"""

from __future__ import annotations

import json
import random

from harness import argument_parser, run_program

SYSTEM = (
    "Extract the booking from the mail. Answer with one JSON object and nothing else: sender (name, city), "
    "recipient (name, city), parcels (number), weight_kg, pickup_date (YYYY-MM-DD), pickup_time, insured "
    "(true or false), note (null if there is none)."
)

NAMES = (
    "Marta Lindqvist", "Tom Akers", "Ines Calado", "Jonas Weidner", "Priya Raman", "Olu Adeyemi",
    "Hanna Kovacs",
    "Pierre Aubert", "Keiko Mori", "Samuel Boateng", "Elif Demir", "Rory McBride", "Lucia Ferri",
    "Anton Sorokin",
    "Noor Haddad", "Greta Solberg", "Diego Paz", "Mei Chen", "Clara Novak", "Victor Osei", "Amelie Roth",
    "Harriet Blythe", "Bilal Sheikh", "Yara Mendes", "Felix Brandt", "Saoirse Quinn", "Mateus Rocha",
    "Ida Berg",
)  # fmt: skip
CITIES = (
    "Leeds", "Porto", "Graz", "Utrecht", "Malmö", "Bristol", "Lyon", "Gdansk", "Turin", "Cork",
    "Ghent", "Bergen",
    "Dresden", "Seville", "Tartu", "Basel", "Aarhus", "Nantes", "Brno", "Cardiff", "Verona", "Zagreb",
)  # fmt: skip
THINGS = (
    "books", "ceramic tiles", "bicycle parts", "winter clothes", "a desk lamp", "board games",
    "coffee beans",
    "spare parts for a loom", "printed brochures", "two guitars", "seed samples", "camera lenses",
    "model trains",
)  # fmt: skip
NOTES = (
    "Please ring twice, the bell is quiet.", "The yard gate is left open.", "Fragile: keep upright.",
    "Call me ten minutes before you come.", "The parcels stand in the garage.", "Use the back entrance.",
    "Leave the receipt with the neighbour.", "Do not stack them.",
)  # fmt: skip
MAILS = (
    "Hello,\n\n{count} {parcels} with {things} should go from {city} to {name2} in {city2}. All "
    "together they "
    "weigh {weight} kg. Could you collect on {day} at {time}? {insured} {note}\n\nThanks\n{name}",
    "Dear team,\nplease book a pickup in {city} on {day}, {time}. It is {count} {parcels}, {weight} "
    "kilos in all, "
    "{things}. The recipient is {name2}, {city2}. {insured} {note}\nBest requests, {name}, {city}",
    "Booking\nFrom: {name}, {city}\nTo: {name2}, {city2}\nWhat: {count} {parcels} ({things}), {weight} kg\n"
    "When: {day}, {time}\n{insured}\n{note}",
    "Hi, it's {name} again. Same thing as last month: {things} for {name2}, only that it is {city2} "
    "this time and "
    "{count} {parcels}, about {weight} kg. I am in {city} on {day} and ready from {time}. {insured} {note}",
    "To whom it may concern: on {day} at {time} our driver cannot do the tour to {city2}. Would you "
    "take {count} "
    "{parcels} of {things} ({weight} kg) from our shop in {city}? They are for {name2}. {insured} {note}\n"
    "Regards\n{name}",
)
MONTHS = ("March", "April", "May", "June", "September", "October", "November")


def mail(rng: random.Random) -> str:
    """One mail."""
    (name, name2), (city, city2) = rng.sample(NAMES, 2), rng.sample(CITIES, 2)
    count = rng.randint(1, 9)
    wanted = rng.random() < 0.5
    text = rng.choice(MAILS).format(
        name=name, name2=name2, city=city, city2=city2, count=count,
        parcels="parcel" if count == 1 else "parcels",
        things=rng.choice(THINGS), weight=f"{rng.randint(2, 60)}.{rng.choice('05')}",
        day=f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.choice((2024, 2025, 2026))}",
        time=f"{rng.randint(7, 18)}:{rng.choice(('00', '15', '30', '45'))}",
        insured="Please insure it." if wanted else "No insurance is needed.",
        note=rng.choice(NOTES) if rng.random() < 0.5 else "",
    )  # fmt: skip
    return text.strip()


def main() -> None:
    parser = argument_parser(__doc__, seed=0)
    parser.add_argument("--count", type=int, default=800)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    lines = []
    for number in range(arguments.count):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": mail(rng)}]
        lines.append(json.dumps({"id": f"parcels-{number}", "messages": messages}) + "\n")
    arguments.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
