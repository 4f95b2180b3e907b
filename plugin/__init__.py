"""Adapters: one module per host framework, installed as `megatron_lossagg_plugin`.

Each maps a host's own hook to a `LossAggregator` and undoes what that host applies afterwards.
Importing this package, or an adapter, imports no host and changes nothing.
"""
