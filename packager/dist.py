"""The ``dist/`` folder: archives, checksums and indexes of what one run made.

Archives are byte-identical from run to run: members sorted, owners and times zeroed. Only bundles that passed are
archived; ``artifacts.json`` and ``checksums.txt`` list exactly the archives of this run.
"""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path
from xml.etree import ElementTree

from packager.files import list_files, to_json, write_text
from packager.model import sha256_file
from packager.results import Report, TargetResult

INDEXES = ("checksums.txt", "artifacts.json", "report.json", "report.html", "junit.xml")
"""What :func:`write_indexes` writes, the checksums last."""

GZIP_LEVEL = 6
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time a ZIP entry can carry."""


def archive(folder: Path, target: Path, name: str) -> None:
    """Pack ``folder`` as ``target`` (``.tar.gz`` or ``.zip``), its files under the top folder ``name``."""
    if target.name.endswith(".zip"):
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=GZIP_LEVEL) as zipped:
            for path in list_files(folder):
                info = zipfile.ZipInfo(f"{name}/{path}", ZIP_EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = _mode(folder / path) << 16
                info.file_size = (folder / path).stat().st_size
                with (folder / path).open("rb") as source, zipped.open(info, "w") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
        return
    with (
        target.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in list_files(folder):
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = (folder / path).stat().st_size
            member.mode = _mode(folder / path)
            with (folder / path).open("rb") as source:
                tar.addfile(member, source)


def _mode(path: Path) -> int:
    executable = bool(path.stat().st_mode & stat.S_IXUSR)
    return 0o755 if executable else 0o644


def write_indexes(out: Path, report: Report) -> None:
    """Write ``artifacts.json``, ``checksums.txt``, ``report.json``, ``report.html`` and ``junit.xml`` into ``out``."""
    from packager.report import report_document, report_html

    artifacts = [_artifact(result) for result in report.targets if result.bundle is not None]
    write_text(out / "artifacts.json", to_json({"schema": "packager.artifacts/1", "artifacts": artifacts}))
    lines = [
        f"{result.archive_sha256}  {result.archive}\n"
        for result in report.targets
        if result.archive is not None and result.archive_sha256 is not None
    ]
    write_text(out / "report.json", to_json(report_document(report)))
    write_text(out / "report.html", report_html(report))
    write_text(out / "junit.xml", junit(report))
    lines.append(f"{sha256_file(out / 'artifacts.json')}  artifacts.json\n")
    write_text(out / "checksums.txt", "".join(lines))


def _artifact(result: TargetResult) -> dict[str, object]:
    verdict = result.verdict
    return {
        "target": result.target,
        "kind": result.kind,
        "precision": result.precision,
        "status": result.status,
        "level": verdict.level if verdict else "none",
        "max_abs": verdict.max_abs if verdict else None,
        "bundle": result.bundle,
        "bundle_digest": result.bundle_digest,
        "bytes": result.bytes,
        "archive": result.archive,
        "archive_sha256": result.archive_sha256,
        "archive_bytes": result.archive_bytes,
    }


def junit(report: Report) -> str:
    """JUnit XML: one suite for the run, one test case per target, as CI servers read it."""
    broken = [result for result in report.targets if result.exit_code]
    skipped = [result for result in report.targets if not result.exit_code and result.status != "passed"]
    suite = ElementTree.Element(
        "testsuite",
        name=_xml_text(f"packager {report.name} {report.version}"),
        tests=str(len(report.targets)),
        failures=str(len(broken)),
        errors="0",
        skipped=str(len(skipped)),
        time=f"{report.seconds:.3f}",
    )
    for result in report.targets:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_xml_text(f"packager.{result.kind}"),
            name=_xml_text(result.target),
            time=f"{result.seconds:.3f}",
        )
        body = "\n".join([result.message, *result.diagnosis, *([f"hint: {result.hint}"] if result.hint else [])])
        if result.exit_code:
            failure = ElementTree.SubElement(case, "failure", type=result.status)
            failure.set("message", _xml_text(result.message.splitlines()[0] if result.message else result.status))
            failure.text = _xml_text(body)
        elif result.status != "passed":
            ElementTree.SubElement(case, "skipped", message=_xml_text(result.message or result.status))
        if result.verdict is not None:
            verdict = result.verdict
            ElementTree.SubElement(case, "system-out").text = _xml_text(
                f"level {verdict.level}, {verdict.runtime} {verdict.version}, max abs {verdict.max_abs}"
            )
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _xml_text(text: str) -> str:
    """Text without the characters XML 1.0 can't hold (section 2.2, "Characters")."""
    return "".join(
        char
        if char in "\t\n\r" or 0x20 <= ord(char) <= 0xD7FF or 0xE000 <= ord(char) <= 0xFFFD or ord(char) > 0xFFFF
        else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )
