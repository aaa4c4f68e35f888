"""What is wrong with a machine, or with the hosts of a hostfile, and what mends it.

`probe.py` is one program that is sent to each host and answers with facts. `examination.py` asks it; `facts.py` are the
answers. The table of checks (`report.py`) judges them: `host_checks.py` and `network_checks.py`.
"""
