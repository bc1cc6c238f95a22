"""Parts of a molecule and the letters of its SMILES that write them."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

ATOM = re.compile(r"\[[^\]]*\]|Cl|Br|[A-Za-z]")


def scaffold(molecule: Any) -> set[int]:
    """Return the atoms of a molecule's rings and of what links them: all that is left
    when ends of chains are taken off until there are none."""
    in_rings = {atom for ring in molecule.GetRingInfo().AtomRings() for atom in ring}
    neighbors = {}
    for atom in molecule.GetAtoms():
        neighbors[atom.GetIdx()] = {other.GetIdx() for other in atom.GetNeighbors()}
    left = set(neighbors)
    while True:
        ends = {atom for atom in left - in_rings if len(neighbors[atom] & left) < 2}
        if not ends:
            return left
        left -= ends


def ring_system(molecule: Any) -> set[int]:
    """Return the atoms of the largest system of rings that share atoms, of equals the
    first one; none without a ring."""
    systems: list[set[int]] = []
    for ring in molecule.GetRingInfo().AtomRings():
        joined = set(ring)
        apart = []
        for system in systems:
            if system & joined:
                joined |= system
            else:
                apart.append(system)
        systems = [*apart, joined]
    return max(systems, key=lambda system: (len(system), -min(system)), default=set())


def owners(text: str) -> list[int]:
    """Return the number of the atom that each letter of a SMILES belongs to: of a
    bond and of the parentheses around a branch the atom that follows, of a ring's digit
    the one before. Atoms count from 0, as rdkit numbers them."""
    result: list[int | None] = [None] * len(text)
    atom = -1
    place = 0
    branches = []
    while place < len(text):
        match = ATOM.match(text, place)
        if match is not None:
            atom += 1
            result[place : match.end()] = [atom] * (match.end() - place)
            place = match.end()
            continue
        letter = text[place]
        if letter == "(":
            branches.append(atom + 1)
            result[place] = atom + 1
        elif letter == ")":
            result[place] = branches.pop()
        elif letter.isdigit():
            result[place] = atom
        else:
            result[place] = atom + 1
        place += 1
    return result


def unknown_letters(text: str, atoms: set[int]) -> list[bool]:
    """Return whether each letter of a SMILES belongs to one of these atoms."""
    return [owner in atoms for owner in owners(text)]


def with_masks(text: str, unknown: Sequence[bool]) -> str:
    """Return a text with [MASK:n] in place of each n letters that are unknown."""
    parts = []
    for is_unknown, group in groupby(
        zip(unknown, text, strict=True), lambda pair: pair[0]
    ):
        letters = "".join(letter for _, letter in group)
        parts.append(f"[MASK:{len(letters)}]" if is_unknown else letters)
    return "".join(parts)
