"""Launches on hosts: hostfiles, DeepSpeed's launcher, and the end of all of its processes."""
