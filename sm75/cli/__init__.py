"""The commands of ``orchestrator.py``, one module a part of the work; what they do is elsewhere.

Imports of that are made inside the commands: a start must cost less than 0.3 s.
"""
