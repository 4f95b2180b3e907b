"""Adapters: one public module per host framework, installed as `megatron_lossagg_plugin`.

Each maps a host's own hook to a `LossAggregator` and undoes what that host applies afterwards.
Modules with a leading underscore are parts of them. Importing this package, or an adapter, imports
no host and changes nothing.
"""
