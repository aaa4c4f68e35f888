"""Pipeline engines side by side: ours, DeepSpeed's and torch's, with the same weights and data, in one run.

`pipelines` has the engines, and the model in plain torch, which the rivals run and all are held against. `turns`
holds their
numbers against plain torch and takes their times, `results` is what is kept of it, and `page` shows it.
"""
