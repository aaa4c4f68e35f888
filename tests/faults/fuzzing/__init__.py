"""Parsers under inputs that nobody meant: each reads them, or says in one line what is wrong.

`python -m tests.faults --only fuzzing` tries 100,000 inputs on each parser, `test_fuzzing.py` a few.
"""
