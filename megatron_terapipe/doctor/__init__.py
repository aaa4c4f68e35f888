"""Checks of a machine, or of the hosts of a hostfile, before a run.

`probe.py` is one program that is sent to each host and answers with facts (`facts.py`). `examination.py` runs it, and
`checks.py` has the table of checks, which judge the facts, and `findings.py` their report.
"""
