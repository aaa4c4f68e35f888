"""What could be run: the values of every dimension, the rules that strategies must keep, and what they reject."""
