"""Checks of a machine, or of the hosts of a hostfile, before a run.

`probe.py` is one program that is sent to each host and answers with facts. `examination.py` runs it, and `facts.py` has
the answers. The table of checks (`report.py`) judges them: `host_checks.py` and `network_checks.py`.
"""
