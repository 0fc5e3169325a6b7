"""Break a bundle, ask for a verdict: what a wrong conversion would have shipped, and what happens on the way.

A model fault is built into a bundle as a broken converter would: the room builds the changed model, and the bundle gets
the goldens of the right one under a seal that fits. Nothing but its answers gives it away.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

import packager
from packager.bundle import SEAL, VERDICT
from packager.errors import PackagerError
from packager.parity import read_golden
from packager.results import Report
from tests.faults.files import FILE_FAULTS, Harm, cut, forge_verdict
from tests.faults.honest import session
from tests.faults.models import MODEL_FAULTS, Change, witness
from tests.sealing import reseal

NAME = "witness"
REFUSED = (2, 6)
"""Exit statuses that refuse a bundle: it isn't one, or it failed. Another means that packager itself failed."""


@dataclass(frozen=True)
class Outcome:
    """One fault: of which kind, whether it was caught, and by what words.

    ``allowed`` faults change the answers, whatever computes them, by less than the kind's tolerance allows: they are
    no fault by the rules that its bundles are judged by, and none that those could see.
    """

    kind: str
    fault: str
    caught: bool
    words: str
    allowed: bool = False


@dataclass(frozen=True)
class Subject:
    """A kind with a good bundle of the witness, and the manifest's lines for it."""

    kind: str
    bundle: Path
    archive: Path
    lines: str


def build(kind: str, proto: onnx.ModelProto, folder: Path, lines: str = "", *, verify: bool = True) -> Report:
    """Build one target of a model in a folder of its own."""
    folder.mkdir(parents=True)
    onnx.save(proto, folder / f"{NAME}.onnx")
    manifest = folder / "packager.toml"
    text = f'[model]\npath = "{NAME}.onnx"\n[golden]\nallow_nan = true\n[targets.{kind}]\n{lines}\n'
    manifest.write_text(text, encoding="utf-8")
    return packager.build(manifest=manifest, out=folder / "dist", cache=False, verify=verify)


def subject(kind: str, folder: Path, lines: str = "") -> Subject:
    """A good bundle, which passed."""
    report = build(kind, witness(), folder, lines)
    (result,) = report.targets
    assert result.exit_code == 0, f"{kind}: {result.message}"
    assert result.bundle is not None and result.archive is not None
    return Subject(kind, folder / "dist" / result.bundle, folder / "dist" / result.archive, lines)


def judged(kind: str, fault: str, bundle: Path) -> Outcome:
    """What ``packager verify`` says."""
    found = packager.verify(bundle)
    words = found.error.message if found.error is not None else ""
    if found.verdict is not None and found.verdict.status != "passed":
        words = "; ".join(found.verdict.failures) or found.verdict.status
    return Outcome(kind, fault, found.exit_code in REFUSED, " ".join(words.split())[:200])


def model_fault(good: Subject, fault: str, change: Change, folder: Path) -> Outcome:
    """A bundle of a changed model, with the goldens of the right one."""
    proto = witness()
    change(proto)
    try:
        (result,) = build(good.kind, proto, folder, good.lines, verify=False).targets
    except PackagerError as error:  # the reference already refuses the changed model
        return Outcome(good.kind, fault, True, f"not built: {' '.join(error.message.split())[:180]}")
    if result.exit_code:
        return Outcome(good.kind, fault, True, f"not built: {' '.join(result.message.split())[:180]}")
    bundle = folder / "dist" / str(result.bundle)
    shutil.rmtree(bundle / "golden")
    shutil.copytree(good.bundle / "golden", bundle / "golden")
    reseal(bundle)
    outcome = judged(good.kind, fault, bundle)
    return outcome if outcome.caught else replace(outcome, allowed=allowed(good, proto))


def allowed(good: Subject, proto: onnx.ModelProto) -> bool:
    """Whether the answers of a changed model, in ONNX Runtime in float, are within the tolerance of the kind's goldens:
    those of the model, and those of the transformed one where they are judged as well."""
    golden = read_golden(good.bundle / "golden")
    answer = session(proto, optimised=False)
    return all(golden.judge(case, answer(case.inputs)).passed for case in golden.cases)


def file_fault(good: Subject, fault: str, harm: Harm, folder: Path) -> Outcome:
    """A good bundle whose files were harmed, under the seal it had."""
    bundle = Path(shutil.copytree(good.bundle, folder))
    harm(bundle)
    return judged(good.kind, fault, bundle)


def other_faults(good: Subject, folder: Path) -> Iterator[Outcome]:
    """A cut archive, a file of another bundle, and a forged verdict of a bundle that answers wrongly."""
    folder.mkdir()
    archive = folder / good.archive.name
    shutil.copyfile(good.archive, archive)
    cut(archive)
    found = packager.verify(archive)
    words = found.error.message if found.error is not None else ""
    yield Outcome(good.kind, "the archive cut", found.exit_code in REFUSED, " ".join(words.split())[:200])
    stranger = folder / "stranger.tar.gz"
    with tarfile.open(stranger, "w:gz") as made:
        made.add(Path(__file__), "elsewhere/../../harness.py")
    found = packager.verify(stranger)
    words = found.error.message if found.error is not None else ""
    yield Outcome(
        good.kind, "an archive that leaves its folder", found.exit_code in REFUSED, " ".join(words.split())[:200]
    )
    outcome = model_fault(good, "a forged verdict", MODEL_FAULTS["a bias zeroed"], folder / "forged")
    (bundle,) = [path.parent for path in (folder / "forged/dist").rglob(SEAL)]
    if (bundle / VERDICT).exists():
        forge_verdict(bundle)
        outcome = judged(good.kind, "a forged verdict", bundle)
    yield outcome


def all_faults(good: Subject, folder: Path) -> Iterator[Outcome]:
    """Every fault on one kind, one after another; what each needs on disk is removed again."""
    for number, (fault, change) in enumerate(MODEL_FAULTS.items()):
        yield model_fault(good, fault, change, folder / f"model-{number}")
        shutil.rmtree(folder / f"model-{number}", ignore_errors=True)
    for number, (fault, harm) in enumerate(FILE_FAULTS.items()):
        yield file_fault(good, fault, harm, folder / f"file-{number}")
        shutil.rmtree(folder / f"file-{number}", ignore_errors=True)
    yield from other_faults(good, folder / "other")
