"""The smoke run on WebGPU: one golden case, on a GPU in software, with the CPU kept out.

It shows that the build for WebGPU starts, takes the model and answers rightly; speed and a real GPU's rounding are not
its subject. What it found is a line of its own in the verdict, whose level and numbers are those of WebAssembly.
"""

from __future__ import annotations

from packager import parity
from packager.bundle import Bundle
from packager.errors import ToolchainMissing, VerificationError
from packager.targets.web.browser import SOFTWARE_GPU, browsing
from packager.targets.web.conversation import Page, ProgramGone, greeted, heard, text_of, time_limit
from packager.targets.web.planning import WEBGPU_FOLDER
from packager.targets.web.server import Channel, Site
from packager.targets.web.wire_format import decode, encode

ON_WEBGPU = (
    ("backend", "webgpu"),
    ("session", {"extra": {"session": {"disable_cpu_ep_fallback": "1"}}}),
)
"""Options of the loader: nothing may quietly fall back to the CPU."""

NOT_TAKEN = "onnxruntime-web can't load the model"
"""What the loader says where runtime and files are well, and some node has no implementation on WebGPU."""


def has_webgpu(bundle: Bundle) -> bool:
    """Whether the bundle ships the build for WebGPU."""
    return any(file.path.startswith(f"{WEBGPU_FOLDER}/") for file in bundle.files)


def smoke_run(browser: str | None, site: Site, channel: Channel, bundle: Bundle) -> str:
    """Run the first golden case on WebGPU; gives a line for the verdict.

    A model that needs the CPU for some of its nodes, or a browser without an adapter, is told and is no failure.

    Raises:
        VerificationError: it ran, and its answers are not the goldens'.
    """
    if browser is None:
        return "not run: there is no browser here"
    with browsing(browser, site.page(channel), SOFTWARE_GPU) as program:
        try:
            page = greeted(channel, program, time_limit(bundle))
        except ToolchainMissing as error:
            return f"not run: {error.message}"
        except VerificationError as error:
            if NOT_TAKEN not in error.message:
                raise  # a file of the bundle is missing or broken
            return f"not run: {error.message}"
        if page.host["backend"] != "webgpu":
            return f"not run: {page.host['fallback']}"
        return _first_case(page, bundle)


def _first_case(page: Page, bundle: Bundle) -> str:
    golden = parity.read_golden(bundle.folder / "golden")
    case = golden.cases[0]
    page.channel.cases.put(encode(case.inputs))
    try:
        said = heard(page.channel, page.program, time_limit(bundle))
    except (ProgramGone, VerificationError) as error:  # gone, or too slow for a GPU in software
        return f"not run: {error}"
    if said.kind != "result":
        return f"not run: {text_of(said)}"
    outputs = decode(said.body, bundle.signature)
    found = golden.judge(case, outputs)
    if not found.passed:
        raise VerificationError(
            f"on WebGPU the bundle's answers are not its goldens: case '{case.name}': {'; '.join(found.reasons)}",
            "leave `webgpu` out, or choose another precision",
        )
    apart = max((output.metrics.max_abs or 0.0 for output in found.outputs if output.metrics), default=0.0)
    return f"case '{case.name}' passed on a software adapter without the CPU, max abs {apart:.3g}"
