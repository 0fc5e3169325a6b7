"""Runs an ONNX model on the CPU that executes this: a program of its own, for an emulated processor.

    python old_cpu.py MODEL FEEDS.npz ANSWERS.npz [KEY=VALUE ...]

``KEY=VALUE`` are session settings of ONNX Runtime. Graph optimisation is what packager's reference uses for int8.
"""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime as ort


def main(model: str, feeds: str, answers: str, *settings: str) -> None:
    """Run once and write the outputs by name."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    for setting in settings:
        options.add_session_config_entry(*setting.split("="))
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    np.savez(answers, **dict(zip(names, session.run(names, dict(np.load(feeds))), strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
