"""Conversions that are wrong in the ways toolchains are: what the tiny room does to a model where a test asks it."""

from __future__ import annotations

from pathlib import Path


def halve_blindly(path: Path) -> None:
    """Every node in float16, whatever it does to masks and squares, with each result truly rounded."""
    import onnx_ir as ir

    from packager.float16_rewrite import rewrite
    from packager.float16_rounding import round_between
    from packager.float16_types import infer_types

    model = ir.load(path)
    infer_types(model)
    rewrite(model, (), ir.DataType.FLOAT16, keep_io=True)
    round_between(model, ir.DataType.FLOAT16)
    ir.save(model, path)


def spoil_scale(path: Path) -> None:
    """The scale of the last QuantizeLinear and DequantizeLinear pair is four times too small: what is large is cut."""
    import onnx_ir as ir

    model = ir.load(path)
    nodes = [node for node in model.graph if node.op_type == "QuantizeLinear"]
    scale = nodes[-1].inputs[1]
    assert scale is not None and scale.const_value is not None
    scale.const_value = ir.tensor(scale.const_value.numpy() / 4, name=scale.name)
    ir.save(model, path)
