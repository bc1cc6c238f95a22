"""The benchmark of molecules MOSES (Polykovskiy et al., arXiv 1811.12823): its data,
which ship in the wheel of its package (`pip download --no-deps molsets==0.3.1`, MIT),
and its measures, written from the paper on rdkit and fcd.

Generated molecules are SMILES, one a string. `valid` is the share that rdkit reads;
every other measure is of those alone, most of them as often as they were drawn.
Distances to a test set are to the statistics of the whole set that the wheel holds."""

import csv
import gzip
import io
import pickle
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DATA = "moses/dataset/data"
SETS = ("train", "test", "test_scaffolds")
FILTERS = ("moses/metrics/mcf.csv", "moses/metrics/wehi_pains.csv")
FIRST = 10_000  # molecules among which the share of different ones is taken
ALLOWED = frozenset(("C", "N", "S", "O", "F", "Cl", "Br", "H"))
LARGEST_RING = 7
FEWEST_RINGS = 2  # of a scaffold that counts
RADIUS = 2  # of Morgan's fingerprints
BITS = 1024
ROWS = 4096  # of a block of similarities


class Statistics(pickle.Unpickler):
    """Reads what the wheel keeps of a test set. Its file is a pickle, which may call
    nothing but these makers of arrays and counts."""

    MAKERS = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,
        ("collections", "Counter"): Counter,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return as_bytes
        if (module, name) not in self.MAKERS:
            raise ValueError(f"statistics of MOSES name {module}.{name}: not read")
        return self.MAKERS[module, name]


def as_bytes(text: str, encoding: str) -> bytes:
    """Return a text as the bytes that a pickle of Python 2 meant by it."""
    return text.encode(encoding)


@dataclass(frozen=True)
class Moses:
    """The files of the benchmark, in its wheel."""

    wheel: Path

    def read(self, name: str) -> bytes:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(name)

    def molecules(self, split: str) -> list[str]:
        text = gzip.decompress(self.read(f"{DATA}/{split}.csv.gz")).decode()
        rows = text.split()
        assert rows[0] == "SMILES", rows[0]
        return rows[1:]

    def statistics(self, split: str) -> dict[str, dict[str, Any]]:
        """Return what the benchmark keeps of a test set: "FCD" (mu, sigma), "SNN"
        (fps), "Frag" (frag), "Scaf" (scaf)."""
        with zipfile.ZipFile(io.BytesIO(self.read(f"{DATA}/{split}_stats.npz"))) as npz:
            array = io.BytesIO(npz.read("stats.npy"))
        version = np.lib.format.read_magic(array)
        assert version == (1, 0), version
        np.lib.format.read_array_header_1_0(array)
        content = Statistics(array, encoding="latin1").load()
        return content.item()

    @cached_property
    def filters(self) -> list:
        """Return the patterns of structures that the data are without."""
        from rdkit import Chem

        patterns = []
        mcf, pains = (self.read(name).decode() for name in FILTERS)
        for row in csv.DictReader(io.StringIO(mcf)):
            patterns.append(Chem.MolFromSmarts(row["smarts"]))
        for row in csv.reader(io.StringIO(pains)):
            patterns.append(Chem.MolFromSmarts(row[0].strip()))
        return patterns


def read_molecule(smiles: str) -> Any:
    """Return rdkit's molecule, or None for a text that is none."""
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    if not smiles:
        return None
    return Chem.MolFromSmiles(smiles)


def canonical(smiles: Iterable[str]) -> tuple[list, list[str]]:
    """Return the molecules among these texts and their canonical SMILES."""
    from rdkit import Chem

    molecules = []
    texts = []
    for text in smiles:
        molecule = read_molecule(text)
        if molecule is not None:
            molecules.append(molecule)
            texts.append(Chem.MolToSmiles(molecule))
    return molecules, texts


def passes(molecule: Any, filters: Sequence) -> bool:
    """Return whether a molecule could be one of the data: small rings, no charge, few
    elements, none of the structures that chemists avoid."""
    from rdkit import Chem

    rings = molecule.GetRingInfo().AtomRings()
    if any(len(ring) > LARGEST_RING for ring in rings):
        return False
    for atom in molecule.GetAtoms():
        if atom.GetFormalCharge() != 0 or atom.GetSymbol() not in ALLOWED:
            return False
    whole = Chem.AddHs(molecule)
    return not any(whole.HasSubstructMatch(pattern) for pattern in filters)


def fingerprints(molecules: Sequence) -> Tensor:
    """Return Morgan's fingerprints, (N, BITS) uint8 of 0 and 1."""
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=RADIUS, fpSize=BITS)
    rows = np.zeros((len(molecules), BITS), dtype=np.uint8)
    for row, molecule in zip(rows, molecules, strict=True):
        row[:] = generator.GetFingerprintAsNumPy(molecule)
    return torch.from_numpy(rows)


def tanimoto(a: Tensor, b: Tensor) -> Tensor:
    """Return the similarities of fingerprints (N, BITS) and (M, BITS), (N, M): bits of
    both / bits of either."""
    a = a.float()
    b = b.float()
    both = a @ b.T
    return both / (a.sum(dim=1)[:, None] + b.sum(dim=1) - both)


def nearest(generated: Tensor, reference: Tensor) -> float:
    """Return SNN: the mean similarity of a generated molecule to the nearest one of the
    reference."""
    best = torch.zeros(len(generated))
    for start in range(0, len(generated), ROWS):
        rows = generated[start : start + ROWS]
        for block in reference.split(ROWS):
            most = tanimoto(rows, block).amax(dim=1)
            best[start : start + ROWS] = torch.maximum(best[start : start + ROWS], most)
    return float(best.double().mean())


def diversity(generated: Tensor) -> float:
    """Return IntDiv: 1 - the mean similarity of two generated molecules."""
    total = 0.0
    for rows in generated.split(ROWS):
        for block in generated.split(ROWS):
            total += float(tanimoto(rows, block).double().sum())
    return 1 - total / len(generated) ** 2


def fragments(molecules: Iterable) -> Counter:
    """Count the fragments of molecules that are cut at BRICS bonds."""
    from rdkit import Chem
    from rdkit.Chem import AllChem

    counts: Counter = Counter()
    for molecule in molecules:
        pieces = AllChem.FragmentOnBRICSBonds(molecule)
        counts.update(Chem.MolToSmiles(pieces).split("."))
    return counts


def scaffolds(molecules: Iterable) -> Counter:
    """Count the Bemis-Murcko scaffolds of molecules: rings and what links them."""
    from rdkit import Chem
    from rdkit.Chem.Scaffolds import MurckoScaffold

    counts: Counter = Counter()
    for molecule in molecules:
        scaffold = MurckoScaffold.GetScaffoldForMol(molecule)
        if scaffold.GetRingInfo().NumRings() >= FEWEST_RINGS:
            counts[Chem.MolToSmiles(scaffold)] += 1
    return counts


def cosine(a: Counter, b: Counter) -> float:
    product = sum(count * b[key] for key, count in a.items())
    if not product:
        return 0.0
    squares = [sum(count**2 for count in counts.values()) for counts in (a, b)]
    return product / (squares[0] * squares[1]) ** 0.5


def chemnet(smiles: list[str]) -> np.ndarray:
    """Return the activations of ChemNet's last layer on canonical SMILES, (N, 512)."""
    import fcd

    return fcd.get_predictions(fcd.load_ref_model(), smiles, n_jobs=0)


def normal(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and covariance of rows (N, F)."""
    return values.mean(axis=0), np.cov(values.T)


def frechet(
    a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]
) -> float:
    """Return the squared Frechet distance of two normal distributions of mean m and
    covariance C: |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))."""
    values, vectors = np.linalg.eigh(a[1])
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    # C_a C_b has the eigenvalues of this symmetric matrix.
    product = np.linalg.eigvalsh(root @ b[1] @ root)
    distance = np.square(a[0] - b[0]).sum() + np.trace(a[1]) + np.trace(b[1])
    return float(distance - 2 * np.sqrt(product.clip(min=0)).sum())


def measures(
    generated: Sequence[str], moses: Moses, training: frozenset[str]
) -> dict[str, float]:
    """Return the row of MOSES' table for these molecules. training: canonical SMILES
    that are not novel."""
    molecules, texts = canonical(generated)
    row = {"valid": len(molecules) / len(generated)}
    if len(molecules) < 2:  # which have no covariance
        return row
    different = set(texts)
    row["unique"] = len(set(texts[:FIRST])) / len(texts[:FIRST])
    row["novelty"] = len(different - training) / len(different)
    passing = sum(passes(molecule, moses.filters) for molecule in molecules)
    row["filters"] = passing / len(molecules)
    prints = fingerprints(molecules)
    row["IntDiv"] = diversity(prints)
    of_generated = normal(chemnet(texts))
    pieces = fragments(molecules)
    frames = scaffolds(molecules)
    for split, name in (("test", "test"), ("test_scaffolds", "scaffolds")):
        reference = moses.statistics(split)
        of_test = (reference["FCD"]["mu"], reference["FCD"]["sigma"])
        row[f"FCD {name}"] = frechet(of_generated, of_test)
        similar = torch.from_numpy(reference["SNN"]["fps"])
        row[f"SNN {name}"] = nearest(prints, similar)
        row[f"Frag {name}"] = cosine(pieces, reference["Frag"]["frag"])
        row[f"Scaf {name}"] = cosine(frames, reference["Scaf"]["scaf"])
    return row
