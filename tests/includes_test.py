#!/usr/bin/python3
"""No unit of the module includes another in a circle, and the core knows nothing of Redis.

A unit is foo.h and foo.cc together: that foo.cc includes bar.h and bar.cc includes foo.h is a
circle too, though the compiler does not mind. Ends with 0 only if there is none in module/core and
module/redis, and no file of module/core includes redismodule.h or a file of module/redis.

    tests/includes_test.py [FOLDER]    another folder than module/
"""

import pathlib
import re
import sys

INCLUDE = re.compile(r'\s*#\s*include\s*[<"]([^>"]+)[>"]')
ROOMS = ("core", "redis")


def included(file):
    """What a file includes, as it is written there, each with its line."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if match := INCLUDE.match(line):
            yield number, match[1]


def unit_of(path):
    return path.removesuffix(".cc").removesuffix(".h")


def read(module):
    """The graph of units, and what the core must not include.

    The graph is {unit: {unit that it includes: "file:line" of the first such include}}.
    """
    files = sorted(file for room in ROOMS for file in (module / room).rglob("*.*")
                   if file.suffix in (".h", ".cc"))
    units = {unit_of(str(file.relative_to(module))) for file in files}
    graph = {unit: {} for unit in sorted(units)}
    forbidden = []
    for file in files:
        path = str(file.relative_to(module))
        for number, name in included(file):
            where = f"{path}:{number}"
            if path.startswith("core/") and (name.endswith("redismodule.h")
                                             or "redis" in pathlib.PurePath(name).parts):
                forbidden.append(f"{where} includes {name}")
            # Beside the folder of all rooms, a file may be named from its own.
            for candidate in (name, str(pathlib.PurePath(path).parent / name)):
                to = unit_of(candidate)
                if to in units and to != unit_of(path):
                    graph[unit_of(path)].setdefault(to, where)
    return graph, forbidden


def find_circle(graph):
    """The units of a shortest circle, the first one again at the end; empty if there is none."""
    shortest = []
    for start in graph:
        came_from = {start: None}
        reached = [start]
        for unit in reached:  # grows meanwhile: breadth first
            if start in graph[unit]:
                circle = [start]
                while unit is not None:
                    circle.append(unit)
                    unit = came_from[unit]
                circle.reverse()
                if not shortest or len(circle) < len(shortest):
                    shortest = circle
                break
            for to in graph[unit]:
                if to not in came_from:
                    came_from[to] = unit
                    reached.append(to)
    return shortest


def main():
    default = pathlib.Path(__file__).resolve().parent.parent / "module"
    module = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    graph, forbidden = read(module)
    for room in ROOMS:
        if not any(unit.startswith(room + "/") for unit in graph):
            sys.exit(f"includes_test: there is no unit in {module / room}")
    circle = find_circle(graph)
    for line in forbidden:
        print(f"The core must not know Redis: {line}")
    if circle:
        print("Units that include each other in a circle:")
        for unit, to in zip(circle, circle[1:]):
            print(f"  {unit} -> {to}  ({graph[unit][to]})")
    if forbidden or circle:
        sys.exit(1)
    edges = sum(len(to) for to in graph.values())
    print(f"{len(graph)} units, {edges} edges, no circle")


if __name__ == "__main__":
    main()
