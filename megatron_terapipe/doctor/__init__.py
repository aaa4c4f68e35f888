"""What is wrong with a machine, or with the hosts of a hostfile, and what mends it.

A probe collects facts on each host (`probe.py`), and `examination.py` runs it there. Facts are data (`facts.py`).
Pure functions of facts report what is wrong (`host_checks.py`, `network_checks.py`), one line each.
"""
