"""The service around a model: the Open Inference Protocol (KServe v2) over HTTP and gRPC.

:mod:`.protocol` turns requests into arrays and arrays into answers, :mod:`.messages` are gRPC's message types,
:mod:`.batching` runs requests together, :mod:`.core` is what both front ends share, :mod:`.web` and :mod:`.rpc` are the
front ends, :mod:`.openapi` describes the first, :mod:`.metrics` count, and :mod:`.run` starts and stops it all.

The folder ships in bundles as it is, so it needs Python, numpy and what ``requirements.txt`` names, nothing else.
"""
