"""Adapters: other libraries' kernels under this contract, reached by name.

Each imports its library when it is planned, and nothing before.
"""
