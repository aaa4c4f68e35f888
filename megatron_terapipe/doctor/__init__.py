"""What is wrong with a machine, or with the hosts of a hostfile, and what mends it.

A probe collects facts on each host (`probe/`), and `probes.py` runs it there. Facts are data (`facts.py`). Pure
functions of facts say what is wrong (`checks/`), one line each.
"""
