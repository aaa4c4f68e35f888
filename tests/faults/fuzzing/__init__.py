"""Parsers with random inputs: each reads them, or reports an error in one line.

`python -m tests.faults --only fuzzing` tries 100,000 inputs on each parser, `test_fuzzing.py` a few.
"""
