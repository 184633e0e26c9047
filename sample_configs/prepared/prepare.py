"""Writes houses.csv, with gaps, and load.csv, the hourly load of two houses, which the configs in this folder read."""

import csv
import math
import random
from pathlib import Path

random.seed(0)


def write(name, header, rows):
    """Write a CSV file."""
    with Path(name).open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


houses = []
for number in range(400):
    area, rooms, age = random.gauss(110, 30), random.randint(1, 7), random.randint(0, 90)
    price = 1500 * area + 9000 * rooms - 800 * age + random.gauss(0, 5000)
    gaps = random.random()
    houses.append(
        [f"Lane {number}", "" if gaps < 0.1 else f"{area:.1f}", rooms, "" if gaps > 0.95 else age, f"{price:.0f}"]
    )
write("houses.csv", ["address", "area", "rooms", "age", "price"], houses)

hours = [(house, hour) for house in ("north", "south") for hour in range(24 * 30)]
load = [
    [
        f"2026-06-{1 + hour // 24:02d} {hour % 24:02d}:00:00",
        house,
        f"{15 + 5 * math.sin(hour / 24 * 2 * math.pi):.2f}",
        f"{2 + math.sin(hour / 24 * 2 * math.pi - len(house) + (house == 'north')) + random.gauss(0, 0.1):.3f}",
    ]
    for house, hour in hours
]
write("load.csv", ["time", "house", "temperature", "load"], load)
