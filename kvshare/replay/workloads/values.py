"""Made-up values: what people fill into slots, what headers and tool results change to."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence

FIRST_NAMES = (
    "Aisha", "Bruno", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Katya", "Liam",
    "Mina", "Noor", "Otto", "Priya", "Rosa", "Sven",
)  # fmt: skip
LAST_NAMES = (
    "Adler", "Baker", "Costa", "Diaz", "Evans", "Fischer", "Garcia", "Haas", "Ito", "Jensen", "Kaya",
    "Lopez", "Meyer", "Novak", "Okafor", "Peters",
)  # fmt: skip
PLACES = (
    "Lisbon", "Warsaw", "Nairobi", "Osaka", "Toronto", "Zagreb", "Lima", "Hanoi", "Utrecht", "Malaga",
    "Graz", "Tampere", "Cork", "Basel", "Porto",
)  # fmt: skip
PRODUCTS = (
    "travel kettle", "desk lamp", "rain jacket", "trail shoes", "office chair", "bike helmet", "water filter",
    "phone case", "baking tin", "wool blanket", "garden hose", "reading light", "tool box", "camping stove",
)  # fmt: skip
TOPICS = (
    "rising energy prices", "a community garden", "the history of tea", "remote teams", "night trains",
    "a small bakery", "urban cycling", "early music", "solar roofs", "school lunches", "used books",
    "wooden bridges", "sleep and shift work", "local news", "repairing phones",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip


def person(draw: random.Random) -> str:
    return f"{draw.choice(FIRST_NAMES)} {draw.choice(LAST_NAMES)}"


def date(draw: random.Random) -> str:
    return f"{draw.randint(1, 28)} {draw.choice(MONTHS)} {draw.randint(2023, 2026)}"


def clock(draw: random.Random) -> str:
    return f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}:{draw.randint(0, 59):02}"


def value_for(slot: str, draw: random.Random) -> str:
    """Something that fits what the slot seems to ask for, by its name."""
    name = set(re.split(r"[^a-z]+", slot.lower()))
    if _any(name, ("date", "time", "day", "deadline", "datum")):
        return date(draw)
    if _any(name, ("number", "id", "amount", "price", "count", "age", "year", "size", "length", "nummer")):
        return str(draw.randint(10, 99_999))
    if _any(name, ("city", "country", "location", "place", "address", "ort")):
        return draw.choice(PLACES)
    if _any(name, ("product", "item", "order", "brand", "model")):
        return draw.choice(PRODUCTS)
    if _any(name, ("name", "author", "person", "customer", "client", "patient", "user")):
        return person(draw)
    return f"{draw.choice(TOPICS)} in {draw.choice(PLACES)}"


def _any(name: Collection[str], words: Sequence[str]) -> bool:
    return any(word in name for word in words)
