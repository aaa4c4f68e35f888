"""Pipeline engines side by side: ours, DeepSpeed's and torch's, with the same weights and data, in one run.

`pipelines` has the engines, and the model in plain torch, which the rivals run and which is the reference. `turns`
compares their numbers with plain torch and takes their times, `results` is the file of a measurement, `page` shows it.
"""
